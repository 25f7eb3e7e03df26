"""The blocking API is the asynchronous one, name for name: this fails when either gains a name.

Every class here is compared with its twin: public names, and for each of them the parameters with
their kinds, defaults and annotations, what it gives, and whether it is documented. The only
differences are those that `tenure.blocking.mirror` lists.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType

import pytest

import tenure
from tenure import blocking, events
from tenure import recipes as recipe_twins
from tenure._client import (
    client,
    election,
    lease,
    mutex,
    runs,
    semaphore,
    session,
    sessions,
)
from tenure._client import watch as watches
from tenure._client.handles import AsyncHandle
from tenure._client.keeper import Kept
from tenure.blocking import recipes
from tenure.blocking.mirror import BACK, DIFFERENT, RENAMED, Mirror
from tenure.blocking.session import Attempts
from tenure.blocking.watch import EventStream, Watch
from tenure.engines.contract import SessionEvents

PAIRS: dict[type, type] = {
    client.Client: blocking.Client,
    election.Election: blocking.Election,
    election.Leadership: blocking.Leadership,
    events.EventStream: EventStream,
    lease.Lease: blocking.Lease,
    mutex.Mutex: blocking.Mutex,
    runs.RunLease: blocking.RunLease,
    semaphore.Semaphore: blocking.Semaphore,
    semaphore.Ticket: blocking.Ticket,
    session.Session: blocking.Session,
    sessions.Attempt: blocking.Attempt,
    sessions.Attempts: Attempts,
    watches.Watch: Watch,
    recipe_twins.Barrier: recipes.Barrier,
    recipe_twins.Changes: recipes.Changes,
    recipe_twins.Group: recipes.Group,
    recipe_twins.RWLock: recipes.RWLock,
    recipe_twins.ServiceRegistry: recipes.ServiceRegistry,
    recipe_twins.SharedConfig: recipes.SharedConfig,
    recipe_twins.States: recipes.States,
}

ASYNC_ONLY = {"Once"}

# What an object of the asynchronous API keeps as a plain attribute is a property here.
ATTRIBUTE = re.compile(r"^        self\.([a-z]\w*) = ", re.MULTILINE)

# What an engine and the keeper call, and a program does not.
INNER = {*vars(SessionEvents), *vars(Kept)} - {"deadline", "max_stall"}

both = pytest.mark.parametrize(("there", "here"), PAIRS.items(), ids=lambda kind: kind.__name__)


def is_public(name: str) -> bool:
    return (
        (name not in INNER and not name.startswith("_"))
        or name in RENAMED
        or name in RENAMED.values()
    )


def names_there(kind: type) -> dict[str, object]:
    """The public names of an asynchronous class, by their names in the blocking one."""
    found: dict[str, object] = {}
    for part in reversed(kind.__mro__[:-1]):
        if not part.__module__.startswith("tenure") or part in AsyncHandle.__mro__:
            continue
        for name, thing in vars(part).items():
            if is_public(name) and not inspect.ismemberdescriptor(thing):
                found[RENAMED.get(name, name)] = thing
        if "__init__" in vars(part):
            for name in ATTRIBUTE.findall(inspect.getsource(vars(part)["__init__"])):
                found.setdefault(name, None)
    return found


def names_here(kind: type) -> dict[str, object]:
    return {
        name: thing
        for part in reversed(kind.__mro__[:-1])
        if part not in Mirror.__mro__ and part.__module__.startswith("tenure")
        for name, thing in vars(part).items()
        if is_public(name)
    }


def gives(annotation: str) -> str:
    """What a blocking call gives where the asynchronous one is annotated with this."""
    annotation = re.sub(r"^Once\[(.*)\]$", r"\1", annotation)
    return re.sub(r"Awaitable\[(\w+)\]", r"\1", annotation)


def shape(function: Callable[..., object]) -> list[tuple[object, ...]]:
    signature = inspect.signature(function)
    parameters = [
        (each.name, each.kind, each.default, gives(str(each.annotation)))
        for each in signature.parameters.values()
    ]
    return [*parameters, ("->", gives(str(signature.return_annotation)))]


def methods(there: type, here: type) -> Iterator[tuple[str, FunctionType, FunctionType]]:
    ours = names_here(here)
    for name, theirs in names_there(there).items():
        mine = ours.get(name)
        if isinstance(theirs, FunctionType) and isinstance(mine, FunctionType):
            yield name, theirs, mine


def test_it_exports_what_tenure_exports() -> None:
    assert sorted(blocking.__all__) == sorted(set(tenure.__all__) - ASYNC_ONLY)


def test_what_is_no_handle_is_the_same_object() -> None:
    for name in set(tenure.__all__) - ASYNC_ONLY - {"connect"}:
        theirs = getattr(tenure, name)
        expected = PAIRS.get(theirs, theirs) if isinstance(theirs, type) else theirs
        assert getattr(blocking, name) is expected, name


def test_the_recipes_are_the_same() -> None:
    assert sorted(recipes.__all__) == sorted(recipe_twins.__all__)
    for name in set(recipes.__all__) - {"Source"}:
        theirs = getattr(recipe_twins, name)
        expected = PAIRS.get(theirs, theirs) if isinstance(theirs, type) else theirs
        assert getattr(recipes, name) is expected, name
        if expected is not theirs and name not in {"States", "Changes"}:
            assert shape(expected.__init__) == shape(theirs.__init__), name


def test_connect_takes_the_same() -> None:
    assert shape(blocking.connect) == shape(tenure.connect)


@both
def test_it_has_the_same_public_names(there: type, here: type) -> None:
    assert sorted(names_here(here)) == sorted(names_there(there))


@both
def test_a_method_takes_and_gives_the_same(there: type, here: type) -> None:
    for name, theirs, mine in methods(there, here):
        if mine.__qualname__ not in DIFFERENT:
            assert shape(mine) == shape(theirs), f"{here.__name__}.{name}"


@both
def test_a_property_is_one_on_both_sides(there: type, here: type) -> None:
    ours = names_here(here)
    for name, theirs in names_there(there).items():
        mine = ours[name]
        assert isinstance(mine, property) is (theirs is None or isinstance(theirs, property)), name
        if isinstance(theirs, property):
            assert isinstance(mine, property)
            assert theirs.fget is not None
            assert mine.fget is not None
            assert shape(mine.fget) == shape(theirs.fget), name


@both
def test_it_is_documented_for_threads(there: type, here: type) -> None:
    for name, thing in {"": here, **names_here(here)}.items():
        if name.startswith("__"):
            continue
        text = inspect.getdoc(thing)
        assert text, f"{here.__name__}.{name} has no documentation"
        assert not re.search(r"\b(async|await\w*|aclose)\b", text), (
            f"{here.__name__}.{name}: {text}"
        )


def test_what_is_said_to_be_different_is_so() -> None:
    for path in DIFFERENT:
        kind, name = path.split(".")
        theirs = getattr(getattr(tenure, kind), BACK.get(name, name))
        assert shape(getattr(getattr(blocking, kind), name)) != shape(theirs), path


@pytest.mark.parametrize(("name", "side"), [("newcomer", "there"), ("newcomer", "here")])
def test_a_name_that_one_side_lacks_is_found(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutex.Mutex if side == "there" else blocking.Mutex, name, print_it, False)
    with pytest.raises(AssertionError):
        test_it_has_the_same_public_names(mutex.Mutex, blocking.Mutex)


def test_a_parameter_that_one_side_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutex.Mutex, "inspect", print_it)
    with pytest.raises(AssertionError):
        test_a_method_takes_and_gives_the_same(mutex.Mutex, blocking.Mutex)


def print_it(self: object, more: str = "") -> None:
    """For the tests of this test."""
