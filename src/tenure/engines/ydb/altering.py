"""Changing a request in its place: its count, its data, and how long it waits."""

from __future__ import annotations

import asyncio
from functools import partial

from tenure.core import rules
from tenure.engines.contract import Answer, Removal
from tenure.engines.ydb import errors
from tenure.engines.ydb.joining import Joining
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.members import Members
from tenure.engines.ydb.request import LONGEST_WAIT, State, YdbRequest, settle
from tenure.engines.ydb.requests import YdbRequests
from tenure.errors import LeaseReleased, TenureError
from tenure.model import UNCHANGED, Unchanged
from tenure.wire.ydb import Message, Status

__all__ = ["Altering"]


class Altering:
    """The alterations of one session's requests, which have their turns in its queues."""

    def __init__(self, members: Members, requests: YdbRequests, joining: Joining) -> None:
        """Alter requests through the operation queues of `members`."""
        self._members = members
        self._requests = requests
        self._joining = joining
        self._node = members.node
        self._queues = members.queues

    def alter(
        self,
        request_id: int,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> Answer[None]:
        """Change a request in place."""
        request = self._requests.get(request_id)
        if request is None:
            raise self._released()
        answer: asyncio.Future[None] = self._members.future()
        self._queues.of(request.name).add(
            partial(self._begin, request, count, data, timeout, answer)
        )
        if answer.done():
            answer.result()
            return None
        return answer

    def _released(self) -> LeaseReleased:
        return LeaseReleased(f"the request on {self._node} is over", node=self._node)

    def _begin(
        self,
        request: YdbRequest,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
        answer: asyncio.Future[None],
    ) -> bool:
        if request.state is State.ASKED or request.state is State.TAKEN:
            return False
        member = request.member
        if request.state is State.GONE or request.state is State.LEAVING or member is None:
            settle(answer, self._released())
            return True
        queue = self._queues.of(request.name)
        if not queue.free_for(member):
            return False
        try:
            self._check(request, count, data, timeout)
        except TenureError as error:
            settle(answer, error)
            return True
        waits = request.state is State.WAITS
        same = (count is None or count == request.count) and (data is None or data == request.data)
        if same and (timeout is UNCHANGED or not waits):
            settle(answer)
            return True
        request.count = request.count if count is None else count
        request.data = request.data if data is None else data
        queue.begin(member)
        if waits:
            self._change_waiter(request, member, timeout, answer)
        else:
            self._change_owner(request, member, answer)
        return True

    def _check(
        self,
        request: YdbRequest,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> None:
        if data is not None:
            rules.check_data(data, self._node, request.name)
        if count is not None:
            limit = max(request.count, rules.EXACT)  # what it had was within the semaphore's
            rules.check_shrink(count, request.count, limit, self._node, request.name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, self._node, request.name)

    def _change_waiter(
        self,
        request: YdbRequest,
        member: Member,
        timeout: float | Unchanged | None,
        answer: asyncio.Future[None],
    ) -> None:
        """Ask for it anew: the request that waits is replaced, in its place."""
        if timeout is not UNCHANGED:
            request.deadline = None if timeout is None else self._members.now() + timeout
            if timeout is not None and timeout > LONGEST_WAIT:
                self._requests.later(timeout, partial(self._requests.give_up, request))
        if request.ask is not None:
            member.protocol.drop(request.ask)
        answered = False

        def make(req_id: int) -> Message:
            return request.message(req_id, request.left_at(self._members.now()))

        def heard(kind: str, body: Message) -> bool:
            nonlocal answered
            pending = kind == "acquire_semaphore_pending"
            if not answered:
                answered = True
                gone = not pending and body.status == Status.NOT_FOUND
                settle(answer, self._released() if gone else None)
                self._queues.of(request.name).end(member)
            if not pending:
                request.ask = None
                self._joining.result(request, body)
            return not pending

        request.ask = member.protocol.ask(make, heard)

    def _change_owner(
        self, request: YdbRequest, member: Member, answer: asyncio.Future[None]
    ) -> None:
        def make(req_id: int) -> Message:
            return request.message(req_id, None)

        def heard(kind: str, body: Message) -> bool:
            granted = kind == "acquire_semaphore_result" and body.status == Status.SUCCESS
            if request.state is State.OWNS and not granted:
                # It did not own any more: it has joined the queue anew, or the queue is gone.
                pending = kind == "acquire_semaphore_pending"
                gone = pending or body.status == Status.NOT_FOUND
                if gone:
                    why = Removal.EVICTED if pending else Removal.DELETED
                    self._requests.removed(request, why, release=pending)
                    settle(answer, self._released())
                else:
                    settle(answer, errors.semaphore_error(self._node, request.name, body))
            settle(answer)
            self._queues.of(request.name).end(member)
            return True

        member.protocol.ask(make, heard)
