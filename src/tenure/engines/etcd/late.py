"""Overdue waiters: their timeout has passed, and their own program does not remove them.

The value of a waiting request contains its timeout. If its program has lost contact or was killed,
the request stays under its lease and delays the queue. Any program that waits behind it removes it.

Rules:

* Clocks of different machines are not compared. The timeout counts from when *this* program first
  saw the request with its current value, so it is never removed early.
* Its own program removes a request `_OTHERS` seconds before other programs do.
* Only a waiter is removed: the transaction compares that neither it nor any request before it was
  put or deleted since the queue was read. If these are too many for one transaction, it stays until
  there are fewer, or its lease ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from tenure.clock import Clock
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Answer
from tenure.engines.etcd.errors import Lost, Refused
from tenure.engines.etcd.keys import (
    TIMED_OUT,
    Entry,
    Keys,
    Name,
    entries,
    limit_of,
    number_owning,
    taking_out,
)
from tenure.model import EPHEMERAL_LIMIT

_OTHERS = 0.5
_MOST_SEEN = 4096
_MOST_COMPARED = 100  # etcd's default maximum is 128 comparisons


class LateWaiters:
    """Timeouts of other programs' requests, as seen by one engine.

    Args:
        local: the requests of this engine, by key.
        txn: sends a transaction, with its timeout in seconds.
    """

    def __init__(
        self,
        keys: Keys,
        clock: Clock,
        local: Mapping[bytes, object],
        txn: Callable[[bytes, float], Awaitable[Answer]],
        timeout: float,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._local = local
        self._txn = txn
        self._timeout = timeout
        self._seen: dict[bytes, tuple[int, float]] = {}  # key: (modified, first seen)

    def next_due(self, queue: Iterable[Entry]) -> float | None:
        """Return when the first of these requests becomes overdue, if one has a timeout."""
        dues = [
            self._due(entry, entry.timeout)
            for entry in queue
            if entry.timeout is not None and entry.key not in self._local
        ]
        return min(dues, default=None)

    def _due(self, entry: Entry, timeout: float) -> float:
        now = self._clock.now()
        modified, first = self._seen.get(entry.key, (0, now))
        if modified != entry.modified:
            if len(self._seen) >= _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            first = now
            self._seen[entry.key] = (entry.modified, first)
        return first + timeout + _OTHERS

    async def take_out(self, name: Name) -> bool:
        """Remove overdue waiters from a queue; return true if there were any.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        found = False
        while True:
            read = await self._txn(wire.txn((), (name.get_limit, name.queue)), self._timeout)
            limit, queue = read.parts[0].first, entries(read.parts[1].found)
            most = EPHEMERAL_LIMIT if limit is None else limit_of(limit.value)
            owning = number_owning(queue, most)
            waiting = range(owning, len(queue))
            place = next((each for each in waiting if self._is_late(queue[each])), None)
            if place is None or place > _MOST_COMPARED:
                return found
            if await self._take_out(name, queue[place], queue[:place]):
                found = True
                self._seen.pop(queue[place].key, None)

    async def take_out_or_later(self, name: Name) -> bool:
        """Do the same, and return false without an answer; the next read tries again."""
        try:
            return await self.take_out(name)
        except Lost:
            return False

    def _is_late(self, entry: Entry) -> bool:
        due = self.next_due([entry])
        return due is not None and due <= self._clock.now()

    async def _take_out(self, name: Name, late: Entry, before: Sequence[Entry]) -> bool:
        compares = tuple(wire.modified_at(each.key, each.modified) for each in (late, *before))
        session = self._keys.session(name.path, late.session)
        then = taking_out(name, late, session, TIMED_OUT)
        try:
            answer = await self._txn(wire.txn(compares, then), self._timeout)
        except Refused as refused:
            if refused.no_lease:
                return True  # its session has just ended
            raise
        return answer.ok
