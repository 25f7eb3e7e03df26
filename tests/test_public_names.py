"""The public names are those listed here: adding one or taking one away is a decision."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import tenure
from tenure import blocking, errors, events, fencing, recipes
from tenure.blocking import recipes as blocking_recipes
from tenure.engines.contract import SessionEvents

PUBLIC = """
    LOSS_EXIT_STATUS
    AcquireTimeout AuthenticationFailed Deadlock EngineError EngineUnavailable InvalidArgument
    LeaseLost
    LeaseReleased Misuse NodeBusy NodeExists NodeNotFound RateExceeded SelfDeadlock SemaphoreBusy
    SemaphoreExists SemaphoreNotFound SessionClosed SessionExpired StaleToken TenureError
    Unsupported
    Attempt Attempts Client Decorator Election EventStream Leadership Lease Leases Mutex Rate
    RunLease
    Semaphore Session SessionHandle Taken Ticket Watch
    BlockedTask Capabilities LastRun Leader MutexHolder NodeConfig NodeDescription RateDescription
    Recovered RequestDescription SemaphoreDescription SessionDescription WaitGraph
    Clock Consistency CountersMode Duration Liveness OnDeadlock OnLoss Retry SessionState
    connect default_url
""".split()

ASYNC_ONLY = ["Once"]  # what a call that acquires gives before it is awaited

RECIPES = """
    Barrier CountDownLatch Counter DoubleBarrier Group Pool RWLock ReentrantMutex ServiceRegistry
    SharedConfig
    BrokenBarrier Change Changes Codec Endpoint InnerLease Joined Left Member Party PoolItem
    RunFailed Source States Updated
    dataclass_codec json_codec run_once
""".split()


FENCING = "Fence Fenced RedisFence SQLFence StaleToken".split()


# Names in annotations that are Python's own, a module, or a type variable.
EVERYWHERE = """
    AbstractAsyncContextManager AbstractContextManager
    Any Awaitable BaseException Callable ClassVar Coroutine Exception Final Generator Generic
    J L Literal Never None Protocol Sequence T TypeVar
""".split()

ENGINES_CALL = frozenset(vars(SessionEvents))
"""What an engine calls on a session, and a program does not."""

packages = pytest.mark.parametrize("package", [tenure, blocking], ids=lambda it: it.__name__)


def public(package: ModuleType) -> list[tuple[str, type | FunctionType]]:
    """The public classes and functions."""
    found = [(name, getattr(package, name)) for name in package.__all__]
    return [(name, thing) for name, thing in found if isinstance(thing, type | FunctionType)]


def hints(thing: type | FunctionType) -> Iterator[tuple[str, str]]:
    """The annotations of a function, or of a class's fields and its public methods."""
    if isinstance(thing, FunctionType):
        yield from ((place, str(text)) for place, text in thing.__annotations__.items())
        return
    for place, text in vars(thing).get("__annotations__", {}).items():
        if not place.startswith("_"):
            yield place, str(text)
    for name, member in inspect.getmembers(thing):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or name in ENGINES_CALL:
            continue
        if isinstance(function, FunctionType):
            yield from ((f"{name}: {place}", text) for place, text in hints(function))


def modules() -> list[str]:
    return [
        module.name
        for module in pkgutil.walk_packages(tenure.__path__, "tenure.")
        if not module.name.endswith("__main__")
    ]


@pytest.mark.parametrize("module", ["tenure", "tenure.blocking"])
def test_the_reference_describes_each_public_name(module: str) -> None:
    pages = Path(__file__).parent.parent / "docs" / "reference"
    described = {
        name
        for page in pages.glob("*.md")
        for name in re.findall(rf"^\.\. auto\w+:: {module}\.(\w+)$", page.read_text(), re.MULTILINE)
    }
    names = set(importlib.import_module(module).__all__)
    if module == "tenure.blocking":  # values and errors are described once
        names = {name for name in names if getattr(blocking, name) is not getattr(tenure, name)}
        names.discard("default_url")
    assert names - described == set()


def test_tenure_exports_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(tenure.__all__) == sorted([*PUBLIC, *ASYNC_ONLY])


def test_the_recipes_export_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(recipes.__all__) == sorted(RECIPES)


def test_the_fences_export_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(fencing.__all__) == sorted(FENCING)


def test_what_is_for_threads_has_the_same_names() -> None:
    assert sorted(blocking.__all__) == sorted(PUBLIC)
    assert sorted(blocking_recipes.__all__) == sorted(RECIPES)


@packages
def test_every_public_name_has_a_docstring(package: ModuleType) -> None:
    for name, thing in public(package):
        assert thing.__doc__, f"{package.__name__}.{name} has no docstring"


@packages
def test_a_public_name_says_that_it_is_one(package: ModuleType) -> None:
    for name, thing in public(package):
        assert thing.__module__ in {"tenure", package.__name__}, f"{package.__name__}.{name}"
        home = importlib.import_module(thing.__module__)
        assert getattr(home, name) is thing, f"{thing.__module__} has no {name}"


@packages
def test_a_type_in_a_public_signature_is_public(package: ModuleType) -> None:
    known = {*package.__all__, *tenure.__all__, *events.__all__, *EVERYWHERE}
    for name, thing in public(package):
        for place, text in hints(thing):
            unknown = set(re.findall(r"\b[A-Z][A-Za-z]+\b", text)) - known
            assert not unknown, f"{package.__name__}.{name}.{place}: {sorted(unknown)}"


def test_dir_and_help_show_the_public_names() -> None:
    shown = {name for name in dir(tenure) if not name.startswith("__")}
    assert shown == {*tenure.__all__, "blocking", "events", "fencing", "recipes"}
    page = re.sub(r".\x08", "", pydoc.render_doc(tenure))  # which prints bold as a typewriter
    for name, thing in public(tenure):
        assert re.search(rf"\b{name}\b", page), name
        assert f"{thing.__module__}.{name}" == f"tenure.{name}"


def test_no_event_has_the_name_of_an_error() -> None:
    assert not set(events.__all__) & set(errors.__all__)


def test_what_is_public_can_be_pickled_by_its_name() -> None:
    for _, thing in public(tenure):
        assert pickle.loads(pickle.dumps(thing)) is thing
    lost = pickle.loads(pickle.dumps(tenure.LeaseLost("gone", node="/n", name="m")))
    assert (type(lost), lost.node) == (tenure.LeaseLost, "/n")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tenure' has no attribute 'nothing'"):
        tenure.nothing  # noqa: B018  it is the access that raises


@pytest.mark.parametrize("name", modules())
def test_a_module_lists_what_others_may_use(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is for"
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.__all__ lists {public}, which it has not"


def test_every_error_is_exported() -> None:
    assert set(errors.__all__) <= set(tenure.__all__)
