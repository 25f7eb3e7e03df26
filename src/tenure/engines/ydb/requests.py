"""Requests of one session, from when they are made until they are out of their queues.

::

    ASKED --> WAITS --> TAKEN --> OWNS        TAKEN: owns, and the order id is on its way
      |         |         |        |
      +---------+---------+--------+--> LEAVING --> GONE     withdrawn, until the server says so
      +---------+---------+--------+--> GONE                 refused, timed out, removed

This module has the ways out; `joining` and `altering` have the others. A server that fails at
something for the moment is asked again, after a pause, wherever not to ask would leave a request
in a queue, or a waiter without its grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.ydb import messages
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.members import Members
from tenure.engines.ydb.request import State, YdbRequest
from tenure.wire.ydb import Message, Status

__all__ = ["AGAIN", "YdbRequests"]

AGAIN = 0.25
"""Seconds before a server is asked again for what it failed at."""


class YdbRequests:
    """The requests of one session, by their numbers and by their semaphores."""

    def __init__(self, members: Members) -> None:
        """Start without requests."""
        self._members = members
        self._queues = members.queues
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, YdbRequest] = {}
        self._by_name: dict[str, dict[YdbRequest, None]] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._over = False

    def add(self, request: YdbRequest) -> None:
        """Add a request that was made."""
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
        """The session is over."""
        self._over = True
        for request in self._requests.values():
            if request.perhaps_out or (request.release is not None and request.release.again):
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
        answer: asyncio.Future[Withdrawn] = self._members.future()
        self._queues.of(request.name).add(partial(self._leave, request, answer))
        return answer

    def _leave(self, request: YdbRequest, answer: asyncio.Future[Withdrawn]) -> bool:
        member = request.member
        if request.state is State.GONE or member is None:
            if not answer.done():
                answer.set_result(Withdrawn.MISSING)
            return True
        if request.state is not State.LEAVING:
            queue = self._queues.of(request.name)
            if not queue.free_for(member):
                return False
            queue.begin(member)
            self.release(request, in_queue=True)
        request.leavers.append(answer)
        return True

    def release(self, request: YdbRequest, *, in_queue: bool = False) -> None:
        """Have the server take it out of the queue, as often as that takes."""
        member = request.member
        assert member is not None
        if request.state is State.WAITS and request.ask is not None:
            member.protocol.drop(request.ask)
        request.state = State.LEAVING

        def heard(_: str, body: Message) -> bool:
            assert request.release is not None
            request.perhaps_out = request.perhaps_out or request.release.again
            if body.status in {Status.SUCCESS, Status.NOT_FOUND, Status.BAD_REQUEST}:
                was_there = body.status == Status.SUCCESS and body.released
                self._out(request, was_there or request.perhaps_out)
                queue = self._queues.of(request.name)
                if in_queue:
                    queue.end(member)
                else:
                    queue.move()
            else:
                request.perhaps_out = True
                self.later(AGAIN, ask)
            return True

        def ask() -> None:
            release = partial(messages.release, name=request.name)
            request.release = member.protocol.ask(release, heard)

        ask()

    def give_up(self, request: YdbRequest) -> None:
        """It has waited for as long as it wanted to, and the server does not know how long."""
        due = request.deadline is not None and request.deadline <= self._members.now()
        if request.state is State.WAITS and due:
            events = self._members.events
            self.release(request)
            if events is not None:
                events.removed(request.request_id, Removal.TIMED_OUT)

    def removed(self, request: YdbRequest, why: Removal, *, release: bool = False) -> None:
        """It has left its queue, though the program did not ask for it.

        Args:
            request: the one that left.
            why: the reason, for the session.
            release: the server has another request in its place now, which no caller made.
        """
        request.lost = True
        if release:
            self.release(request)
        else:
            self.forget(request)
        request.answer_with(Enqueued(Place.WAITING, None))
        events = self._members.events
        if events is not None:
            events.removed(request.request_id, why)
        self._queues.of(request.name).move()

    def find_out(self, request: YdbRequest) -> None:
        """A waiter was taken out of its queue: by the deletion of that, or alone?"""
        member = request.member
        assert member is not None
        request.state = State.LEAVING  # as far as its member is concerned

        def heard(_: str, body: Message) -> bool:
            self.removed(
                request, Removal.DELETED if body.status == Status.NOT_FOUND else Removal.EVICTED
            )
            request.answer_leavers(Withdrawn.MISSING)
            return True

        member.protocol.ask(lambda req_id: messages.describe(req_id, request.name), heard)

    def _out(self, request: YdbRequest, was_there: bool) -> None:
        self.forget(request)
        if not request.refused:  # otherwise the error is still to be reported
            place = Place.GRANTED if request.taken else Place.WAITING
            request.answer_with(Enqueued(place, request.order_id))
        left = was_there and not request.lost
        request.answer_leavers(Withdrawn.LEFT if left else Withdrawn.MISSING)

    def forget(self, request: YdbRequest) -> None:
        """Note that it is in no queue. Safe to call twice."""
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
        """Call it after a time, unless the session is over by then."""
        if self._over:
            return

        def go() -> None:
            self._timers.discard(timer)
            what()

        timer = self._loop.call_later(seconds, go)
        self._timers.add(timer)
