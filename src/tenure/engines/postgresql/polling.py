"""Polls for waiters, in a store that delivers no events.

Rules:

* A poll is one command for all sessions of a program. It looks at the first waiter of each queue:
  those behind it are granted later. If it was granted, the others are looked at too.
* The first waiter of a queue is polled often, one behind others less.
* The more programs poll, and the more queues they wait in, the longer is the pause of each. So the
  polls of all programs together stay below 40 a second.
* A program with many queues polls less often, since a poll costs the server more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tenure.engines._kit.commands.pipeline import WAITING
from tenure.engines.postgresql.handoff import HandoffSession

S = TypeVar("S", bound=HandoffSession)

_POLL, _LONGEST_POLL = 0.1, 40.0
"""Seconds between two polls of the first waiter, and of any, at the most."""
_QUEUES = 1.5
"""Queues that programs poll without a longer pause.

The programs in one queue need up to 26 polls a second: ten for the first one, a third of it for the
second one, and so on.
"""
_REQUESTS = 100
"""Requests that one poll looks at without a longer pause."""
_LOOKS = 20
"""Looks for what has expired, in a second, of all programs with new waiters."""


class WaiterPolling(Generic[S]):
    """The polls of one engine.

    Args:
        look: looks at requests of sessions, given with their states as they are known here; calls
            a function then with true if one was granted.
        all_sessions: returns the sessions of the engine.
        now: returns the time, in seconds.
        wake_by: has `poll` called by a time.

    Attributes:
        at: the time of the next poll.
    """

    def __init__(
        self,
        look: Callable[[dict[S, dict[int, int]], Callable[[bool], None]], None],
        all_sessions: Callable[[], Sequence[S]],
        now: Callable[[], float],
        wake_by: Callable[[float], None],
    ) -> None:
        self._look = look
        self._all_sessions = all_sessions
        self._now = now
        self._wake_by = wake_by
        self._programs = self._queues = self._requests = 1
        self.at = 0.0

    @property
    def pause_of_looks(self) -> float:
        """Seconds until a look for what has expired, after a request has begun to wait."""
        return self._programs / _LOOKS

    def note_load(self, programs: int, queues: int) -> None:
        """Note how many programs poll for how many queues."""
        self._programs, self._queues = programs, queues

    def note_waiter(self) -> None:
        """Poll soon for a request that waits."""
        self.note_ahead(0)

    def note_ahead(self, ahead: int) -> None:
        """Poll when a request with so many ahead of it may have been granted."""
        queues = min(self._programs, self._queues) / _QUEUES
        pause = _POLL * max(1.0, queues, self._requests / _REQUESTS)
        self.at = min(self.at, self._now() + min(pause * (ahead + 1) ** 1.5, _LONGEST_POLL))
        self._wake_by(self.at)

    def poll(self) -> None:
        """Look at the first waiter of each queue."""
        self.at = self._now() + _LONGEST_POLL
        first: dict[tuple[str, str], tuple[int, S, int]] = {}
        for session in self._all_sessions():
            if session.early is not None or session.over:
                continue  # a takeover is not complete, or it has ended
            for request_id, order_id in session.waits():
                place = session.path, session.names[request_id]
                if place not in first or order_id < first[place][0]:
                    first[place] = order_id, session, request_id
        self._requests = len(first)
        requests: dict[S, dict[int, int]] = {}
        for _, session, request_id in first.values():
            requests.setdefault(session, {})[request_id] = WAITING
        if requests:
            self._look(requests, self._polled)

    def _polled(self, granted: bool) -> None:
        if granted:
            for session in self._all_sessions():
                session.look_up((WAITING,))
