"""Virtual time, which advances when a test advances it, or when the event loop is idle.

`VirtualClock` is a stopped clock; `VirtualLoop` is an event loop that uses it. When no callback is
ready, the loop does not wait for its next timer, but advances the clock to it. So an hour costs
nothing, a timer is never late, and a test is deterministic.

Example::

    import asyncio
    import tenure
    from tenure.testing import VirtualClock, run

    async def expires():
        async with tenure.connect("memory://", clock=clock) as client:
            async with client.mutex("nightly").lock() as lease:
                await asyncio.sleep(3600)  # an hour of virtual time: no waiting
                assert lease.held

    clock = VirtualClock()
    run(expires(), clock)

`asyncio.sleep`, `asyncio.timeout`, `call_later` and everything built on them work unchanged. When
no callback is ready *and* no timer is set, the loop can make no progress: `run` raises `Deadlock`,
which names the waiting tasks and the lines at which they wait.

By default the loop does not wait for threads, or for sockets served by other threads, because it
could not know whether to wait for them or to advance time. With `real_wait` it waits that many real
seconds for them before each jump.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import os
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HORIZON = 7 * 24 * 3600.0
"""Seconds of virtual time after which a loop assumes that it is stuck."""


class Deadlock(RuntimeError):
    """Error of a loop that can make no progress, or has run beyond its horizon."""


class VirtualClock:
    """`tenure.clock.Clock` that changes only when it is advanced or set.

    Args:
        now: the first reading of `now`, in seconds.
        wall: the first reading of `wall`, in seconds since the Unix epoch.
    """

    virtual = True

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        """Start at `now` seconds, and at `wall` seconds since the Unix epoch."""
        self._now = now
        self._ahead = wall - now

    def __repr__(self) -> str:
        """Return both readings."""
        return f"<VirtualClock now={self.now():g} wall={self.wall():f}>"

    def now(self) -> float:
        """Return the virtual monotonic time in seconds."""
        return self._now

    def wall(self) -> float:
        """Return the virtual wall clock in seconds since the Unix epoch."""
        return self._now + self._ahead

    def advance(self, seconds: float) -> None:
        """Advance both clocks by some seconds.

        While the loop does not run, this has the effect of a suspended machine.
        """
        self.advance_to(self._now + seconds)

    def advance_to(self, now: float) -> None:
        """Advance both clocks until `now` returns the given reading.

        Raises:
            ValueError: the reading is in the past.
        """
        if not now >= self._now:
            raise ValueError(f"time does not run backwards, from {self._now} to {now}")
        self._now = now

    def set_wall(self, wall: float) -> None:
        """Set only the wall clock, forwards or backwards, as an administrator or NTP may do."""
        self._ahead = wall - self._now


class _Selector(selectors.PollSelector):
    """Selector that never waits for a timer, but lets the loop advance time."""

    def __init__(self, idle: Callable[[float | None], None], real_wait: float) -> None:
        super().__init__()
        self._idle = idle
        self._real_wait = real_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        may_wait = timeout is None or timeout > 0
        ready = super().select(self._real_wait if may_wait else 0)
        if may_wait and not ready:
            self._idle(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on the time of a `VirtualClock`.

    Args:
        clock: the clock, which the loop advances whenever it is idle.
        real_wait: real seconds to wait for threads and sockets before time jumps. Without it,
            `run_in_executor` and `asyncio.to_thread` raise `RuntimeError`.
        horizon: virtual seconds that may pass before the loop raises `Deadlock`. An endlessly
            repeated timer must not hide that everything else is stuck.
    """

    def __init__(
        self, clock: VirtualClock, *, real_wait: float = 0.0, horizon: float = HORIZON
    ) -> None:
        """Start at the clock's current time; see the class for the arguments."""
        self.clock = clock
        self._real_wait = real_wait
        self._horizon = clock.now() + horizon
        super().__init__(_Selector(self._idle, real_wait))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function in a thread; only a loop with `real_wait` waits for threads."""
        if not self._real_wait:
            raise RuntimeError(
                "a thread was started, and a loop on virtual time does not wait for threads "
                "unless it is made with real_wait=..."
            )
        return super().run_in_executor(executor, func, *args)

    def _idle(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"no task is ready and no timer is set{self._stuck()}")
        if self.clock.now() > self._horizon:
            raise Deadlock(f"at {self.clock.now():g} s it is beyond the horizon{self._stuck()}")
        self.clock.advance(timeout)

    def _stuck(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name)
        if not tasks:
            return "; no task is left either, only a future that nothing will ever set"
        hint = "" if self._real_wait else "\nEvents of a thread or a socket need real_wait=..."
        return "; there wait" + "".join(f"\n  {_place(task)}" for task in tasks) + hint


def _place(task: asyncio.Task[Any]) -> str:
    """Return a task's name and the innermost line, outside asyncio, at which it waits."""
    awaited: Any = task.get_coro()
    frame = None
    while inspect.iscoroutine(awaited):
        inner = awaited.cr_frame
        if inner is not None and (frame is None or not _is_asyncio(inner.f_code.co_filename)):
            frame = inner
        awaited = awaited.cr_await
    if frame is None:
        return task.get_name()
    code, line = frame.f_code, frame.f_lineno
    source = linecache.getline(code.co_filename, line).strip()
    return f"{task.get_name()}: {code.co_qualname} ({code.co_filename}:{line}): {source}"


def _is_asyncio(filename: str) -> bool:
    return os.path.dirname(filename) == os.path.dirname(asyncio.__file__)


def run(
    coroutine: Coroutine[Any, Any, T],
    clock: VirtualClock | None = None,
    *,
    debug: bool | None = None,
    real_wait: float = 0.0,
    horizon: float = HORIZON,
) -> T:
    """Run a coroutine to its end in virtual time, on a new loop, like `asyncio.run`.

    Args:
        coroutine: the coroutine.
        clock: the clock; a new one if omitted.
        debug: asyncio's debug mode.
        real_wait: see `VirtualLoop`.
        horizon: see `VirtualLoop`.

    Raises:
        Deadlock: the loop can make no progress, or has run beyond the horizon. The waiting tasks
            are cancelled, as they are whenever `asyncio.run` ends.
    """
    time = VirtualClock() if clock is None else clock

    def new_loop() -> VirtualLoop:
        return VirtualLoop(time, real_wait=real_wait, horizon=horizon)

    with asyncio.Runner(debug=debug, loop_factory=new_loop) as runner:
        return runner.run(coroutine)
