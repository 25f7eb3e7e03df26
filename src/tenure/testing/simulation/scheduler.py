"""Simulated machines: event loops without a selector, on one true time that jumps.

A `Scheduler` owns the true time and everything that is to happen in it. Each simulated process
has a `ProcessLoop` of its own, an asyncio event loop that the scheduler turns, and a `LocalClock`,
which drifts. Nothing else turns a loop, so a process can be paused between any two callbacks (a
SIGSTOP, a virtual machine that is not scheduled), can stall, or can be killed: then nothing of it
runs any more.

Rules:

* One thread, and no chance that does not come from the seed: a seed is a history.
* Callbacks of one loop run in the order in which they were scheduled, as asyncio promises. No
  time passes until all that is ready on it has run. The loops interleave as the true times have
  it of what they wait for.
* A paused loop keeps what arrives for it, and takes up its timers late.
* A killed loop takes nothing any more, and its tasks are kept until the end of the simulation: a
  coroutine that the interpreter throws away would still run its `finally`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any

__all__ = ["Handle", "LocalClock", "OutOfTime", "ProcessLoop", "Scheduler"]


class OutOfTime(Exception):
    """What was waited for has not happened by the time given."""


class Scheduler:
    """The true time, and what is to happen when.

    Attributes:
        now: seconds since the beginning.
        loops: of all processes, dead ones included.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.loops: list[ProcessLoop] = []
        self._events: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()
        self._stopped = False

    def time(self) -> float:
        """The true time."""
        return self.now

    def new_loop(self, clock: LocalClock) -> ProcessLoop:
        """The loop of one more process."""
        # What asyncio offers and a simulated process has no use for raises NotImplementedError.
        loop = ProcessLoop(self, clock)  # type: ignore[abstract]
        self.loops.append(loop)
        return loop

    def at(self, when: float, handle: Handle) -> None:
        """Have a handle run at a true time, on the loop that it belongs to."""
        heappush(self._events, (when, next(self._numbers), handle))

    def call_at(self, when: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Have something called that belongs to no process: what the world does to them."""
        self.at(when, Handle(callback, arguments, None, None))

    def stop(self) -> None:
        """Have `run` return after what happens now."""
        self._stopped = True

    def run(self, horizon: float) -> None:
        """Let happen what is to happen, until `stop`.

        Raises:
            OutOfTime: nothing will happen any more, or the time is beyond the horizon.
        """
        pending = self._events
        self._stopped = False
        before = events._get_running_loop()
        try:
            while not self._stopped:
                if not pending:
                    raise OutOfTime("nothing will ever happen again")
                when, _, handle = heappop(pending)
                if handle.callback is None:
                    continue
                if when > horizon:
                    raise OutOfTime(f"it goes on beyond {horizon:g} s")
                if when > self.now:  # noqa: PLR1730  a call costs more
                    self.now = when
                loop = handle.loop
                events._set_running_loop(loop)
                if loop is None:
                    handle.callback(*handle.arguments)
                else:
                    loop.due(handle)
        finally:
            events._set_running_loop(before)


class Handle:
    """Something to be called: what asyncio knows as a `Handle`, without its debugging."""

    __slots__ = ("arguments", "callback", "context", "loop")

    def __init__(
        self,
        callback: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        loop: ProcessLoop | None,
        context: Context | None,
    ) -> None:
        self.callback = callback
        self.arguments = arguments
        self.loop = loop
        self.context = context

    def cancel(self) -> None:
        self.callback = None
        self.arguments = ()

    def cancelled(self) -> bool:
        return self.callback is None


class LocalClock:
    """A machine's clock: `rate` seconds of its own pass in a true second.

    Its wall clock can be set, as an administrator or NTP may.
    """

    virtual = True

    def __init__(self, scheduler: Scheduler, rate: float, offset: float, wall: float) -> None:
        self._scheduler = scheduler
        self._rate = rate
        self._offset = offset
        self._ahead = wall

    def now(self) -> float:
        return self._offset + self._scheduler.now * self._rate

    def wall(self) -> float:
        return self._ahead + self._scheduler.now * self._rate

    def true(self, local: float) -> float:
        """The true time at which this clock reads so."""
        return (local - self._offset) / self._rate

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forwards, or backwards."""
        self._ahead += seconds


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process.

    Attributes:
        alive: not killed.
        failures: what no task has caught, as `call_exception_handler` was told.
    """

    def __init__(self, scheduler: Scheduler, clock: LocalClock) -> None:
        self.clock = clock
        self._now = clock.now
        self.alive = True
        self.failures: list[dict[str, Any]] = []
        self._scheduler = scheduler
        self._handles: deque[Handle] = deque()
        self._new: list[Any] = []  # coroutines of tasks that may not have begun
        self._paused = 0
        self._running = False
        self._left = 0  # callbacks before `_interrupt` is called
        self._interrupt: Callable[[], None] | None = None

    # What asyncio asks of a loop

    def time(self) -> float:
        return self._now()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return not self.alive

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._new.append(coro)
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        if self._running:
            self._handles.append(handle)
        elif self.alive:
            self._scheduler.at(self._scheduler.now, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        return self.call_at(self.clock.now() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        if self.alive:
            self._scheduler.at(self.clock.true(when), handle)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.alive:
            self.failures.append(context)

    # What the scheduler and the nemesis do with it

    def due(self, handle: Handle) -> None:
        """A handle's time has come: run it, and all that it makes ready."""
        if not self.alive:
            return
        handles = self._handles
        handles.append(handle)
        self._running = True
        while handles and not self._paused:
            if self._interrupt is not None:
                if not self._left:
                    interrupt, self._interrupt = self._interrupt, None
                    interrupt()
                    continue
                self._left -= 1
            handle = handles.popleft()
            callback, context = handle.callback, handle.context
            if callback is None:
                continue
            try:
                if context is None:
                    callback(*handle.arguments)
                else:
                    context.run(callback, *handle.arguments)
            except Exception as error:
                self.call_exception_handler({"message": f"in {callback!r}", "exception": error})
            # From Python 3.12 on a task's traceback leads to this frame: what failed, and nobody
            # has heard of, would keep itself alive, and not be heard of.
            del handle, callback
        self._running = False
        if not handles:
            self._new.clear()

    def interrupt_after(self, callbacks: int, interrupt: Callable[[], None]) -> None:
        """Have something called between two callbacks, when so many more of them have run."""
        self._left = callbacks
        self._interrupt = interrupt

    def pause(self) -> None:
        """Run nothing more, for now. To be undone as often as it was done."""
        self._paused += 1

    def resume(self) -> None:
        """Go on."""
        self._paused -= 1
        if self._handles:
            self._scheduler.at(self._scheduler.now, Handle(_nothing, (), self, None))

    def kill(self) -> None:
        """Run nothing more, ever."""
        self.alive = False
        self._handles.clear()
        for coroutine in self._new:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # or it would be complained of that nobody ran it
        self._new.clear()


def _nothing() -> None:
    """What wakes a loop."""
