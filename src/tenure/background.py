"""Background steps: timers, loops and threads that survive an unexpected error.

Engines, clients and servers do work that no caller awaits: they renew sessions, expire requests,
reconnect and deliver events. A step of such work may fail for an unrelated reason, such as too many
open files or a lack of memory. Unhandled, the error would end the timer or task, and waiters would
wait for ever.

Rules:

* An `Exception` from a step is logged, and the next step runs after a pause. The pause grows from
  `FIRST_PAUSE` to `LONGEST_PAUSE` while steps fail.
* The same cause is logged once in `QUIET` seconds. A `TenureError` is logged without a traceback.
* `asyncio.CancelledError`, `KeyboardInterrupt` and `SystemExit` propagate.
* A cancelled timer runs no step until it is armed again; a step cancelled while it runs is not
  repeated.
* `asyncio.run` cancels all tasks at its end, and waits for them. What a program holds must be
  released nevertheless, or it would be kept until its recovery window has passed. So
  `persist` and `Ending` begin a cancelled step once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tenure.errors import TenureError
from tenure.greenlets import Thread, new_thread

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""First and longest pause between a failed step and the next one, in seconds."""

QUIET = 60.0
"""Seconds during which the same cause is not logged again."""

ATTEMPTS = 8
"""Attempts to handle an item of a queue before it is dropped."""

_CAUSES = 32  # number of causes that each step remembers


