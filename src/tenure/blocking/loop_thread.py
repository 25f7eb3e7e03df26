"""Thread that runs the event loop of `tenure.blocking`, as long as the portal needs it.

Rules:

* A lock guards whether the thread runs. A caller announces itself before it looks for the thread;
  ending the thread happens in the other order. So no caller is left waiting.
* One thread at a time runs the loop: the next waits for the end of the one before.
* The thread is a daemon.

Threads that compute in short slices would starve this one: a thread that waits for the interpreter
may request it only after the switch interval, and a thread that releases and takes it each
millisecond is mostly faster. Renewals were seconds late in such a program. So the switch interval
is at most `SWITCH_INTERVAL` while the thread runs, and is restored afterwards.

A signal handler may raise between any two lines of what runs in a program's thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

from tenure import fork
from tenure.blocking.worker import Call

__all__ = ["SWITCH_INTERVAL", "Loop", "LoopRunner", "LoopThread"]

SWITCH_INTERVAL = 0.0005
"""Seconds; what `sys.setswitchinterval` is set to while the loop's thread runs."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop that is its process's own: a forked child must not take it apart."""

    def __init__(self) -> None:
        """Create the loop of this process."""
        self._born = fork.generation
        super().__init__()

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


class LoopThread(threading.Thread):
    """Thread that runs the loop, after another one has ended, until its `ended` is set."""

    def __init__(self, loop: Loop, before: LoopThread | None) -> None:
        """Prepare a thread that runs `loop` once the thread `before` has ended."""
        super().__init__(name="tenure-blocking", daemon=True)
        self._loop = loop
        self._before = before
        self._begun: bool | None = None
        self._beginning = threading.Lock()
        self.ended = False

    def begins(self, begun: bool) -> bool:
        """Settle whether it runs the loop: the first call decides, and each returns the decision.

        A caller that is interrupted while it starts the thread cannot know whether it started.
        """
        with self._beginning:
            if self._begun is None:
                self._begun = begun
            return self._begun

    def run(self) -> None:
        """Run the loop until `ended` is set."""
        if not self.begins(True):
            return
        if self._before is not None:
            self._before.join()
            self._before = None
        while not self.ended:  # perhaps it was the one before that was to stop
            self._loop.run_forever()


class LoopRunner:
    """Start and end of the threads of one loop.

    Args:
        needed: returns true if the loop must run. Called under the lock.

    Attributes:
        thread: the one that runs.
    """

    def __init__(self, loop: Loop, needed: Callable[[], bool]) -> None:
        """Start without a thread; `needed` says whether the loop has work."""
        self.thread: LoopThread | None = None
        self._loop = loop
        self._needed = needed
        self._lock = threading.RLock()  # a signal handler may make a call of its own
        self._before: LoopThread | None = None  # it may still be about to end
        self._interval_before = 0.0

    def start(self, call: Call | None = None) -> None:
        """Start the thread, unless it runs, or that call is over and nothing would end it again."""
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
            except BaseException:  # there can be no more threads; or this one was interrupted
                if not thread.begins(False):
                    self.thread = None
                    self._restore_interval()
                raise

    def stop_if_idle(self) -> LoopThread | None:
        """End the thread if it is not needed; returns the thread that ends."""
        with self._lock:
            thread = self.thread
            if thread is None:
                return None
            try:
                # First of all: a call that comes too late to be seen sees that no thread runs.
                self.thread = None
                if not self._needed():
                    self._before = thread
                    self._restore_interval()
                    thread.ended = True
            finally:  # even if this was interrupted
                if thread.ended:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                else:
                    self.thread = thread
            return thread if thread.ended else None

    def ending(self) -> LoopThread | None:
        """Return the last thread, which may not have ended yet; ``None`` while one runs."""
        with self._lock:
            return self._before if self.thread is None else None

    def last(self) -> LoopThread | None:
        """Return the thread that runs, or the last that did."""
        with self._lock:
            return self.thread or self._before

    def forget(self) -> None:
        """Forget the thread in a forked child: it runs in the parent, as does the loop."""
        if self.thread is not None:
            self._restore_interval()
        self._loop.forget()

    def _restore_interval(self) -> None:
        """Set the switch interval to what it was, unless the program has set it meanwhile."""
        if self._interval_before > SWITCH_INTERVAL == sys.getswitchinterval():
            sys.setswitchinterval(self._interval_before)
