"""Joining queues, and owning.

With fencing, a grant is reported together with its order id, which comes from a description of the
owners. The description is requested right behind a request that may be granted at once, unless the
last request for that name had to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Place, Removal, Withdrawn
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.members import Members
from tenure.engines.ydb.request import LONGEST_WAIT, State, YdbRequest
from tenure.engines.ydb.requests import AGAIN, YdbRequests
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT
from tenure.wire.ydb import Message, Status

__all__ = ["Joining"]

_MOST_CONTENDED = 1024
"""Number of names with waiting requests that are remembered."""


class Joining:
    """The way of a session's requests into their queues.

    Args:
        seen: called with a request that waits or owns.
    """

    def __init__(
        self, members: Members, requests: YdbRequests, seen: Callable[[YdbRequest], None]
    ) -> None:
        """Start with no queue known to be contended."""
        self._members = members
        self._requests = requests
        self._seen = seen
        self._node = members.node
        self._queues = members.queues
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
            None if timeout is None else self._members.now() + timeout,
            at_once=timeout == 0,
            ephemeral=ephemeral,
            answer=self._members.future(),
        )
        self._requests.add(request)
        self._queues.of(name).add(partial(self._join, request))
        if timeout is not None and timeout > LONGEST_WAIT:
            self._requests.later(timeout, partial(self._requests.give_up, request))
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
        if self._members.fencing and request.name not in self._contended:
            self._ask_order_id(request)
        return True

    def _member_for(self, request: YdbRequest) -> Member | None:
        """Return the member for a request; ``None``: the request must not be sent yet.

        Raises:
            Unsupported: there are as many siblings as may be.
        """
        name, queue = request.name, self._queues.of(request.name)
        for member in self._members.all:
            if name not in member.names and not member.stopping:
                return member if queue.free_for(member) else None
        # A member whose request is leaving will be free, and needs no sibling.
        leaving = any(each.state is State.LEAVING for each in self._requests.of(name))
        return self._members.new_sibling() if queue.idle and not leaving else None

    def _acquire(self, request: YdbRequest, *, first: bool = False) -> None:
        """Ask for it, or, when it waits already, for the news of its grant."""
        member, answered = request.member, not first
        assert member is not None

        def make(req_id: int) -> Message:
            return request.message(req_id, request.left_at(self._members.now()))

        def heard(kind: str, body: Message) -> bool:
            nonlocal answered
            pending = kind == "acquire_semaphore_pending"
            if pending:
                self._wait(request)
            else:
                request.ask = None
                self.result(request, body)
            if not answered:
                answered = True
                self._expect(request.name, waiting=pending)
                self._queues.of(request.name).end(member)
            return not pending

        request.ask = member.protocol.ask(make, heard)

    def _expect(self, name: str, *, waiting: bool) -> None:
        """Take note of how a request for that name fared: the next is most likely to fare so."""
        if not waiting:
            self._contended.discard(name)
        elif len(self._contended) < _MOST_CONTENDED:
            self._contended.add(name)

    def _wait(self, request: YdbRequest) -> None:
        if request.state is State.ASKED:
            request.state = State.WAITS
            self._seen(request)
        request.answer_with(Enqueued(Place.WAITING, None))

    def result(self, request: YdbRequest, body: Message) -> None:
        """Process the answer to a request that was sent, or waited.

        It may be leaving already; then only the answer to `enqueue` is still to be given.
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
                self._requests.later(AGAIN, partial(self._acquire_again, request))
        else:
            self._refused(request, body)

    def _acquire_again(self, request: YdbRequest) -> None:
        if request.state is State.WAITS and request.ask is None:
            self._acquire(request)

    def _refused(self, request: YdbRequest, body: Message) -> None:
        """The server has not taken a request."""
        if body.status in {Status.BAD_REQUEST, Status.PRECONDITION_FAILED}:
            self._explain(request, body)
            return
        error = errors.semaphore_error(self._node, request.name, body)
        if body.status == Status.NOT_FOUND:
            self._refuse(request, error)
            return
        if request.state is not State.LEAVING:
            self._requests.release(request)  # it may have been taken after all
        request.fail(error)

    def _refuse(self, request: YdbRequest, error: TenureError) -> None:
        if request.state is not State.LEAVING:
            self._requests.forget(request)
        request.fail(error)

    def _explain(self, request: YdbRequest, body: Message | None = None) -> bool:
        """Look what is wrong with a request, so that it gets the error it would get anywhere."""
        request.refused = True
        member = request.member or self._members.main
        if body is None:
            queue = self._queues.of(request.name)
            if not queue.free_for(member):
                return False
            queue.begin(member)
        elif request.state is not State.LEAVING:
            self._requests.forget(request)

        def heard(_: str, found: Message) -> bool:
            self._refuse(request, self._wrong(request, found, body))
            if body is None:
                self._queues.of(request.name).end(member)
            return True

        member.protocol.ask(lambda req_id: messages.describe(req_id, request.name), heard)
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
        assert refused is not None  # or else the count would be wrong
        return errors.semaphore_error(node, name, refused)

    def _take(self, request: YdbRequest) -> None:
        """It owns."""
        if not self._members.fencing:
            self._own(request)
        else:
            request.state = State.TAKEN
            if not request.order_id_asked:
                self._ask_order_id(request)

    def _ask_order_id(self, request: YdbRequest) -> None:
        member = request.member
        assert member is not None
        request.order_id_asked = True

        def heard(_: str, body: Message) -> bool:
            request.order_id_asked = False
            if request.taken and request.state in {State.TAKEN, State.LEAVING}:
                self._learn(request, body)
            return True

        member.protocol.ask(
            lambda req_id: messages.describe(req_id, request.name, owners=True), heard
        )

    def _learn(self, request: YdbRequest, body: Message) -> None:
        """The order id is among the owners'."""
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
            self._requests.removed(request, Removal.EVICTED)  # meanwhile
        elif body.status == Status.NOT_FOUND:
            self._requests.removed(request, Removal.DELETED)
        else:
            self._requests.later(AGAIN, partial(self._learn_again, request))

    def _learn_again(self, request: YdbRequest) -> None:
        if request.state is State.TAKEN and not request.order_id_asked:
            self._ask_order_id(request)

    def _own(self, request: YdbRequest) -> None:
        request.state = State.OWNS
        request.owned_at = self._members.step()
        if not request.answer_with(Enqueued(Place.GRANTED, request.order_id)):
            events = self._members.events
            if events is not None:
                events.granted(request.request_id, request.order_id)
        self._seen(request)
        self._queues.of(request.name).move()

    def fail_member(self, member: Member, error: TenureError) -> None:
        """A sibling cannot be attached; what was asked of it has not come about."""
        for request in self._requests.through(member):
            self._refuse(request, error)
            request.answer_leavers(Withdrawn.MISSING)
