"""Requests that join their queues, and their grants.

With fencing, a grant is reported together with its order id, from a description of the owners. The
description is requested right after a request that may be granted at once, unless the last request
for that name had to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.members import GroupSession, Member
from tenure.engines.ydb.requests import RETRY_PAUSE, State, YdbRequest, YdbRequests, settle
from tenure.errors import LeaseReleased, TenureError
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Unchanged
from tenure.wire.ydb import Message, Status

_MOST_CONTENDED = 1024
"""Number of names with waiting requests that are remembered."""


class Joining:
    """Adds the requests of one session to their queues, and reports their grants.

    Args:
        placed: called with a request that waits or is an owner.
    """

    def __init__(
        self, session: GroupSession, requests: YdbRequests, placed: Callable[[YdbRequest], None]
    ) -> None:
        self._session = session
        self._requests = requests
        self._placed = placed
        self._node = session.path
        self._queues = session.queues
        self._contended: set[str] = set()

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue."""
        rules.check_timeout(timeout, self._node, name)
        rules.check_data(data, self._node, name)
        rules.check_name(name, self._node)
        request = YdbRequest(
            request_id,
            name,
            count,
            data,
            None if timeout is None else self._session.now() + timeout,
            at_once=timeout == 0,
            ephemeral=ephemeral,
            answer=self._session.future(),
        )
        self._requests.add(request)
        request.join = partial(self._join, request)
        self._queues.of(name).add(request.join)
        self._requests.count_long(request, timeout)
        return request.answer

    def _join(self, request: YdbRequest) -> bool:
        count = request.count
        if not (isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT):
            return self._explain(request)
        try:
            member = self._member_for(request)
        except TenureError as error:
            self._refuse(request, error)
            return True
        if member is None:
            return False
        request.member = member
        member.names.add(request.name)
        self._queues.of(request.name).begin(member)
        self._acquire(request, first=True)
        if self._session.fencing and request.name not in self._contended:
            self._request_order_id(request)
        return True

    def _member_for(self, request: YdbRequest) -> Member | None:
        """Return the member for a request; ``None``: the request must not be sent yet.

        Raises:
            Unsupported: the maximum number of siblings is reached.
        """
        name, queue = request.name, self._queues.of(request.name)
        for member in self._session.all:
            if name not in member.names and not member.stopping:
                return member if queue.free_for(member) else None
        # A member whose request is leaving will be free, so no sibling is needed.
        leaving = any(each.state is State.LEAVING for each in self._requests.of(name))
        return self._session.new_sibling() if queue.idle and not leaving else None

    def _acquire(self, request: YdbRequest, *, first: bool = False) -> None:
        """Send a request; if it already waits, request its grant again."""
        member, counted = request.member, not first
        assert member is not None

        def make(req_id: int) -> Message:
            return request.message(req_id, request.left_at(self._session.now()))

        def answered(kind: str, body: Message) -> bool:
            nonlocal counted
            pending = kind == "acquire_semaphore_pending"
            if pending:
                self._wait(request)
            else:
                request.operation = None
                self.result(request, body)
            if not counted:
                counted = True
                self._expect(request.name, waiting=pending)
                self._queues.of(request.name).end(member)
            return not pending

        request.operation = member.protocol.send(make, answered)

    def _expect(self, name: str, *, waiting: bool) -> None:
        """Record whether a request for that name had to wait: the next probably will, too."""
        if not waiting:
            self._contended.discard(name)
        elif len(self._contended) < _MOST_CONTENDED:
            self._contended.add(name)

    def _wait(self, request: YdbRequest) -> None:
        if request.state is State.SENT:
            request.state = State.WAITS
            self._placed(request)
        request.answer_with(Enqueued(Place.WAITING, None))

    def result(self, request: YdbRequest, body: Message) -> None:
        """Process the answer to a request that was sent, or waited.

        If it is leaving, only `enqueue` is answered.
        """
        leaving = request.state is State.LEAVING
        if body.status == Status.SUCCESS and body.acquired:
            request.taken = True
            if not leaving:
                self._take(request)
        elif body.status == Status.SUCCESS and request.at_once:
            request.answer_with(Enqueued(Place.REFUSED, None))
            if not leaving:
                self._requests.forget(request)
        elif body.status == Status.SUCCESS:
            if not leaving:
                self._requests.removed(request, Removal.TIMED_OUT)
        elif body.status == Status.ABORTED:
            if not leaving:
                self._requests.find_out(request)
        elif request.state is State.WAITS:
            if body.status == Status.NOT_FOUND:  # deleted, while the connection was broken
                self._requests.removed(request, Removal.DELETED)
            else:
                self._requests.later(RETRY_PAUSE, partial(self._acquire_again, request))
        else:
            self._refused(request, body)

    def _acquire_again(self, request: YdbRequest) -> None:
        if request.state is State.WAITS and request.operation is None:
            self._acquire(request)

    def _refused(self, request: YdbRequest, body: Message) -> None:
        """Handle a request that the server rejected."""
        if body.status in {Status.BAD_REQUEST, Status.PRECONDITION_FAILED}:
            self._explain(request, body)
            return
        error = errors.semaphore_error(self._node, request.name, body)
        if body.status == Status.NOT_FOUND:
            self._refuse(request, error)
            return
        if request.state is not State.LEAVING:
            self._requests.release(request)  # the server may have accepted it after all
        request.fail(error)

    def _refuse(self, request: YdbRequest, error: TenureError) -> None:
        if request.state is not State.LEAVING:
            self._requests.forget(request)
        request.fail(error)

    def _explain(self, request: YdbRequest, body: Message | None = None) -> bool:
        """Determine what is wrong with a request, for the common error of all engines."""
        request.refused = True
        member = request.member or self._session.main
        if body is None:
            if not self._queues.of(request.name).try_begin(member):
                return False
        elif request.state is not State.LEAVING:
            self._requests.forget(request)

        def answered(_: str, found: Message) -> bool:
            self._refuse(request, self._wrong(request, found, body))
            if body is None:
                self._queues.of(request.name).end(member)
            return True

        member.protocol.send(lambda req_id: messages.describe(req_id, request.name), answered)
        return True

    def _wrong(self, request: YdbRequest, found: Message, refused: Message | None) -> TenureError:
        node, name = self._node, request.name
        limit = EPHEMERAL_LIMIT
        try:
            if found.status == Status.SUCCESS:
                semaphore = found.semaphore_description
                limit = semaphore.limit
                rules.check_kind(request.ephemeral, semaphore.ephemeral, node, name)
            elif found.status != Status.NOT_FOUND or not request.ephemeral:
                return errors.semaphore_error(node, name, found)
            rules.check_count(request.count, limit, node, name)
        except TenureError as error:
            return error
        assert refused is not None  # otherwise the count would be wrong
        return errors.semaphore_error(node, name, refused)

    def _take(self, request: YdbRequest) -> None:
        """Handle a grant: report it once its order id is known."""
        if not self._session.fencing:
            self._own(request)
        else:
            request.state = State.TAKEN
            if not request.order_id_requested:
                self._request_order_id(request)

    def _request_order_id(self, request: YdbRequest) -> None:
        member = request.member
        assert member is not None
        request.order_id_requested = True

        def answered(_: str, body: Message) -> bool:
            request.order_id_requested = False
            if request.taken and request.state in {State.TAKEN, State.LEAVING}:
                self._learn(request, body)
            return True

        request.order_id_read = member.protocol.send(
            lambda req_id: messages.describe(req_id, request.name, owners=True), answered
        )

    def _learn(self, request: YdbRequest, body: Message) -> None:
        """Find the order id among those of the owners."""
        assert request.member is not None
        owners = body.semaphore_description.owners if body.status == Status.SUCCESS else ()
        for owner in owners:
            if owner.session_id == request.member.id:
                request.order_id = owner.order_id
        if request.state is State.LEAVING:
            request.answer_with(Enqueued(Place.GRANTED, request.order_id))
        elif request.order_id is not None:
            self._own(request)
        elif body.status == Status.SUCCESS:
            self._requests.removed(request, Removal.EVICTED)
        elif body.status == Status.NOT_FOUND:
            self._requests.removed(request, Removal.DELETED)
        else:
            self._requests.later(RETRY_PAUSE, partial(self._learn_again, request))

    def _learn_again(self, request: YdbRequest) -> None:
        if request.state is State.TAKEN and not request.order_id_requested:
            self._request_order_id(request)

    def _own(self, request: YdbRequest) -> None:
        request.state = State.OWNS
        request.owned_at = self._session.step()
        answered = request.answer_with(Enqueued(Place.GRANTED, request.order_id))
        if not answered and not self._session.over:
            self._session.events.granted(request.request_id, request.order_id)
        self._placed(request)
        self._queues.of(request.name).move()

    def fail_member(self, member: Member, error: TenureError) -> None:
        """Fail the requests of a sibling that cannot be attached."""
        for request in self._requests.through(member):
            self._refuse(request, error)
            request.answer_leavers(Withdrawn.MISSING)


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
