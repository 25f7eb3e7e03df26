"""The public names are those listed here: adding one or taking one away is a decision."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import tenure
from tenure import blocking, fencing, recipes
from tenure.blocking import recipes as blocking_recipes

PUBLIC = """
    LOSS_EXIT_STATUS
    AcquireTimeout AuthenticationFailed EngineError EngineUnavailable InvalidArgument LeaseLost
    LeaseReleased Misuse NodeBusy NodeExists NodeNotFound SelfDeadlock SemaphoreBusy
    SemaphoreExists SemaphoreNotFound SessionClosed SessionExpired StaleToken TenureError
    Unsupported
    Attempt Client Election Leadership Lease Mutex RunLease Semaphore Session Ticket
    Capabilities LastRun Leader MutexHolder NodeConfig NodeDescription Recovered RequestDescription
    SemaphoreDescription SessionDescription
    connect default_url
""".split()

RECIPES = """
    Barrier Group RWLock ServiceRegistry SharedConfig
    Change Changes Codec Endpoint Joined Left Member Source States Updated
    dataclass_codec json_codec
""".split()


FENCING = "Fence Fenced RedisFence SQLFence StaleToken".split()


def modules() -> list[str]:
    return [
        module.name
        for module in pkgutil.walk_packages(tenure.__path__, "tenure.")
        if not module.name.endswith("__main__")
    ]


def test_tenure_exports_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(tenure.__all__) == sorted(PUBLIC)


def test_the_recipes_export_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(recipes.__all__) == sorted(RECIPES)


def test_the_fences_export_what_is_listed_here_and_nothing_else() -> None:
    assert sorted(fencing.__all__) == sorted(FENCING)


def test_what_is_for_threads_has_the_same_names() -> None:
    assert sorted(blocking.__all__) == sorted(PUBLIC)
    assert sorted(blocking_recipes.__all__) == sorted(RECIPES)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in tenure.__all__:
        thing = getattr(tenure, name)
        if callable(thing):
            assert thing.__doc__, f"tenure.{name} has no docstring"
        if callable(getattr(blocking, name)):
            assert getattr(blocking, name).__doc__, f"tenure.blocking.{name} has no docstring"


@pytest.mark.parametrize("name", modules())
def test_a_module_lists_what_others_may_use(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is for"
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public), f"{name}.__all__ lists {public}, which it has not"


def test_every_error_is_exported() -> None:
    from tenure import errors

    assert set(errors.__all__) <= set(tenure.__all__)
