"""Simulated machines: event loops without a selector, on one true time that jumps.

A `Scheduler` owns the true time and all scheduled events. Each simulated process has a
`ProcessLoop`, an asyncio event loop that the scheduler runs, and a `LocalClock`, which drifts. Only
the scheduler runs a loop. So a process can be paused between any two callbacks (a SIGSTOP, a
virtual machine that is not scheduled), can stall, or can be killed, so that none of its code runs
any more.

Rules:

* There is one thread, and all randomness comes from the seed: a seed determines a history.
* Callbacks of one loop run in the order in which they were scheduled, as asyncio guarantees. No
  time passes until all ready callbacks of the loop have run. The loops interleave in the order of
  the true times of their events.
* A paused loop keeps the events that arrive for it, and runs its timers late.
* A killed loop accepts no events, and its tasks are kept until the end of the simulation, because a
  collected coroutine would still run its `finally`.
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
from math import ulp
from typing import Any


class OutOfTime(Exception):
    """Error of a simulation that did not stop in time, or has no events left."""


class Scheduler:
    """True time, with the queue of scheduled events.

    Attributes:
        now: the true time, in seconds since the beginning.
        loops: the loops of all processes, including dead ones.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.loops: list[ProcessLoop] = []
        self._events: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()
        self._stopped = False

    def time(self) -> float:
        """Return the true time, in seconds since the beginning."""
        return self.now

    def new_loop(self, clock: LocalClock) -> ProcessLoop:
        """Return a new loop for a process."""
        # Methods of asyncio that a simulated process does not need raise NotImplementedError.
        loop = ProcessLoop(self, clock)  # type: ignore[abstract]
        self.loops.append(loop)
        return loop

    def at(self, when: float, handle: Handle) -> None:
        """Schedule a handle at a true time, on the loop that it belongs to."""
        heappush(self._events, (when, next(self._numbers), handle))

    def call_at(self, when: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call without a process at a true time, such as a fault."""
        self.at(when, Handle(callback, arguments, None, None))

    def stop(self) -> None:
        """Make `run` return after the current event."""
        self._stopped = True

    def run(self, horizon: float) -> None:
        """Run the scheduled events in order of time, until `stop`.

        Raises:
            OutOfTime: no event is left, or the next one is later than `horizon`, in seconds of
                true time.
        """
        pending = self._events
        self._stopped = False
        before = events._get_running_loop()  # noqa: SLF001  for authors of loops
        try:
            while not self._stopped:
                if not pending:
                    raise OutOfTime("nothing will ever happen again")
                when, _, handle = heappop(pending)
                if handle.callback is None:
                    continue
                if when > horizon:
                    raise OutOfTime(f"it continues beyond {horizon:g} s")
                if when > self.now:  # noqa: PLR1730  a call costs more
                    self.now = when
                loop = handle.loop
                events._set_running_loop(loop)  # noqa: SLF001  for authors of loops
                if loop is None:
                    handle.callback(*handle.arguments)
                else:
                    loop.due(handle)
        finally:
            events._set_running_loop(before)  # noqa: SLF001  for authors of loops


class Handle:
    """Scheduled callback, like `asyncio.Handle` without its debugging."""

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
        """Drop the callback."""
        self.callback = None
        self.arguments = ()

    def cancelled(self) -> bool:
        """Return true if the callback was dropped."""
        return self.callback is None


class LocalClock:
    """Clock of one machine: `rate` seconds pass on it in one true second.

    Its wall clock can be set, as an administrator or NTP may do.
    """

    virtual = True

    def __init__(self, scheduler: Scheduler, rate: float, offset: float, wall: float) -> None:
        """Start `offset` seconds after true time, at `rate`, with the wall clock at `wall`."""
        self._scheduler = scheduler
        self._rate = rate
        self._offset = offset
        self._ahead = wall

    def now(self) -> float:
        """Return the machine's monotonic time in seconds."""
        return self._offset + self._scheduler.now * self._rate

    def wall(self) -> float:
        """Return the machine's wall clock in seconds since the Unix epoch."""
        return self._ahead + self._scheduler.now * self._rate

    def true(self, local: float) -> float:
        """Return the true time at which this clock shows the given reading of `now`."""
        return (local - self._offset) / self._rate

    def reaching(self, local: float) -> float:
        """Return a true time at which this clock shows no less than the given reading.

        A timer that fired too early by a rounding error would be set again for the same instant.
        """
        true = self.true(local)
        while self._offset + true * self._rate < local:
            true += max(ulp(true), ulp(local))
        return true

    def jump_wall(self, seconds: float) -> None:
        """Move the wall clock forwards or backwards by some seconds."""
        self._ahead += seconds


class ProcessLoop(asyncio.AbstractEventLoop):
    """Event loop of one simulated process.

    Attributes:
        alive: true until the loop is killed.
        failures: the contexts of unhandled exceptions, as passed to `call_exception_handler`.
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
        self._left = 0  # number of callbacks before `_interrupt` is called
        self._interrupt: Callable[[], None] | None = None

    # The interface of asyncio

    def time(self) -> float:
        """Return the time of the machine's clock."""
        return self._now()

    def get_debug(self) -> bool:
        """Return false: there is no debug mode."""
        return False

    def is_running(self) -> bool:
        """Return true while the loop runs a callback."""
        return self._running

    def is_closed(self) -> bool:
        """Return true if the process is dead."""
        return not self.alive

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Create a task on this loop."""
        self._new.append(coro)
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Schedule a callback for the current instant."""
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
        """Schedule a callback after `delay` seconds of the machine's clock."""
        return self.call_at(self.clock.now() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        """Schedule a callback at an instant of the machine's clock."""
        handle = Handle(callback, args, self, context)
        if self.alive:
            self._scheduler.at(self.clock.reaching(when), handle)
        return handle

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled failure of a living process."""
        if self.alive:
            self.failures.append(context)

    # The interface of the scheduler and the nemesis

    def due(self, handle: Handle) -> None:
        """Run a due handle, and all callbacks that become ready through it."""
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
            # From Python 3.12 on a task's traceback refers to this frame. An unretrieved exception
            # would keep its own task alive, and so would never be reported.
            del handle, callback
        self._running = False
        if not handles:
            self._new.clear()

    def interrupt_after(self, callbacks: int, interrupt: Callable[[], None]) -> None:
        """Schedule a call between two callbacks, after the given number of further callbacks."""
        self._left = callbacks
        self._interrupt = interrupt

    def pause(self) -> None:
        """Stop running callbacks. Each pause needs its own `resume`."""
        self._paused += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._paused -= 1
        if self._handles:
            self._scheduler.at(self._scheduler.now, Handle(_nothing, (), self, None))

    def kill(self) -> None:
        """Stop running callbacks for ever."""
        self.alive = False
        self._handles.clear()
        for coroutine in self._new:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # prevents the warning "was never awaited"
        self._new.clear()


def _nothing() -> None:
    """Do nothing; scheduled to run a loop that has callbacks."""
