"""Joining a queue.

* **One transaction joins.** If the queue is empty the request is put, and owns: nothing was read.
  If not, a transaction inside the first one puts it and reads what stands before it. Who does not
  want to wait is put only if nothing is newer than the queue that was found to have room.
* What the semaphore is, is remembered with its name, and compared: it is read only if it is another
  one by now, or if the request does not fit what is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.keys import Entry, entries, limit_of, number_owning
from tenure.engines.etcd.request import Request
from tenure.engines.etcd.transactions import LARGE, Transactions
from tenure.engines.etcd.waiting import Waiting
from tenure.errors import SemaphoreNotFound
from tenure.model import EPHEMERAL_LIMIT

if TYPE_CHECKING:
    from tenure.engines.etcd.session import EtcdSession

__all__ = ["Joining", "not_found"]

_NEAR = 2
"""So many in a queue: who joins it is so near to the head that no time is to be lost."""


class Joining:
    """Of one session's requests."""

    def __init__(self, session: EtcdSession, transactions: Transactions, waiting: Waiting) -> None:
        self._session = session
        self._transactions = transactions
        self._waiting = waiting

    async def join(self, request: Request, at_once: bool) -> Request | None:
        """Put a request into its queue; ``None`` if it does not wait and cannot own."""
        session, say, newest = self._session, self._transactions, 0
        while True:
            condition = await self._condition(request)
            whole = request.count == request.limit
            answer, _ = await session.ask(
                partial(say.joining, request, condition, whole, at_once, newest)
                if newest or request.data
                else partial(say.joining_as_before, request, condition, whole, at_once)
            )
            large = not at_once and len(request.data) > LARGE
            if answer.ok and not large:
                request.owns = True
                return self._waiting.joined(request, answer.revision)
            found = answer.parts[1:]
            if not at_once:
                inner = answer if large else found[0]
                if inner.ok:
                    there = inner.parts[-1]
                    request.near = there.count <= _NEAR
                    self._waiting.joined(request, answer.revision)
                    self._waiting.place(request, entries(there.found), answer.revision)
                    return request
                found = found if large else inner.parts
            limit, own, queue = found[0].first, found[1].first, entries(found[2].found)
            if own is not None:  # an attempt whose answer was lost
                self._waiting.joined(request, own.created)
                if at_once:
                    request.owns = True
                else:
                    await self._waiting.look(request, tell=False)
                return request
            if not self._check_condition(request, limit, queue):
                continue
            if whole or not _has_room(queue, request):
                if await self._has_taken_out_late(request, queue):
                    continue
                return None
            newest = answer.revision + 1

    async def _has_taken_out_late(self, request: Request, queue: Sequence[Entry]) -> bool:
        """Take out a late waiter before a request, if there is one; true if it was taken out."""
        engine = self._session.engine
        due = engine.late.next_due(queue)
        if due is None or due > engine.clock.now():
            return False
        return await engine.late.take_out_or_later(request.name)

    async def relieve(self, request: Request, leaving: Request) -> tuple[bool, KeyValue | None]:
        """Put a request into its queue, behind an owner of the whole, and take that one out.

        Returns:
            whether both were done; who was the first then, if that is known.
        """
        answer, _ = await self._session.ask(partial(self._transactions.relieving, request, leaving))
        if answer.ok:
            there = answer.parts[-4]
            request.near = there.count <= _NEAR
            self._waiting.joined(request, answer.revision)
            self._waiting.place(request, entries(there.found), answer.revision)
            return True, answer.parts[-1].first
        own = answer.parts[1].first
        if own is None:
            return False, None
        self._waiting.joined(request, own.created)  # by an attempt whose answer was lost
        self._waiting.look_soon(request)
        return True, None

    async def _condition(self, request: Request) -> bytes:
        """Return the compare for the semaphore, after checking the request against it."""
        name, count = request.name, request.count
        right = isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT
        if request.ephemeral:
            if not right or rules.EXACT < count < EPHEMERAL_LIMIT:
                await self._learn(request)
            return name.absent
        if name.lasting is None or not right or not count <= min(name.lasting[1], rules.EXACT):
            await self._learn(request)
        assert name.lasting is not None
        created, request.limit = name.lasting
        return wire.created_at(name.limit, created)

    async def _learn(self, request: Request) -> None:
        """Look up the semaphore, and check the request against it."""
        name = request.name
        limit, queue = (await self._session.read(name.get_limit, name.first_request)).parts
        self._check_condition(request, limit.first, entries(queue.found))
        rules.check_count(request.count, request.limit, name.path, name.name)

    def _check_condition(
        self, request: Request, limit: KeyValue | None, queue: Sequence[Entry]
    ) -> bool:
        """Return true if the semaphore is as remembered; raise if the request does not fit it."""
        name, known = request.name, request.name.lasting
        name.lasting = None if limit is None else (limit.created, limit_of(limit.value))
        if request.ephemeral:
            rules.check_kind(True, limit is None, name.path, name.name)
            return True
        if name.lasting is None:
            if queue:
                rules.check_kind(False, True, name.path, name.name)
            raise not_found(name.name, name.path)
        request.limit = name.lasting[1]
        return name.lasting == known


def _has_room(queue: Sequence[Entry], request: Request) -> bool:
    """Return true if a request would own, behind this queue."""
    if number_owning(queue, request.limit) < len(queue):
        return False
    held = sum(each.count for each in queue)
    whole = any(each.count == request.limit for each in queue)
    return rules.fits(held, whole, request.count, request.limit)


def not_found(name: str, path: str) -> SemaphoreNotFound:
    """The error for a name that no semaphore has."""
    return SemaphoreNotFound(
        f"there is no semaphore {name!r} on {path}; create it first", node=path, name=name
    )
