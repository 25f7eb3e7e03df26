"""Requests of one session, from their creation until they have left their queues.

::

    SENT ---> WAITS --> TAKEN --> OWNS        TAKEN: owns, and the order id was requested
      |         |         |        |
      +---------+---------+--------+--> LEAVING --> GONE     withdrawn, until the server confirms
      +---------+---------+--------+--> GONE                 refused, timed out, removed

A request that is withdrawn during an outage, before it was sent, is GONE at once. Otherwise
programs that try again and again would fill the memory.

This module removes requests; `joining` adds and changes them. An operation with a
transient failure is repeated after a pause, if a request would otherwise stay in its queue, or a
waiter would miss its grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from tenure.engines._kit.operations import Step
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.ydb import messages
from tenure.engines.ydb.members import GroupSession, Member
from tenure.engines.ydb.protocol import YdbOperation
from tenure.errors import TenureError
from tenure.wire.ydb import Message, Status

RETRY_PAUSE = 0.25
"""Seconds before an operation that failed is repeated."""

LONGEST_WAIT = 24 * 3600.0
"""Longest timeout in seconds that the server measures; a longer one is measured here."""


class State(Enum):
    """Last known state of a request."""

    SENT = "sent"  # no answer yet
    WAITS = "waits"
    TAKEN = "taken"  # it is an owner; its order id is not known yet
    OWNS = "owns"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class YdbRequest:
    """A request of the session, and the member through which it is in its queue.

    Attributes:
        request_id: its number in the session.
        deadline: end of its timeout, on the clock, or ``None``.
        at_once: whether it is granted at once, or rejected.
        member: the member through which it was sent.
        operation: the pending operation that the grant will answer.
        changed: answers the change that this operation makes; ``None`` if it makes none.
        taken: whether it was ever granted.
        release: the pending operation that takes it out of its queue.
        may_be_out: whether the server may have taken it out, with a lost answer.
        refused: whether the server rejected it; the error is known, or being determined.
        order_id: its order id, once known.
        owned_at: the session's step at which the grant and its order id were known.
        order_id_requested: whether a description that will contain it is pending.
        order_id_read: the last operation that requested such a description.
        answer: the result of `enqueue`.
        join: the step that sends it, in the operation queue of its name.
        leavers: callers that wait until it has left its queue.
        lost: whether it has left its queue without a withdrawal.
    """

    request_id: int
    name: str
    count: int
    data: bytes
    deadline: float | None
    at_once: bool
    ephemeral: bool
    answer: asyncio.Future[Enqueued]
    state: State = State.SENT
    member: Member | None = None
    operation: YdbOperation | None = None
    changed: Callable[[], None] | None = None
    taken: bool = False
    release: YdbOperation | None = None
    may_be_out: bool = False
    refused: bool = False
    order_id: int | None = None
    owned_at: int = 0
    order_id_requested: bool = False
    order_id_read: YdbOperation | None = None
    join: Step | None = None
    leavers: list[asyncio.Future[Withdrawn]] = field(default_factory=list)
    lost: bool = False

    def left_at(self, now: float) -> float | None:
        """Return the remaining seconds of its timeout, for the server."""
        if self.at_once:
            return 0.0
        if self.deadline is None:
            return None
        left = self.deadline - now
        return None if left > LONGEST_WAIT else max(left, 0.0)

    def message(self, req_id: int, left: float | None) -> Message:
        """Return the message that joins the queue, or changes the request there."""
        return messages.acquire(
            req_id, self.name, self.count, self.data, left, ephemeral=self.ephemeral
        )

    def answer_with(self, enqueued: Enqueued) -> bool:
        """Answer `enqueue`; return false if it was answered before."""
        if self.answer.done():
            return False
        self.answer.set_result(enqueued)
        return True

    def fail(self, error: TenureError) -> None:
        """Answer `enqueue` with an error, unless it was answered before."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def answer_leavers(self, withdrawn: Withdrawn) -> None:
        """Answer the withdrawals: it has left its queue."""
        for answer in self.leavers:
            if not answer.done():
                answer.set_result(withdrawn)


def settle(answer: asyncio.Future[None], error: TenureError | None = None) -> None:
    """Settle the answer, unless it is settled or abandoned."""
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