class Failures:
    """Failures of one background step: logged causes, and the next pause.

    It may be used from any thread.

    Args:
        what: the step's name in the log, such as "monitor of sqlite:///jobs.db".
        logger: the logger of its component.
    """

    __slots__ = ("_logged", "_logger", "_pause", "_what")

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._pause = FIRST_PAUSE
        self._logged: dict[tuple[type[BaseException], str], float] = {}

    def failed(self, error: Exception) -> float:
        """Record that the step failed; return the seconds until the next one."""
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        self.report(error)
        return pause

    def succeeded(self) -> None:
        """Record that the step succeeded: the next failure begins with the shortest pause."""
        self._pause = FIRST_PAUSE

    def report(self, error: Exception) -> None:
        """Log an error, unless its cause was logged recently."""
        now = time.monotonic()
        cause = (type(error), str(error))
        logged = self._logged.get(cause)
        if logged is not None and now - logged < QUIET:
            return
        if len(self._logged) >= _CAUSES:
            self._logged.clear()
        self._logged[cause] = now
        if isinstance(error, TenureError):
            self._logger.warning("background task failed: task=%r error=%s", self._what, error)
        else:
            self._logger.error(
                "background task failed: task=%r error=%r", self._what, error, exc_info=error
            )

    def dropped(self, item: object) -> None:
        """Log that an item was dropped."""
        self._logger.error(
            "item dropped after repeated failures: task=%r item=%r count=%d",
            *(self._what, item, ATTEMPTS),
        )

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Log the error of a part of a step, so that the other parts run."""
        try:
            yield
        except Exception as error:
            self.report(error)


class BackgroundTimer:
    """A step that an event loop runs at times set by its owner.

    The step arms the timer for the next run. If it fails, the timer is armed automatically.

    Args:
        loop: runs the step.
        now: reads the clock of these times.
        step: the function to run.
        failures: logs its errors.
    """

    __slots__ = ("_due", "_failures", "_handle", "_loop", "_now", "_running", "_step")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        step: Callable[[], object],
        failures: Failures,
    ) -> None:
        """Start without a due time; the step does not run until the timer is set."""
        self._loop = loop
        self._now = now
        self._step = step
        self._failures = failures
        self._handle: asyncio.Handle | None = None
        self._due = 0.0
        self._running = False

    @property
    def armed(self) -> bool:
        """True while a step is scheduled."""
        return self._handle is not None

    def by(self, due: float) -> None:
        """Run the step at that time, or earlier if the timer is armed for an earlier time."""
        if self._handle is not None:
            if self._due <= due:
                return
            self._handle.cancel()
        self._due = due
        self._handle = self._loop.call_later(max(0.0, due - self._now()), self._run)

    def at(self, due: float) -> None:
        """Run the step at that time, replacing the current time."""
        self._disarm()
        self.by(due)

    def soon(self) -> None:
        """Run the step in the next iteration of the loop."""
        if self._handle is not None:
            if self._due == float("-inf"):
                return
            self._handle.cancel()
        self._due = float("-inf")
        self._handle = self._loop.call_soon(self._run)

    def cancel(self) -> None:
        """Run no step until the timer is armed again. Safe to call twice."""
        self._running = False
        self._disarm()

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def run(self) -> None:
        """Run the step now; an error is logged, and the step is repeated."""
        self._disarm()
        self._run()

    def _run(self) -> None:
        self._handle = None
        self._running = True
        try:
            self._step()
        except Exception as error:
            pause = self._failures.failed(error)
            if self._running:
                self.at(self._now() + pause)
        except BaseException:  # an interrupt must not stop the timer
            if self._running and self._handle is None:
                self.at(self._now() + LONGEST_PAUSE)
            raise
        else:
            self._failures.succeeded()
        finally:
            self._running = False


class BackgroundQueue(Generic[T]):
    """Items that an event loop handles in order, in its next iteration.

    A failed item stays first, and is retried after a pause. After `ATTEMPTS` it is dropped, so that
    it cannot block the others for ever.

    Args:
        handle: called with each item.

    Attributes:
        items: the pending items, and the one being handled.
    """

    __slots__ = ("_attempts", "_failures", "_handle", "_loop", "_timer", "_waking", "items")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        handle: Callable[[T], object],
        failures: Failures,
    ) -> None:
        self.items: deque[T] = deque()
        self._loop = loop
        self._handle = handle
        self._failures = failures
        self._attempts = 0
        self._waking = False  # whether a run is scheduled and has not begun
        self._timer = BackgroundTimer(loop, now, self._step, failures)

    def put(self, items: Iterable[T]) -> None:
        """Have an item handled after those that were put before. On the loop."""
        self.items.extend(items)
        if self.items and not self._timer.armed:
            self._timer.soon()

    def handle(self, items: Iterable[T]) -> None:
        """Handle an item now, or after those that were put before. On the loop."""
        if self.items:
            self.put(items)
        else:
            self.items.extend(items)
            if self.items:
                self._timer.run()

    def put_threadsafe(self, item: T) -> None:
        """Have an item handled, from any thread, unless the loop is closed."""
        self.items.append(item)
        if not self._waking and not self._loop.is_closed():
            self._waking = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._waking = False  # first: a later put wakes the loop again
        if self.items and not self._timer.armed:
            self._timer.run()

    def clear(self) -> None:
        """Drop everything."""
        self.items.clear()
        self._timer.cancel()

    def _step(self) -> None:
        items = self.items
        # Items put meanwhile are left for the next iteration.
        for _ in range(len(items)):
            if not items:
                return
            item = items[0]
            try:
                self._handle(item)
            except Exception:
                self._attempts += 1
                if self._attempts < ATTEMPTS:
                    raise
                self._failures.dropped(item)
            self._attempts = 0
            if items and items[0] is item:  # otherwise it was cleared meanwhile
                items.popleft()
        if items:
            self._timer.soon()


async def supervise(step: Callable[[], Awaitable[object]], failures: Failures) -> None:
    """Run a step until it returns; after a failure, log it and run the step again after a pause."""
    while True:
        try:
            await step()
        except Exception as error:
            await asyncio.sleep(failures.failed(error))
        else:
            return


async def persist(step: Callable[[], Awaitable[T]]) -> T:
    """Await a step of a closing, and once more if that was cancelled."""
    try:
        return await step()
    except asyncio.CancelledError:
        return await step()


class Ending:
    """A step that ends something, in a task, for any number of callers.

    The cancellation of a caller does not stop it.

    Args:
        step: the function to run; safe to repeat.
        start: starts a task of the owner.

    Attributes:
        task: carries the step out.
    """

    __slots__ = ("_begun", "_start", "_step", "task")

    def __init__(
        self,
        step: Callable[[], Awaitable[None]],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = asyncio.create_task,
    ) -> None:
        self._step = step
        self._start = start
        self._begun = False
        self.task = start(self._run())

    async def _run(self) -> None:
        self._begun = True
        await persist(self._step)

    def ensure_begun(self) -> bool:
        """Start it again if it was cancelled before it ran; return whether that was so."""
        cancelled = self.task.cancelled() and not self._begun
        if cancelled:
            self.task = self._start(self._run())
        return cancelled

    async def wait(self) -> None:
        """Wait for the end of the step. Raises its failure."""
        while self.ensure_begun() or not self.task.done():
            try:
                await asyncio.wait([self.task])
            except asyncio.CancelledError:
                # A loop that ends cancels all tasks once, and runs until they are done.
                if self.ensure_begun():
                    await asyncio.wait([self.task])
                raise
        self.task.result()


class BackgroundThread:
    """A daemon thread that is started on demand.

    A start may fail because the system has no more threads; the next demand tries again.

    Args:
        name: the name of the thread.
        run: the function that the thread runs.
    """

    __slots__ = ("_name", "_run", "_thread")

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self._name = name
        self._run = run
        self._thread: Thread | None = None

    @property
    def alive(self) -> bool:
        """True from the start of the thread until its end."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it is alive.

        Raises:
            RuntimeError: the system has no more threads. MemoryError
        """
        if not self.alive:
            thread = new_thread(self._run, self._name)
            thread.start()
            self._thread = thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the thread, if it was started; return false on timeout."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.alive
