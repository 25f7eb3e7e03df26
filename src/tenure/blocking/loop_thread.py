"""Thread that runs the event loop of `tenure.blocking`, while the portal needs it.

Rules:

* A lock guards the start and end of the thread. A caller registers its call before it checks the
  thread; ending the thread uses the opposite order. So no caller is left waiting.
* Only one thread runs the loop: the next one waits for the end of the previous one.
* The thread is a daemon.

Threads that compute in short slices would starve this one: a waiting thread requests the GIL only
after the switch interval, and a thread that releases and reacquires it every millisecond usually
wins. Renewals were seconds late in such a program. So the switch interval is at most
`SWITCH_INTERVAL` while the thread runs, and is restored afterwards.

A signal handler may raise between any two lines that run in a program's thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

from tenure import fork, greenlets
from tenure.blocking.worker import Call

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SWITCH_INTERVAL = 0.0005
"""Switch interval in seconds while the loop's thread runs (`sys.setswitchinterval`)."""


class Loop(asyncio.SelectorEventLoop):
    """Event loop that belongs to its process: a forked child must not close it."""

    def __init__(self) -> None:
        self._born = fork.generation
        super().__init__(greenlets.new_selector())

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Arguments]], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        """Call a function in a thread."""
        if executor is None and greenlets.are_used():
            return greenlets.in_thread(self, partial(func, *args))
        return super().run_in_executor(executor, func, *args)

    def close(self) -> None:
        """Close the loop, except in a forked child, which shares its selector."""
        if fork.generation == self._born:
            super().close()

    def __del__(self) -> None:
        """Close the loop, except in a forked child."""
        if fork.generation == self._born:
            super().__del__()

    def forget(self) -> None:
        """Close the sockets in a forked child, where they would warn that they are open."""
        for name in ("_ssock", "_csock"):
            getattr(self, name).close()


class LoopThread:
    """Thread that runs the loop after the previous thread has ended, until its `ended` is set."""

    def __init__(self, loop: Loop, before: LoopThread | None) -> None:
        """Prepare a thread that runs `loop` after the thread `before` has ended."""
        thread = greenlets.new_thread(self._run, "tenure-blocking")
        self.start, self.join, self.is_alive = thread.start, thread.join, thread.is_alive
        self._loop = loop
        self._before = before
        self._begun: bool | None = None
        self._beginning = threading.Lock()
        self.ended = False

    def begins(self, begun: bool) -> bool:
        """Decide whether it runs the loop; the first call decides, and each returns the decision.

        A caller that is interrupted while starting the thread cannot know whether it started.
        """
        with self._beginning:
            if self._begun is None:
                self._begun = begun
            return self._begun

    def _run(self) -> None:
        """Run the loop until `ended` is set."""
        if not self.begins(True):
            return
        if self._before is not None:
            self._before.join()
            self._before = None
        while not self.ended:  # it may have been meant for the previous one
            self._loop.run_forever()


class LoopRunner:
    """Start and end of the threads of one loop.

    Args:
        needed: returns true if the loop must run. Called under the lock.

    Attributes:
        thread: the running thread.
    """

    def __init__(self, loop: Loop, needed: Callable[[], bool]) -> None:
        """Start without a thread; `needed` says whether the loop has work."""
        self.thread: LoopThread | None = None
        self._loop = loop
        self._needed = needed
        self._lock = threading.RLock()  # re-entrant, because a signal handler may make a call
        self._before: LoopThread | None = None  # it may still be about to end
        self._interval_before = 0.0

    def start(self, call: Call | None = None) -> None:
        """Start the thread, unless it runs, or that call has ended: then nothing would end it."""
        if self.thread is not None:
            return
        with self._lock:
            if self.thread is not None or (call is not None and call.over):
                return
            thread = LoopThread(self._loop, self._before)
            self._interval_before = sys.getswitchinterval()
            try:
                self.thread = thread
                if self._interval_before > SWITCH_INTERVAL:
                    sys.setswitchinterval(SWITCH_INTERVAL)
                thread.start()
            except BaseException:  # there can be no more threads, or this one was interrupted
                if not thread.begins(False):
                    self.thread = None
                    self._restore_interval()
                raise

    def stop_if_idle(self) -> None:
        """End the thread if it is not needed. On the loop, where no signal interrupts it."""
        with self._lock:
            thread = self.thread
            if thread is None:
                return
            # First: a call that is too late to be noticed then sees that no thread runs.
            self.thread = None
            if self._needed():
                self.thread = thread
                return
            self._before = thread
            self._restore_interval()
            thread.ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)

    def ending(self) -> LoopThread | None:
        """Return the last thread, which may not have ended yet; ``None`` while one runs."""
        return self._before if self.thread is None else None

    def last(self) -> LoopThread | None:
        """Return the running thread, or the last one."""
        with self._lock:
            return self.thread or self._before

    def forget(self) -> None:
        """Forget the thread in a forked child: it runs in the parent, like the loop."""
        if self.thread is not None:
            self._restore_interval()
        self._loop.forget()

    def _restore_interval(self) -> None:
        """Restore the switch interval, unless the program has set it meanwhile."""
        if self._interval_before > SWITCH_INTERVAL == sys.getswitchinterval():
            sys.setswitchinterval(self._interval_before)
