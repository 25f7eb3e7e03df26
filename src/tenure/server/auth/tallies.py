"""Tallies: the count of each session, with its requests and watches, against its account.

A session is counted from its attaching until it is over. One that was detached lives on in
the store for its recovery window, with its requests; so it is counted for that time, unless it is
attached again or ended through this server before. A restarted server counts sessions
and requests when they are attached again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from tenure.server.auth.accounts import Account

__all__ = ["Tallies", "Tally"]

_MANY = 64  # entries that are not worth looking through


class Tally:
    """Count of one session against its account.

    Attributes:
        account: whose session it is.
        window: seconds for which the session lives in the store when it is detached.
        requests: the bytes of data of each of its requests, by number.
        watches: how many it has.
        detached: its session was detached.
        over: nothing is counted any more.
    """

    __slots__ = ("account", "detached", "over", "requests", "watches", "window")

    def __init__(self, account: Account, window: float) -> None:
        """Start attached, without requests and watches."""
        self.account = account
        self.window = window
        self.requests: dict[int, int] = {}
        self.watches = 0
        self.detached = False
        self.over = False

    def join(self, request_id: int, size: int, node: str, name: str) -> None:
        """Count a request with so many bytes of data.

        Raises:
            LimitReached: it is one too many, or has too many bytes.
        """
        requests, stored = self.account.requests, self.account.stored_bytes
        if requests.used < requests.assured and stored.used + size <= stored.assured:
            requests.used += 1  # the usual case, and what follows would come to the same
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
        """Count a request that was in its queue before."""
        self.account.requests.take_anyway()
        self.account.stored_bytes.take_anyway(size)
        self.requests[request_id] = size

    def resize(self, request_id: int, size: int, node: str) -> int | None:
        """Count other data of a request; returns the size before, or ``None`` if it is not there.

        Raises:
            LimitReached: it has too many bytes.
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
        """Count requests that are in their queues, by number with the size of their data."""
        for request_id, size in requests.items():
            if request_id not in self.requests:
                self.recover(request_id, size)

    def restore(self, request_id: int, size: int) -> None:
        """Count the data that a request had before a change that has failed."""
        now = self.requests.get(request_id)
        if now is not None:
            self.account.stored_bytes.release(now)
            self.account.stored_bytes.take_anyway(size)
            self.requests[request_id] = size

    def enlarge(self, request_id: int, size: int) -> None:
        """Count the larger size of a request's data, before or after a change without an answer."""
        now = self.requests.get(request_id)
        if now is not None and size > now:
            self.account.stored_bytes.take_anyway(size - now)
            self.requests[request_id] = size

    def leave(self, request_id: int) -> None:
        """Count a request no more. Safe to call twice."""
        size = self.requests.pop(request_id, None)
        if size is None:
            return
        requests, stored = self.account.requests, self.account.stored_bytes
        if requests.used <= requests.assured and stored.used <= stored.assured:
            requests.used -= 1  # the usual case
            stored.used -= size
        else:
            requests.release()
            stored.release(size)

    def watch(self, node: str, name: str) -> None:
        """Count a watch. Raises `LimitReached`."""
        self.account.watches.take(node=node, name=name)
        self.watches += 1

    def unwatch(self) -> None:
        """Count a watch no more; nothing happens where the session was left before."""
        if self.watches:
            self.watches -= 1
            self.account.watches.release()

    def leave_watches(self) -> None:
        """Count no watch any more: they end with the attachment."""
        self.account.watches.release(self.watches)
        self.watches = 0

    def end(self) -> None:
        """Count nothing any more. Safe to call twice."""
        if self.over:
            return
        self.over = True
        self.leave_watches()
        self.account.requests.release(len(self.requests))
        self.account.stored_bytes.release(sum(self.requests.values()))
        self.requests = {}  # a takeover that fails may need the former ones
        self.account.sessions.release()


class _Detached(NamedTuple):
    """A session that was detached, and is counted until then."""

    until: float
    order: int
    node: str
    number: int
    tally: Tally


class Tallies:
    """The tallies of a server's sessions, attached and detached."""

    def __len__(self) -> int:
        """Return how much is kept: sessions, and times at which detached ones end."""
        return len(self._tallies) + len(self._detached)

    def __init__(self) -> None:
        """Start without sessions."""
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._detached: list[_Detached] = []
        self._order = itertools.count()

    def find(self, node: str, number: int) -> Tally | None:
        """Return the tally of a session; ``None`` if it is not known here."""
        return self._tallies.get((node, number))

    def attached(self, node: str, number: int, tally: Tally) -> None:
        """Count an attached session, instead of what was counted for it while it was detached."""
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
        """Forget detached sessions that were attached again, when these are more than others."""
        if len(self._detached) > _MANY + 2 * len(self._tallies):
            self._detached = [each for each in self._detached if not each.tally.over]
            heapq.heapify(self._detached)

    def over(self, node: str, number: int, tally: Tally | None = None) -> None:
        """End what is counted for a session that is over. Safe to call twice.

        Args:
            node: the session's node.
            number: the session's id.
            tally: the one that is meant; ``None`` for the one that is known.
        """
        known = self._tallies.get((node, number))
        if tally is None or tally is known:
            self._tallies.pop((node, number), None)
            tally = known
        if tally is not None:
            tally.end()

    def dropped(self, node: str) -> None:
        """End what is counted for the detached sessions of a node that is dropped.

        Attached sessions get their end as an event.
        """
        for each in self._detached:
            if each.node == node:
                self.over(node, each.number, each.tally)

    def expire(self, now: float) -> None:
        """End what is counted for detached sessions whose windows have passed."""
        detached = self._detached
        while detached and (detached[0].until <= now or detached[0].tally.over):
            each = heapq.heappop(detached)
            self.over(each.node, each.number, each.tally)
