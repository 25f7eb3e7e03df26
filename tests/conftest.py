"""How every test runs.

A test that is `async def` is run here, on an event loop of its own, without a plugin:

- asyncio's debug mode is on, unless the test is marked ``no_debug``;
- a test that leaves a task running fails, and so does one during which something failed with
  nobody to tell (what the loop's exception handler hears of);
- a fixture named ``loop_factory``, where a test asks for one, makes the loop: that of this file
  is one whose time is virtual, and ``clock`` is that time;
- with Hypothesis, every example gets a loop of its own.

A run that hangs is ended, with the name of the test; see `tests.hang_guard`.

Signals that the shell ignores in what it runs in the background, or nohup does, are not ignored
here: programs that tests start would inherit that, and no Ctrl-C would end them.

No test sees the TENURE_URL or the state folder of the person who runs it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import settings

from tests.hang_guard.plugin import HangGuard

if TYPE_CHECKING:
    from tenure.testing import VirtualClock

# In CI every run tries the same examples, so that a red run is about the change. Elsewhere each
# run tries new ones. Time per example means nothing on a busy machine.
settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class LeftBehind(AssertionError):
    """A test passed, and left a task running or an error that nobody heard of."""


def run(
    test: Coroutine[Any, Any, None], *, debug: bool = True, loop_factory: LoopFactory | None = None
) -> None:
    """Run one coroutine test, and fail it for what it leaves behind."""
    unheard: list[str] = []

    def hear(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        unheard.append(f"{context['message']}: {context.get('exception')!r}")

    async def supervised() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(hear)
        loop.slow_callback_duration = 3600.0  # a busy machine is slow, which is no news
        await test
        running = asyncio.all_tasks() - {asyncio.current_task()}
        return [f"still running: {task!r}" for task in running]

    with asyncio.Runner(debug=debug, loop_factory=loop_factory) as runner:
        left = runner.run(supervised())
    gc.collect()  # a task in a cycle tells of its error only when it is collected
    if left or unheard:
        raise LeftBehind("\n".join(left + unheard))


_USUAL = {signal.SIGINT: signal.default_int_handler}


def pytest_configure(config: pytest.Config) -> None:
    """Have signals do what they usually do, and a guard end the run if it hangs."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _USUAL.get(number, signal.SIG_DFL))
    config.pluginmanager.register(HangGuard(config))


def pytest_collection_finish() -> None:
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    if next(_ended) % _BETWEEN_SETTING_ASIDE == 0:
        _set_aside()


_ended = itertools.count(1)
_BETWEEN_SETTING_ASIDE = 100
"""Tests of this process, each of which leaves its reports, and now and then a library."""


def _set_aside() -> None:
    """Set aside what is loaded by now, so that collecting after each test takes no time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test, if it is a coroutine; see the top of this file."""
    debug = pyfuncitem.get_closest_marker("no_debug") is None
    loop_factory = cast("LoopFactory | None", pyfuncitem.funcargs.get("loop_factory"))
    run_here = functools.partial(run, debug=debug, loop_factory=loop_factory)
    function = pyfuncitem.obj
    given = getattr(function, "hypothesis", None)
    if given is not None and inspect.iscoroutinefunction(given.inner_test):
        example = given.inner_test

        @functools.wraps(example)
        def run_example(*arguments: Any, **named: Any) -> None:
            run_here(example(*arguments, **named))

        given.inner_test = run_example
        return None  # Hypothesis calls it from here, once for each example
    if not inspect.iscoroutinefunction(function):
        return None
    asked_for = inspect.signature(function).parameters
    run_here(function(**{name: pyfuncitem.funcargs[name] for name in asked_for}))
    return True


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """None of the person's TENURE_* variables, an empty state folder, no proxy to loopback."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TENURE_")]:
            patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "127.0.0.1,localhost,::1", prepend=",")
        yield


@pytest.fixture
def clock() -> VirtualClock:
    """Time that passes when nothing else is to do."""
    from tenure.testing import VirtualClock  # not before coverage looks

    return VirtualClock()


@pytest.fixture
def loop_factory(clock: VirtualClock) -> LoopFactory:
    """Has the test that asks for it run in that time."""
    from tenure.testing import VirtualLoop

    return lambda: VirtualLoop(clock)


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    """Each test begins with an empty ``memory://``, whatever the one before has left open."""
    yield
    memory = sys.modules.get("tenure.engines.memory.engine")
    if memory is not None:
        memory.forget()
