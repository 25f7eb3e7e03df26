"""Deadlines of a store: the expiry of its sessions and the timeouts of its waiters.

Outdated entries stay in the heap until they reach the top, or until half of the heap may be
outdated.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from tenure.core.node import StoredRequest, StoredSession


class Deadlines:
    """A heap of deadlines, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, StoredSession | StoredRequest]] = []
        self._pushed = 0
        self._compact_at = 1000

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline, which may be outdated; ``None``: no deadline is set."""
        return self._heap[0][0] if self._heap else None

    def add(self, when: float, entry: StoredSession | StoredRequest) -> None:
        """Check a session or a waiter at that time."""
        if len(self._heap) >= self._compact_at:
            self._heap = [each for each in self._heap if _is_right(each)]
            heapify(self._heap)
            self._compact_at = max(1000, 2 * len(self._heap))
        if not isinstance(entry, StoredRequest):
            entry.due = when
        self._pushed += 1
        heappush(self._heap, (when, self._pushed, entry))

    def set_timeout(self, request: StoredRequest, deadline: float | None) -> None:
        """Index in the heap; set when a waiter is removed."""
        request.deadline = deadline
        if deadline is not None:
            self.add(deadline, request)

    def take(self, instant: float) -> Iterator[StoredSession | StoredRequest]:
        """Remove the entries of the earliest deadline, and yield those that are still valid."""
        while self._heap and self._heap[0][0] == instant:
            entry = heappop(self._heap)
            if _is_right(entry):
                yield entry[2]


def _is_right(entry: tuple[float, int, StoredSession | StoredRequest]) -> bool:
    """Return true if the entry has the current deadline of its session or request."""
    when, _, what = entry
    if isinstance(what, StoredRequest):
        return what.deadline == when
    return what.alive and what.due == when
