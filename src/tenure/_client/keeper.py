"""Renewal of a client's sessions, even while the event loop is busy.

A keeper belongs to one client. It renews each session when due, from a timer on the client's event
loop and, if that is late, from a thread. Both are needed. A loop that is stuck in one long call
runs no timer, so the thread renews. A loop that is busy in slices of a millisecond can keep the
thread waiting for the GIL for seconds, but still runs its timer.

Rules:

* The thread acts only when a renewal is overdue by a quarter of its interval, or when a deadline
  has passed. It never waits for the loop.
* It stops renewing a session when the loop has not iterated for the session's `max_stall`, or is
  closed: a hung program must not hold its leases for ever.
* A session whose deadline has passed is not renewed; its `lapse` is called.
* Both read the clock at least once a second, to detect that the machine was suspended.
* A thread without sessions ends after a few seconds; the next session starts another.

On a virtual clock there is no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tenure.background import BackgroundThread, BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.greenlets import new_event

TICK = 1.0
"""Longest time between two readings of the clock, in seconds."""

SHORTEST = 0.01
"""Shortest time between two readings of the clock, in seconds."""

IDLE = 10.0
"""Seconds after which a thread without sessions ends."""

_log = logging.getLogger("tenure")


class Kept(Protocol):
    """A session, as seen by its keeper. All of this may be used from any thread."""

    @property
    def renew_at(self) -> float: ...

    @property
    def renew_interval(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def max_stall(self) -> float: ...

    def renew(self) -> None: ...

    def lapse(self) -> None: ...


class Keeper:
    """Renews the sessions of one client, on `loop` and from a thread.

    Args:
        stalled: called on the loop after a stall during which the thread renewed, with the stall's
            length in seconds.
    """

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, stalled: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._stalled = stalled
        self._sessions: dict[Kept, None] = {}
        self._last_iteration = clock.now()
        self._failures = Failures("renewing sessions", _log)
        self._timer = BackgroundTimer(loop, clock.now, self._tick, self._failures)
        self._wake = 0.0  # when it fires
        self._thread: BackgroundThread | None = None
        self._starting = threading.Lock()
        self._woken = new_event()
        self._thread_ended = asyncio.Event()
        self._closing = False
        self._renewed_in_stall = False

    def add(self, session: Kept) -> None:
        """Keep a session alive from now on. On the loop."""
        with self._starting:
            self._sessions[session] = None
            self._start_thread()
        self._woken.set()
        if not self._timer.armed or min(session.renew_at, session.deadline) < self._wake:
            self._timer.run()

    def _start_thread(self) -> None:
        """Start the thread unless it runs; if that fails, the next iteration tries again."""
        lives = self._thread is not None and self._thread.alive
        if not lives and not self._clock.virtual:
            with self._failures.contained():
                over = asyncio.Event()  # its own event: the end of another thread does not set it
                thread = BackgroundThread("tenure-keeper", partial(self._run_thread, over))
                thread.start()
                self._thread, self._thread_ended = thread, over

    def reschedule(self) -> None:
        """Recompute the times of the next renewals. On the loop."""
        self._woken.set()
        self._timer.run()

    def discard(self, session: Kept) -> None:
        """Stop renewing a session. Safe to call twice, and from any thread."""
        self._sessions.pop(session, None)

    async def aclose(self) -> None:
        """Stop, and wait for the end of the thread. Safe to call twice."""
        self._closing = True
        self._woken.set()
        self._timer.cancel()
        thread = self._thread
        if thread is not None:
            await self._thread_ended.wait()
            thread.join()

    # On the loop

    def _tick(self) -> None:
        """Record an iteration of the loop, renew what is due, and set the timer again."""
        if self._closing:
            return
        now = self._clock.now()
        if self._renewed_in_stall:
            self._renewed_in_stall = False
            self._stalled(now - self._last_iteration)
        self._last_iteration = now
        self._wake = now + TICK
        for session in list(self._sessions):
            with self._failures.contained():  # one failure must not affect the other sessions
                self._renew_or_lapse(session, now)
        if self._sessions:
            self._timer.at(self._wake)
            with self._starting:
                self._start_thread()

    def _renew_or_lapse(self, session: Kept, now: float) -> None:
        if now >= session.deadline:
            session.lapse()
            return
        if now >= session.renew_at:
            with self._failures.contained():  # its deadline must still be kept
                session.renew()
        self._wake = min(self._wake, session.deadline, max(session.renew_at, now + SHORTEST))

    # In the thread

    def _run_thread(self, over: asyncio.Event) -> None:
        try:
            self._run_watch()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(over.set)

    def _run_watch(self) -> None:
        while not self._closing:
            idle = not self._sessions
            woken = self._woken.wait(self.watch_over())
            self._woken.clear()
            if idle and not woken and self._may_end():
                return

    def _may_end(self) -> bool:
        with self._starting:
            if self._sessions or self._closing:
                return False
            self._thread = None
            return True

    def watch_over(self) -> float:
        """Do what the loop should have done by now, and return the seconds until the next check."""
        sessions = list(self._sessions)
        return self._watch_sessions(sessions) if sessions else IDLE

    def _watch_sessions(self, sessions: list[Kept]) -> float:
        now = self._clock.now()
        closed = self._loop.is_closed()
        stalled = now - self._last_iteration
        pause = TICK
        for session in sessions:
            with self._failures.contained():  # one failure must not affect the other sessions
                pause = min(pause, self._watch_session(session, now, stalled, closed))
        return max(pause, SHORTEST)

    def _watch_session(self, session: Kept, now: float, stalled: float, closed: bool) -> float:
        if now >= session.deadline:
            session.lapse()
            if closed:
                self.discard(session)  # its own loop will not
            return TICK
        head_start = session.renew_interval / 4
        overdue = session.renew_at + head_start
        if now >= overdue:
            if stalled <= session.max_stall and not closed:
                with self._failures.contained():  # its deadline must still be kept
                    session.renew()
                    self._note_stall(stalled)
            overdue = now + head_start
        return min(overdue - now, session.deadline - now)

    def _note_stall(self, stalled: float) -> None:
        if stalled > 2 * TICK and not self._renewed_in_stall:
            self._renewed_in_stall = True
            _log.warning(
                "the event loop has not turned for %.1f s; its leases are renewed by a thread "
                "until it does, or until max_stall",
                stalled,
            )
