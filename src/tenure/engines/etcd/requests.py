"""The requests of one session, and their lives.

A request is asked (its transaction is under way), waits, owns, or is gone. `waiting` joins a queue
and finds out that a request owns; `transactions` builds the commands.

Rules:

* A request is in the table from when it is asked for until it is withdrawn, taken out, or gives up.
  One that leaves is gone for the program at once, and in `leaving` until etcd has confirmed it; if
  etcd refuses that, it is repeated, by the next withdrawal or after a while.
* A waiter with a timeout is taken out by a timer of its own program; when that program has lost
  contact, by another one that waits behind it: see `late`.
* The transaction that takes out an owner which another one of the same session follows reads which
  is first then: if that is the follower, it owns. Any other one of this engine that follows looks.
* Where an owner of the whole leaves just after another request of the session joins behind it, one
  transaction does both, one after the other: a hand-over is one commit even if all line up again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.attachment import Attachment
from tenure.engines.etcd.keys import DELETED, EVICTED, TIMED_OUT, Name, Queue
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.transactions import LARGE, Transactions
from tenure.engines.etcd.waiting import Waiting, heard
from tenure.errors import LeaseReleased, SessionExpired
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Recovered, Unchanged

__all__ = ["EtcdRequests"]

_log = logging.getLogger("tenure")

_REMOVALS = {
    EVICTED: Removal.EVICTED,
    DELETED: Removal.DELETED,
    TIMED_OUT: Removal.TIMED_OUT,
}

_REFUSED = Enqueued(Place.REFUSED, None)

_AGAIN = 2.0
"""Seconds until a request leaves once more, which was refused that."""


class EtcdRequests:
    """All of one session's."""

    def __init__(self, session: Attachment) -> None:
        self._session = session
        self._engine = session.engine
        self._requests: dict[int, EtcdRequest] = {}
        self._leaving: dict[int, asyncio.Future[Withdrawn]] = {}
        self._left_in: dict[int, EtcdRequest] = {}  # of whose leaving etcd would not hear
        self._transactions = Transactions(session)
        self._waiting = Waiting(session, self._transactions, self.taken_out)

    # Joining

    def enqueue(
        self, hold: int, name: Name, count: int, data: bytes, timeout: float | None, ephemeral: bool
    ) -> asyncio.Future[Enqueued]:
        request = EtcdRequest(self._waiting, self._session.id, hold, name, count, data, ephemeral)
        request.timeout = timeout
        self._requests[hold] = request
        return self._session.turns.take(name.name, lambda: self._enqueue(request, timeout))

    async def _enqueue(self, request: EtcdRequest, timeout: float | None) -> Enqueued:
        leaving = self._session.turns.leaves_next(request.name.name)
        placed: EtcdRequest | None = None
        try:
            if leaving is not None and timeout != 0 and _may_relieve(request, leaving):
                relieved, head = await self._waiting.relieve(request, leaving)
                if relieved:
                    placed = request
                    self._is_out(leaving, head, joined=request)
            if placed is None:
                placed = await self._waiting.join(request, timeout == 0)
        except BaseException:
            if self._requests.pop(request.hold, None) is not None and request.created:
                self._leave(request).add_done_callback(heard)  # there is no caller to withdraw it
            raise
        if placed is None:
            self._requests.pop(request.hold, None)
            return _REFUSED
        if request.early is not None:
            self._engine.loop.call_soon(self.taken_out, request.hold, request.early)
        if not request.owns and timeout is not None:
            self._set_timer(request, timeout)
        return Enqueued(
            Place.GRANTED if request.owns else Place.WAITING, self._waiting.order_id(request)
        )

    def look_at_all(self) -> None:
        """Something may have been missed."""
        for request in self._requests.values():
            self._waiting.look_soon(request)

    # Changing

    def alter(
        self, hold: int, count: int | None, data: bytes | None, timeout: float | Unchanged | None
    ) -> asyncio.Future[None]:
        request = self._requests.get(hold)
        if request is None:
            raise self._released()
        return self._session.turns.take(
            request.name.name, lambda: self._alter(request, count, data, timeout)
        )

    def _released(self) -> LeaseReleased:
        path = self._session.path
        return LeaseReleased(f"the request on {path} is over", node=path)

    async def _alter(
        self,
        request: EtcdRequest,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> None:
        path, name = self._session.path, request.name.name
        if request.gone or request.hold not in self._requests:
            raise self._released()
        if data is not None:
            rules.check_data(data, path, name)
        if count is not None:
            # The limit does not matter to one that is to shrink, and growing is always wrong.
            grows = isinstance(count, int) and request.count < count <= EPHEMERAL_LIMIT
            limit = EPHEMERAL_LIMIT if grows and count <= rules.EXACT else request.count
            rules.check_shrink(count, request.count, limit, path, name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, path, name)
        shrinks = count is not None and count != request.count
        retimed = False
        if timeout is not UNCHANGED and timeout != 0 and not request.owns:
            request.timeout, retimed = timeout, True
        if shrinks or retimed or (data is not None and data != request.data):
            new = request.count if count is None else count
            answer, _ = await self._session.ask(
                partial(self._transactions.changing, request, new, data)
            )
            if not answer.ok:
                raise self._released()
            request.count = new
            request.data = request.data if data is None else data
            if not request.owns and shrinks:
                self._waiting.unwatch(request)  # it watched for what it wanted before
        if not request.owns and (shrinks or timeout == 0):
            await self._waiting.look(request, tell=False)
            self._engine.loop.call_soon(self._tell_if_granted, request)
        if timeout is not UNCHANGED:
            self._set_timer(request, timeout)

    def _tell_if_granted(self, request: EtcdRequest) -> None:
        if request.owns and not (request.gone or self._session.over):
            self._waiting.granted(request)

    # Leaving

    def withdraw(self, hold: int) -> Answer[Withdrawn]:
        request = self._requests.pop(hold, None) or self._left_in.pop(hold, None)
        if request is None:
            return self._leaving.get(hold, Withdrawn.MISSING)
        return self._leave(request)

    def _leave(self, request: EtcdRequest) -> asyncio.Future[Withdrawn]:
        request.gone = True
        self._waiting.stop(request)
        name = request.name.name
        future = self._session.turns.take(name, lambda: self._delete(request), request)
        self._leaving[request.hold] = future
        future.add_done_callback(partial(self._left, request))
        return future

    def _left(self, request: EtcdRequest, left: asyncio.Future[Withdrawn]) -> None:
        del self._leaving[request.hold]
        if not (self._session.over or left.cancelled() or left.exception() is None):
            self._left_in[request.hold] = request
            request.timer = self._engine.loop.call_later(_AGAIN, self._leave_again, request.hold)

    def _leave_again(self, hold: int) -> None:
        self._leave(self._left_in.pop(hold)).add_done_callback(heard)

    async def _delete(self, request: EtcdRequest) -> Withdrawn:
        """Take it out of its queue."""
        if request.left:
            return Withdrawn.LEFT
        session, head = self._session, None
        follows = any(each.waiting is self._waiting for each in request.followers)
        hands_over = follows and request.owns and request.created
        build = self._transactions.handing_over if hands_over else self._transactions.deleting
        try:
            answer, _ = await session.ask(partial(build, request), request)
        except SessionExpired:
            if request.perhaps_left:
                return Withdrawn.LEFT
            raise
        if hands_over:
            head = answer.parts[-1].first
        if session.over:
            request.left = True  # no event is delivered any more
        else:
            self._is_out(request, head)
        was_there = answer.parts[0].count > 0 or request.perhaps_left
        return Withdrawn.LEFT if was_there else Withdrawn.MISSING

    def _is_out(
        self,
        request: EtcdRequest,
        head: KeyValue | None = None,
        *,
        joined: EtcdRequest | None = None,
    ) -> None:
        """Take note that a request is out of its queue.

        Args:
            head: the first request of the queue then, if that is known.
            joined: a request that has joined just before, and whose caller has no answer yet: it
                looks by itself.
        """
        request.left = True
        for each in request.followers:
            is_first = head is not None and head.key == each.key
            if is_first and each.waiting is self._waiting and not (each.decided or each is joined):
                each.owns = True
                self._waiting.stop(each)
                self._waiting.granted(each)
        self._waiting.gone(request)

    def _set_timer(self, request: EtcdRequest, timeout: float | None) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if timeout is not None and not request.decided:
            request.timer = self._engine.loop.call_later(timeout, self._give_up, request)

    def _give_up(self, request: EtcdRequest) -> None:
        """It has waited for as long as it wanted to."""
        if not request.decided:
            self._requests.pop(request.hold, None)
            self._leave(request).add_done_callback(partial(self._gave_up, request.hold))

    def _gave_up(self, hold: int, left: asyncio.Future[Withdrawn]) -> None:
        if left.cancelled() or self._session.over:
            return
        error = left.exception()
        if error is not None:
            _log.warning("a waiter on %s gave up: %s", self._session.path, error)
        self._session.events.removed(hold, Removal.TIMED_OUT)

    def taken_out(self, hold: int, why: bytes) -> None:
        """Forget a request that another client took out of its queue."""
        request = self._requests.get(hold)
        if request is None:
            return
        if not request.created:
            request.early = why
            return
        del self._requests[hold]
        self._waiting.stop(request)
        self._waiting.gone(request)
        self._session.events.removed(hold, _REMOVALS.get(why, Removal.EVICTED))

    def stop(self) -> None:
        """The session is over."""
        local = self._engine.local.values()
        mine = [each for each in local if each.waiting is self._waiting]
        for request in {*self._requests.values(), *self._left_in.values(), *mine}:
            self._waiting.stop(request)
            self._waiting.gone(request)
        self._requests.clear()
        self._left_in.clear()

    # Taking over

    def recover(self, queues: Sequence[Queue], data: dict[bytes, bytes]) -> list[Recovered]:
        """Go on with what the session has in queues, and tell it, in the order of the queues."""
        mine: list[EtcdRequest] = []
        for found in queues:
            name = self._session.name(found.name)
            for number, entry in enumerate(found.requests):
                if entry.session != self._session.id:
                    continue
                request = EtcdRequest(
                    *(self._waiting, entry.session, entry.hold, name),
                    *(entry.count, b"", found.limit_kv is None),
                )
                request.data = data.get(request.data_key, b"")
                request.limit = found.limit
                self._waiting.joined(request, entry.created)
                request.marked = entry.marked
                request.timeout = entry.timeout
                request.owns = number < found.owning
                self._requests[entry.hold] = request
                if not request.owns:  # it waits once more, at the most
                    self._set_timer(request, entry.timeout)
                mine.append(request)
        return [
            Recovered(
                request_id=each.hold,
                name=each.name.name,
                order_id=self._waiting.order_id(each),
                count=each.count,
                data=each.data,
                ephemeral=each.ephemeral,
                granted=each.owns,
            )
            for each in sorted(mine, key=lambda each: each.created)
        ]


def _may_relieve(request: EtcdRequest, leaving: EtcdRequest) -> bool:
    """Return true if one may join in the transaction that takes the other one out."""
    return (
        leaving.owns
        and leaving.created > 0
        and leaving.ephemeral
        and request.ephemeral
        and leaving.count == request.count == EPHEMERAL_LIMIT
        and len(request.data) <= LARGE
    )
