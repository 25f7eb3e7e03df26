"""What keeps a client's sessions alive: renewals that a busy event loop cannot starve.

A keeper belongs to one client. It renews each session when that is due, from whichever comes
first: a timer on the client's loop, or a thread. Both are needed. A loop that is stuck in one
long call runs no timer, and the thread renews in its place; against a loop that is busy in
slices of a millisecond a thread may wait for seconds for the interpreter, and the timer, which
such a loop does run, renews.

Rules:

* The thread gives the loop a head start: it acts when a renewal is overdue by a quarter of its
  interval, and when a deadline has passed.
* It stops renewing for a session when the loop has not turned for the session's `max_stall`,
  or is closed: a wedged program must not hold for ever.
* A session whose deadline has passed is never renewed; it is told so (`lapse`), once.
* Both wake at least once a second, so that the end of a suspension is noticed.

On a virtual clock there is no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from tenure.clock import Clock

__all__ = ["TICK", "Kept", "Keeper"]

TICK = 1.0
"""Seconds between two looks at the clock, at the most."""

_log = logging.getLogger("tenure")


class Kept(Protocol):
    """A session, as its keeper sees it. All of this may be used from any thread."""

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
    """Renews the sessions of one client, on `loop` and beside it.

    Args:
        stalled: called on the loop, after a stall during which the thread renewed, with its
            length in seconds.
    """

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, stalled: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._stalled = stalled
        self._sessions: set[Kept] = set()
        self._last_turn = clock.now()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._renewed_in_stall = False

    def add(self, session: Kept) -> None:
        """Keep a session alive from now on. On the loop."""
        with self._changed:
            self._sessions.add(session)
            self._changed.notify()
        self._turn()
        if self._thread is None and not self._clock.virtual:
            self._thread = threading.Thread(
                target=self._run_thread, name="tenure-keeper", daemon=True
            )
            self._thread.start()

    def reschedule(self) -> None:
        """Look again at when renewals are due. On the loop."""
        with self._changed:
            self._changed.notify()
        self._turn()

    def discard(self, session: Kept) -> None:
        """Leave a session to itself. Safe to call twice."""
        with self._changed:
            self._sessions.discard(session)

    def close(self) -> None:
        """Stop, and wait for the thread (which never waits for the loop). Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # On the loop

    def _turn(self) -> None:
        """The loop turns: note it, renew what is due, and set the timer for the next time."""
        if self._closing:
            return
        now = self._clock.now()
        if self._renewed_in_stall:
            self._renewed_in_stall = False
            self._stalled(now - self._last_turn)
        self._last_turn = now
        wake = now + TICK
        for session in list(self._sessions):
            if now >= session.deadline:
                session.lapse()
                continue
            if now >= session.renew_at:
                session.renew()
            wake = min(wake, session.deadline, max(session.renew_at, now + TICK / 100))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sessions:
            self._timer = self._loop.call_later(wake - now, self._turn)

    # In the thread

    def _run_thread(self) -> None:
        with self._changed:
            while not self._closing:
                sessions = list(self._sessions)
                if not sessions:
                    self._changed.wait()
                    continue
                self._changed.release()
                try:
                    wake = self._watch_over(sessions)
                finally:
                    self._changed.acquire()
                if not self._closing and wake > 0:
                    self._changed.wait(wake)

    def _watch_over(self, sessions: list[Kept]) -> float:
        """Do what the loop should have done by now; returns the seconds until the next look."""
        now = self._clock.now()
        wake = TICK
        stalled = now - self._last_turn
        for session in sessions:
            if now >= session.deadline:
                session.lapse()
                continue
            overdue = session.renew_at + session.renew_interval / 4
            if now >= overdue:
                if stalled <= session.max_stall and not self._loop.is_closed():
                    session.renew()
                    self._note_stall(stalled)
                overdue = now + session.renew_interval / 4
            wake = min(wake, overdue - now, session.deadline - now)
        return max(wake, TICK / 100)

    def _note_stall(self, stalled: float) -> None:
        if stalled > 2 * TICK and not self._renewed_in_stall:
            self._renewed_in_stall = True
            _log.warning(
                "the event loop has not turned for %.1f s; its leases are renewed by a thread "
                "until it does, or until max_stall",
                stalled,
            )
