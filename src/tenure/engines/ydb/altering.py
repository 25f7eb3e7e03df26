"""Changing a request in place: its count, its data, and its timeout."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from tenure.core import rules
from tenure.engines.contract import Answer, Removal
from tenure.engines.ydb import errors
from tenure.engines.ydb.joining import Joining
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.members import GroupSession
from tenure.engines.ydb.requests import State, YdbRequest, YdbRequests, settle
from tenure.errors import LeaseReleased, TenureError
from tenure.model import UNCHANGED, Unchanged
from tenure.wire.ydb import Message, Status


@dataclass(frozen=True, slots=True)
class _Change:
    request: YdbRequest
    count: int | None
    data: bytes | None
    timeout: float | Unchanged | None
    answer: asyncio.Future[None]


class Altering:
    """Changes the requests of one session, in the order of its operation queues."""

    def __init__(self, session: GroupSession, requests: YdbRequests, joining: Joining) -> None:
        """Alter requests through the operation queues of `session`."""
        self._session = session
        self._requests = requests
        self._joining = joining
        self._node = session.path
        self._queues = session.queues

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
        answer: asyncio.Future[None] = self._session.future()
        change = _Change(request, count, data, timeout, answer)
        self._queues.of(request.name).add(partial(self._begin, change))
        if answer.done():
            answer.result()
            return None
        return answer

    def _released(self) -> LeaseReleased:
        return LeaseReleased(f"the request on {self._node} has ended", node=self._node)

    def _begin(self, change: _Change) -> bool:
        request, answer = change.request, change.answer
        member = request.member
        if request.state in {State.SENT, State.TAKEN}:
            return False
        if request.state in {State.GONE, State.LEAVING} or member is None:
            settle(answer, self._released())
            return True
        if not self._queues.of(request.name).free_for(member):
            return False
        try:
            self._check(change)
        except TenureError as error:
            settle(answer, error)
            return True
        waits = request.state is State.WAITS
        old = request.count, request.data
        if change.count is not None:
            request.count = change.count
        if change.data is not None:
            request.data = change.data
        same = (request.count, request.data) == old
        if same and (change.timeout is UNCHANGED or not waits):
            settle(answer)
            return True
        self._queues.of(request.name).begin(member)
        if waits:
            self._change_waiter(request, member, change.timeout, answer)
        else:
            self._change_owner(request, member, answer)
        return True

    def _check(self, change: _Change) -> None:
        name, old = change.request.name, change.request.count
        if change.data is not None:
            rules.check_data(change.data, self._node, name)
        if change.count is not None:
            limit = max(old, rules.EXACT)  # the old count was within the semaphore's limit
            rules.check_shrink(change.count, old, limit, self._node, name)
        if change.timeout is not UNCHANGED:
            rules.check_timeout(change.timeout, self._node, name)

    def _change_waiter(
        self,
        request: YdbRequest,
        member: Member,
        timeout: float | Unchanged | None,
        answer: asyncio.Future[None],
    ) -> None:
        """Send the request again: it replaces the waiting one, in its place."""
        if timeout is not UNCHANGED:
            request.deadline = None if timeout is None else self._session.now() + timeout
            self._requests.count_long(request, timeout)
        self._requests.drop_operation(request, member)

        def changed(error: TenureError | None = None) -> None:
            request.changed = None
            settle(answer, error)
            self._queues.of(request.name).end(member)

        def make(req_id: int) -> Message:
            return request.message(req_id, request.left_at(self._session.now()))

        def answered(kind: str, body: Message) -> bool:
            pending = kind == "acquire_semaphore_pending"
            if request.changed is changed:
                gone = not pending and body.status == Status.NOT_FOUND
                changed(self._released() if gone else None)
            if not pending:
                request.operation = None
                self._joining.result(request, body)
            return not pending

        request.changed = changed
        request.operation = member.protocol.send(make, answered)

    def _change_owner(
        self, request: YdbRequest, member: Member, answer: asyncio.Future[None]
    ) -> None:
        def make(req_id: int) -> Message:
            return request.message(req_id, None)

        def answered(kind: str, body: Message) -> bool:
            granted = kind == "acquire_semaphore_result" and body.status == Status.SUCCESS
            if request.state is State.OWNS and not granted:
                # It was no longer an owner: it has joined the queue again, or the queue does not
                # exist.
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

        member.protocol.send(make, answered)
