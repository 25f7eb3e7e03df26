"""Tallies: the usage of each session, with its requests and watches, against its account.

A session is counted from attaching to its end. A detached session survives in the store for its
recovery window, with its requests, and is counted for that time, unless it is reattached or ended
through this server before. A restarted server counts sessions and requests when they are
reattached.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from tenure.server.auth.accounts import Account

_MANY = 64  # number of entries that are not worth searching


class Tally:
    """Usage of one session.

    Attributes:
        account: the account of the session.
        window: seconds that the session survives in the store when it is detached.
        requests: the bytes of data of each of its requests, by id.
        watches: number of its watches.
        detached: whether the session was detached.
        over: whether counting has ended.
    """

    __slots__ = ("account", "detached", "over", "requests", "watches", "window")

    def __init__(self, account: Account, window: float) -> None:
        self.account = account
        self.window = window
        self.requests: dict[int, int] = {}
        self.watches = 0
        self.detached = False
        self.over = False

    def join(self, request_id: int, size: int, node: str, name: str) -> None:
        """Count a request with that many bytes of data.

        Raises:
            LimitReached: there would be too many requests, or too many bytes.
        """
        requests, stored = self.account.requests, self.account.stored_bytes
        if requests.used < requests.assured and stored.used + size <= stored.assured:
            requests.used += 1  # the common case, with the same result as below
            stored.used += size
        else:
            requests.take(node=node, name=name)
            try:
                stored.take(size, node=node, name=name)
            except BaseException:
                requests.release()
                raise
        self.requests[request_id] = size

    def recover(self, request_id: int, size: int) -> None:
        """Count a request that was already in its queue."""
        self.account.requests.take_anyway()
        self.account.stored_bytes.take_anyway(size)
        self.requests[request_id] = size

    def resize(self, request_id: int, size: int, node: str) -> int | None:
        """Count new data of a request; return the size before, or ``None`` if it does not exist.

        Raises:
            LimitReached: there would be too many bytes.
        """
        before = self.requests.get(request_id)
        if before is not None:
            if size > before:
                self.account.stored_bytes.take(size - before, node=node)
            elif size < before:
                self.account.stored_bytes.release(before - size)
            self.requests[request_id] = size
        return before

    def resume(self, requests: Mapping[int, int]) -> None:
        """Count requests that are in their queues: the sizes of their data, by id."""
        for request_id, size in requests.items():
            if request_id not in self.requests:
                self.recover(request_id, size)

    def restore(self, request_id: int, size: int) -> None:
        """Count the previous data of a request, after a change that failed."""
        now = self.requests.get(request_id)
        if now is not None:
            self.account.stored_bytes.release(now)
            self.account.stored_bytes.take_anyway(size)
            self.requests[request_id] = size

    def enlarge(self, request_id: int, size: int) -> None:
        """Count the larger size of a request's data, after a change without an answer."""
        now = self.requests.get(request_id)
        if now is not None and size > now:
            self.account.stored_bytes.take_anyway(size - now)
            self.requests[request_id] = size

    def leave(self, request_id: int) -> None:
        """Uncount a request. Safe to call twice."""
        size = self.requests.pop(request_id, None)
        if size is None:
            return
        requests, stored = self.account.requests, self.account.stored_bytes
        if requests.used <= requests.assured and stored.used <= stored.assured:
            requests.used -= 1  # the common case
            stored.used -= size
        else:
            requests.release()
            stored.release(size)

    def watch(self, node: str, name: str) -> None:
        """Count a watch. Raises `LimitReached`."""
        self.account.watches.take(node=node, name=name)
        self.watches += 1

    def unwatch(self) -> None:
        """Uncount a watch; does nothing if the session was detached before."""
        if self.watches:
            self.watches -= 1
            self.account.watches.release()

    def leave_watches(self) -> None:
        """Uncount all watches: they end with the attachment."""
        self.account.watches.release(self.watches)
        self.watches = 0

    def end(self) -> None:
        """Uncount everything. Safe to call twice."""
        if self.over:
            return
        self.over = True
        self.leave_watches()
        self.account.requests.release(len(self.requests))
        self.account.stored_bytes.release(sum(self.requests.values()))
        self.requests = {}  # a takeover that fails may need the former ones
        self.account.sessions.release()


class _Detached(NamedTuple):
    """A detached session, counted until that time."""

    until: float
    order: int
    node: str
    number: int
    tally: Tally


class Tallies:
    """The tallies of a server's sessions, attached and detached."""

    def __len__(self) -> int:
        """Return the number of entries: sessions, and end times of detached ones."""
        return len(self._tallies) + len(self._detached)

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._detached: list[_Detached] = []
        self._order = itertools.count()

    def find(self, node: str, number: int) -> Tally | None:
        """Return the tally of a session, or ``None`` if it is unknown here."""
        return self._tallies.get((node, number))

    def attached(self, node: str, number: int, tally: Tally) -> None:
        """Count an attached session, replacing its count as a detached one."""
        former = self._tallies.get((node, number))
        if former is not None:
            former.end()
        if not tally.over:
            self._tallies[node, number] = tally

    def detached(self, node: str, number: int, tally: Tally, now: float) -> None:
        """Count a detached session until its recovery window has passed."""
        tally.leave_watches()
        if not (tally.over or tally.detached):
            tally.detached = True
            self._forget_attached()
            until = now + tally.window
            heapq.heappush(self._detached, _Detached(until, next(self._order), node, number, tally))

    def _forget_attached(self) -> None:
        """Drop entries of sessions that were reattached, when these are the majority."""
        if len(self._detached) > _MANY + 2 * len(self._tallies):
            self._detached = [each for each in self._detached if not each.tally.over]
            heapq.heapify(self._detached)

    def over(self, node: str, number: int, tally: Tally | None = None) -> None:
        """Stop counting a session that has ended. Safe to call twice.

        Args:
            node: the session's node.
            number: the session's id.
            tally: the session's tally; ``None`` for the known one.
        """
        known = self._tallies.get((node, number))
        if tally is None or tally is known:
            self._tallies.pop((node, number), None)
            tally = known
        if tally is not None:
            tally.end()

    def dropped(self, node: str) -> None:
        """Stop counting the detached sessions of a dropped node.

        Attached sessions are notified by an event.
        """
        for each in self._detached:
            if each.node == node:
                self.over(node, each.number, each.tally)

    def expire(self, now: float) -> None:
        """Stop counting the detached sessions whose recovery windows have passed."""
        detached = self._detached
        while detached and (detached[0].until <= now or detached[0].tally.over):
            each = heapq.heappop(detached)
            self.over(each.node, each.number, each.tally)
