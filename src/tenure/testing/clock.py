"""Time that passes when a test says so, or when there is nothing else left to do.

`VirtualClock` is a clock that stands still; `VirtualLoop` is an event loop that lives by it. When
nothing is ready to run, the loop does not wait for its next timer: it moves the clock there. So
an hour costs nothing, a timer never comes late, and a test that has run once runs the same way
every time::

    clock = VirtualClock()
    run(scenario(clock), clock)

`asyncio.sleep`, `asyncio.timeout`, `call_later` and whatever is built on them need no change.
When nothing is ready *and* no timer is set, nothing can ever happen again: `run` raises
`Deadlock`, which names the tasks that wait and the lines where they do.

By default nothing is expected from outside the loop, neither from threads nor from sockets that
are answered elsewhere: the loop would not know whether to wait for them or to let time pass.
`patience` allows it, at the cost of so many real seconds before each jump.
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

__all__ = ["HORIZON", "Deadlock", "VirtualClock", "VirtualLoop", "run"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HORIZON = 7 * 24 * 3600.0
"""Seconds of virtual time after which a loop takes it that what it waits for will not come."""


class Deadlock(RuntimeError):
    """Nothing will ever happen again, and something is still waited for."""


class VirtualClock:
    """A `tenure.clock.Clock` that moves only when it is moved.

    Args:
        now: the first reading of `now`, in seconds.
        wall: the first reading of `wall`, in seconds since the Unix epoch.
    """

    virtual = True

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._ahead = wall - now

    def __repr__(self) -> str:
        return f"<VirtualClock now={self.now():g} wall={self.wall():f}>"

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._ahead

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks; as a suspended machine does, if nobody turns the loop."""
        self.advance_to(self._now + seconds)

    def advance_to(self, now: float) -> None:
        """Let time pass until `now` reads so."""
        if not now >= self._now:
            raise ValueError(f"time does not run backwards, from {self._now} to {now}")
        self._now = now

    def set_wall(self, wall: float) -> None:
        """Set the wall clock alone, forwards or backwards, as an administrator or NTP may."""
        self._ahead = wall - self._now


class _Selector(selectors.PollSelector):
    """Never waits: what asks it to wait is told to let time pass instead."""

    def __init__(self, idle: Callable[[float | None], None], patience: float) -> None:
        super().__init__()
        self._idle = idle
        self._patience = patience

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        may_wait = timeout is None or timeout > 0
        ready = super().select(self._patience if may_wait else 0)
        if may_wait and not ready:
            self._idle(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a `VirtualClock`'s.

    Args:
        clock: moved by the loop whenever it has nothing to do.
        patience: real seconds to wait for threads and sockets before time jumps. Without it,
            `run_in_executor` and `asyncio.to_thread` are refused.
        horizon: virtual seconds that may pass while the loop turns, before it raises `Deadlock`:
            something that ticks for ever must not hide that everything else is stuck.
    """

    def __init__(
        self, clock: VirtualClock, *, patience: float = 0.0, horizon: float = HORIZON
    ) -> None:
        self.clock = clock
        self._patience = patience
        self._horizon = clock.now() + horizon
        super().__init__(_Selector(self._idle, patience))

    def time(self) -> float:
        return self.clock.now()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        if not self._patience:
            raise RuntimeError(
                "a thread was asked for, and a loop on virtual time does not wait for threads "
                "unless it is made with patience=..."
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
        hint = "" if self._patience else "\nWhat comes from a thread or a socket needs patience=..."
        return "; there wait" + "".join(f"\n  {_place(task)}" for task in tasks) + hint


def _place(task: asyncio.Task[Any]) -> str:
    """A task's name, and the innermost line, asyncio's own left aside, that it waits at."""
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
    patience: float = 0.0,
    horizon: float = HORIZON,
) -> T:
    """Run a coroutine to its end in virtual time, on a loop of its own, as `asyncio.run` does.

    Args:
        clock: whose time it is; a new clock when left out.
        debug: asyncio's debug mode.
        patience, horizon: see `VirtualLoop`.

    Raises:
        Deadlock: nothing can happen any more. The tasks that wait are cancelled, as they are
            whenever `asyncio.run` ends.
    """
    time = VirtualClock() if clock is None else clock

    def new_loop() -> VirtualLoop:
        return VirtualLoop(time, patience=patience, horizon=horizon)

    with asyncio.Runner(debug=debug, loop_factory=new_loop) as runner:
        return runner.run(coroutine)