class YdbRequests:
    """The requests of one session, by number and by name."""

    def __init__(self, session: GroupSession) -> None:
        self._session = session
        self._queues = session.queues
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, YdbRequest] = {}
        self._by_name: dict[str, dict[YdbRequest, None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._over = False

    def add(self, request: YdbRequest) -> None:
        """Add a request."""
        self._requests[request.request_id] = request
        self._by_name.setdefault(request.name, {})[request] = None

    def get(self, request_id: int) -> YdbRequest | None:
        """Return a request, unless it has left its queue."""
        return self._requests.get(request_id)

    def of(self, name: str) -> list[YdbRequest]:
        """Return the requests for a semaphore."""
        return list(self._by_name.get(name, ()))

    def through(self, member: Member) -> list[YdbRequest]:
        """Return the requests that were sent through a member."""
        return [each for each in self._requests.values() if each.member is member]

    def owned(self, name: str) -> list[YdbRequest]:
        """Return the owners of a semaphore."""
        return [each for each in self.of(name) if each.state is State.OWNS]

    def owned_names(self) -> list[str]:
        """Return the semaphores that have an owner."""
        return [
            name
            for name, requests in self._by_name.items()
            if any(request.state is State.OWNS for request in requests)
        ]

    def close(self) -> None:
        """Drop all requests, because the session has ended."""
        self._over = True
        for request in self._requests.values():
            if request.may_be_out or (request.release is not None and request.release.repeated):
                request.answer_leavers(Withdrawn.LEFT)
        self._requests.clear()
        self._by_name.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        request = self._requests.get(request_id)
        if request is None:
            return Withdrawn.MISSING
        if self._withdraw_unsent(request):
            return Withdrawn.LEFT
        answer: asyncio.Future[Withdrawn] = self._session.future()
        self._queues.of(request.name).add(partial(self._leave, request, answer))
        return answer

    def _withdraw_unsent(self, request: YdbRequest) -> bool:
        """Withdraw a request if it was not sent in an outage; return whether that is done."""
        member, operation = request.member, request.operation
        if self._session.failure is None or request.state is not State.SENT or request.refused:
            return False
        if member is not None and (operation is None or operation.sent):
            return False
        queue = self._queues.of(request.name)
        self.forget(request)
        self._loop.call_soon(request.answer_with, Enqueued(Place.REFUSED, None))
        if member is None:
            assert request.join is not None
            queue.drop(request.join)
            return True
        for each in (operation, request.order_id_read):
            if each is not None:
                member.protocol.drop(each)
        queue.end(member)
        return True

    def _leave(self, request: YdbRequest, answer: asyncio.Future[Withdrawn]) -> bool:
        member = request.member
        if request.state is State.GONE or member is None:
            if not answer.done():
                answer.set_result(Withdrawn.MISSING)
            return True
        if request.state is not State.LEAVING:
            if not self._queues.of(request.name).try_begin(member):
                return False
            self.release(request, in_queue=True)
        request.leavers.append(answer)
        return True

    def release(self, request: YdbRequest, *, in_queue: bool = False) -> None:
        """Take it out of the queue on the server; retry until that succeeds."""
        member = request.member
        assert member is not None
        waits, request.state = request.state is State.WAITS, State.LEAVING
        if waits:
            self.drop_operation(request, member)

        def answered(_: str, body: Message) -> bool:
            assert request.release is not None
            request.may_be_out = request.may_be_out or request.release.repeated
            if body.status in {Status.SUCCESS, Status.NOT_FOUND, Status.BAD_REQUEST}:
                was_there = body.status == Status.SUCCESS and body.released
                self._out(request, was_there or request.may_be_out)
                queue = self._queues.of(request.name)
                if in_queue:
                    queue.end(member)
                else:
                    queue.move()
            else:
                request.may_be_out = True
                self.later(RETRY_PAUSE, send)
            return True

        def send() -> None:
            release = partial(messages.release, name=request.name)
            request.release = member.protocol.send(release, answered)

        send()

    def drop_operation(self, request: YdbRequest, member: Member) -> None:
        """Drop the pending operation of a waiter, because another one follows."""
        if request.operation is not None:
            member.protocol.drop(request.operation)
        if request.changed is not None:
            request.changed()

    def count_long(self, request: YdbRequest, timeout: float | None) -> None:
        """Measure a timeout that the server does not measure."""
        if timeout is not None and timeout > LONGEST_WAIT:
            self.later(timeout, partial(self._time_out, request))

    def _time_out(self, request: YdbRequest) -> None:
        due = request.deadline is not None and request.deadline <= self._session.now()
        if request.state is State.WAITS and due:
            self.release(request)
            self._session.events.removed(request.request_id, Removal.TIMED_OUT)

    def removed(self, request: YdbRequest, why: Removal, *, release: bool = False) -> None:
        """Report a request that has left its queue without a withdrawal.

        Args:
            request: the request.
            why: the reason, for the session.
            release: whether the server has a request in its place without a caller, to be released.
        """
        request.lost = True
        if release:
            self.release(request)
        else:
            self.forget(request)
        request.answer_with(Enqueued(Place.WAITING, None))
        if not self._session.over:
            self._session.events.removed(request.request_id, why)
        self._queues.of(request.name).move()

    def find_out(self, request: YdbRequest) -> None:
        """Determine why a waiter was removed from its queue: a deletion, or an eviction."""
        member = request.member
        assert member is not None
        request.state = State.LEAVING  # as far as its member is concerned

        def answered(_: str, body: Message) -> bool:
            self.removed(
                request, Removal.DELETED if body.status == Status.NOT_FOUND else Removal.EVICTED
            )
            request.answer_leavers(Withdrawn.MISSING)
            return True

        member.protocol.send(lambda req_id: messages.describe(req_id, request.name), answered)

    def _out(self, request: YdbRequest, was_there: bool) -> None:
        self.forget(request)
        if not request.refused:  # otherwise the error must still be reported
            place = Place.GRANTED if request.taken else Place.WAITING
            request.answer_with(Enqueued(place, request.order_id))
        left = was_there and not request.lost
        request.answer_leavers(Withdrawn.LEFT if left else Withdrawn.MISSING)

    def forget(self, request: YdbRequest) -> None:
        """Record that it is in no queue. Safe to call twice."""
        if request.state is State.GONE:
            return
        request.state = State.GONE
        if request.member is not None:
            request.member.drop(request.name)
        self._requests.pop(request.request_id, None)
        requests = self._by_name.get(request.name)
        if requests is not None:
            requests.pop(request, None)
            if not requests:
                del self._by_name[request.name]

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call it after a time, unless the session has ended by then."""
        if self._over:
            return

        def go() -> None:
            self._timers.discard(timer)
            what()

        timer = self._loop.call_later(seconds, go)
        self._timers.add(timer)
