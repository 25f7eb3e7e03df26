"""The blocking API is the asynchronous one, name for name: this fails when either gains a name.

Every class here is compared with its twin: public names, and for each of them the parameters with
their kinds, defaults and annotations, what it gives, and whether it is documented. The only
differences are those that are listed here. `tools.sync` generates most of it from the source.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import tenure
from tenure import blocking, events
from tenure import recipes as recipe_twins
from tenure._client import (
    client,
    decorators,
    election,
    lease,
    mutex,
    rate,
    runs,
    semaphore,
    session,
    session_handle,
    sessions,
    several,
    ticket,
)
from tenure._client import watch as watches
from tenure._client.client_core import Kept
from tenure._client.handles import AsyncHandle
from tenure.blocking import recipes
from tenure.blocking.wrapper import SyncWrapper
from tenure.engines.contract import SessionEvents
from tools import sync, sync_table

PAIRS: dict[type, type] = {
    client.Client: blocking.Client,
    decorators.Decorator: blocking.Decorator,
    election.Election: blocking.Election,
    election.Leadership: blocking.Leadership,
    events.EventStream: blocking.EventStream,
    lease.Lease: blocking.Lease,
    several.Leases: blocking.Leases,
    mutex.Mutex: blocking.Mutex,
    rate.Rate: blocking.Rate,
    rate.Taken: blocking.Taken,
    runs.RunLease: blocking.RunLease,
    semaphore.Semaphore: blocking.Semaphore,
    ticket.Ticket: blocking.Ticket,
    session.Session: blocking.Session,
    session_handle.SessionHandle: blocking.SessionHandle,
    sessions.Attempt: blocking.Attempt,
    sessions.Attempts: blocking.Attempts,
    watches.Watch: blocking.Watch,
    recipe_twins.Barrier: recipes.Barrier,
    recipe_twins.Changes: recipes.Changes,
    recipe_twins.CountDownLatch: recipes.CountDownLatch,
    recipe_twins.Counter: recipes.Counter,
    recipe_twins.Group: recipes.Group,
    recipe_twins.RWLock: recipes.RWLock,
    recipe_twins.DoubleBarrier: recipes.DoubleBarrier,
    recipe_twins.InnerLease: recipes.InnerLease,
    recipe_twins.Party: recipes.Party,
    recipe_twins.Pool: recipes.Pool,
    recipe_twins.PoolItem: recipes.PoolItem,
    recipe_twins.ReentrantMutex: recipes.ReentrantMutex,
    recipe_twins.ServiceRegistry: recipes.ServiceRegistry,
    recipe_twins.SharedConfig: recipes.SharedConfig,
    recipe_twins.States: recipes.States,
}

FUNCTIONS: dict[Any, Any] = {recipe_twins.run_once: recipes.run_once}
"""Functions that are other ones here, with the same parameters."""

MADE_BY_TENURE = {"Changes", "InnerLease", "Party", "PoolItem", "States"}
"""Classes whose objects a program gets, and does not construct."""

ASYNC_ONLY = {"Once"}

RENAMED = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
"""What has another name, by the name in the asynchronous API."""

BACK = {here: there for there, here in RENAMED.items()}

DIFFERENT = {
    "Client.all_of": "takes no call: one of lock() or acquire() returns a lease in a thread",
    "Client.any_of": "takes no call: one of lock() or acquire() returns a lease in a thread",
    "Changes.__next__": "is inherited from what all streams share",
    "EventStream.__next__": "is inherited from what all streams share",
    "Lease.wait_lost": "takes a timeout, since a thread cannot be cancelled; None when it is over",
}
"""What has other parameters, or another result, and why."""

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
        if part not in SyncWrapper.__mro__ and part.__module__.startswith("tenure")
        for name, thing in vars(part).items()
        if is_public(name)
    }


def gives(annotation: str) -> str:
    """What a blocking call gives where the asynchronous one is annotated with this."""
    annotation = re.sub(r"^Once\[(.*)\]$", r"\1", annotation)
    return re.sub(r"Awaitable\[(\w+)\]", r"\1", annotation)


def shape(function: Callable[..., object], kind: type | None = None) -> list[tuple[object, ...]]:
    """The parameters and the result; an object of the class itself is ``Self``."""
    signature = inspect.signature(function)
    parameters = [
        (each.name, each.kind, each.default, gives(str(each.annotation)))
        for each in signature.parameters.values()
    ]
    result = gives(str(signature.return_annotation))
    selves = {base.__name__ for base in kind.__mro__} if kind is not None else set()
    if result == "L":  # the variable of a base class that several wrappers share
        result = "Lease"
    return [*parameters, ("->", "Self" if result.partition("[")[0] in selves else result)]


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
    others: dict[Any, Any] = {**PAIRS, **FUNCTIONS}
    for name in set(recipes.__all__) - {"Source"}:
        theirs = getattr(recipe_twins, name)
        expected: Any = others.get(theirs, theirs) if callable(theirs) else theirs
        assert getattr(recipes, name) is expected, name
        if theirs in FUNCTIONS:
            assert shape(expected) == shape(theirs), name
        elif expected is not theirs and name not in MADE_BY_TENURE:
            assert shape(expected.__init__) == shape(theirs.__init__), name


def test_connect_takes_the_same() -> None:
    assert shape(blocking.connect) == shape(tenure.connect)


@both
def test_it_has_the_same_public_names(there: type, here: type) -> None:
    assert sorted(names_here(here)) == sorted(names_there(there))


@both
def test_a_method_takes_and_gives_the_same(there: type, here: type) -> None:
    for name, theirs, mine in methods(there, here):
        if not any(f"{kind.__name__}.{name}" in DIFFERENT for kind in here.__mro__):
            assert shape(mine, here) == shape(theirs, there), f"{here.__name__}.{name}"


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
        there, here = next(pair for pair in PAIRS.items() if pair[0].__name__ == kind)
        theirs = getattr(there, BACK.get(name, name))
        assert shape(getattr(here, name), here) != shape(theirs, there), path


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


# What is generated


def test_the_source_is_what_make_sync_writes() -> None:
    for name, file in sync_table.FILES.items():
        source = (sync.SOURCE / name).read_text(encoding="utf-8")
        assert source == sync.generate(file), f"run 'make sync': {name}"


def test_the_check_finds_what_was_edited_by_hand(tmp_path: Path) -> None:
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(sync.SOURCE, tmp_path / "src" / "tenure", ignore=without)
    shutil.copytree(sync.ROOT / "tools", tmp_path / "tools")
    shutil.copy(sync.ROOT / "pyproject.toml", tmp_path)
    check = [sys.executable, "-m", "tools.sync", "--check"]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    edited = tmp_path / "src" / "tenure" / "blocking" / "lease.py"
    edited.write_text(edited.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    found = subprocess.run(check, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert "blocking/lease.py" in found.stderr


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("``async with m.lock() as lease``, or ``await`` it.", "``with m.lock() as lease``."),
        ("``async with`` it, or ``await`` it.", "``with`` it."),
        ("x = await call()", "x = call()"),
        ("the calling task; call `aclose`", "the calling thread; call `close`"),
    ],
)
def test_documentation_is_put_in_words_for_threads(there: str, here: str) -> None:
    assert sync.documentation(there) == here


def test_every_public_name_is_documented_in_the_source() -> None:
    for path in (sync.SOURCE / "blocking").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                if any(ast.unparse(each) == "overload" for each in node.decorator_list):
                    continue
                assert ast.get_docstring(node), f"{path.name}: {node.name}"
