"""Requests of a session: at most one for each name, as in YDB.

* `_Place.req_id` is the request id that waits for the result of an acquire: each gets one result,
  and an acquire that is replaced by another, or ended by a release, is aborted first.
* An event of the store (`granted`, `removed`) is recorded here, and `report` sends its result when
  no script of that name runs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tenure.engines.contract import Enqueued, Place, Removal, Withdrawn
from tenure.errors import InvalidArgument, LeaseReleased, TenureError
from tenure.model import EPHEMERAL_LIMIT, Recovered, RequestDescription, SemaphoreDescription
from tenure.server.auth.accounts import Account
from tenure.server.limits import LimitReached, Limits
from tenure.server.semaphores import SemaphoreCounts
from tenure.server.ydb.long_replies import LongReply
from tenure.server.ydb.messages import Response, Status, coordination, issue, status_of
from tenure.server.ydb.operations import (
    AlterOperation,
    DescribeOperation,
    EnqueueOperation,
    Operation,
    Script,
    Settled,
    WithdrawOperation,
    data_fit,
    what_is_wrong,
)


def _result(
    field: str, req_id: int, status: int = Status.SUCCESS, text: str = "", **more: Any
) -> Any:
    """Make the result of a request.

    Args:
        field: the field of the response.
        req_id: the request id.
        status: the status of YDB.
        text: the reason of an unsuccessful status.
        more: other fields of the result.
    """
    kind = getattr(Response, _KINDS[field])
    issues = [issue(text)] if text else []
    return Response(**{field: kind(req_id=req_id, status=status, issues=issues, **more)})


_KINDS = {
    f"{verb}_semaphore_result": f"{verb.title()}SemaphoreResult"
    for verb in ("acquire", "release", "create", "update", "delete", "describe")
}
created = partial(_result, "create_semaphore_result")
updated = partial(_result, "update_semaphore_result")
deleted = partial(_result, "delete_semaphore_result")
not_acquired = partial(_result, "acquire_semaphore_result")
not_released = partial(_result, "release_semaphore_result")
not_described = partial(_result, "describe_semaphore_result")


def pending(req_id: int) -> Any:
    """Return the reply for an acquire that waits."""
    return Response(acquire_semaphore_pending=Response.AcquireSemaphorePending(req_id=req_id))


def acquired(req_id: int, yes: bool) -> Any:
    """Return the reply for an acquire that owns its tokens, or has timed out."""
    return _result("acquire_semaphore_result", req_id, acquired=yes)


def aborted(req_id: int, text: str) -> Any:
    """Return the reply for a waiting acquire that has failed."""
    return not_acquired(req_id, Status.ABORTED, text)


def released(req_id: int, yes: bool) -> Any:
    """Return the reply for a release that has removed a request, or found none."""
    return _result("release_semaphore_result", req_id, released=yes)


def changed(req_id: int, *, data: bool, owners: bool) -> Any:
    """Return the reply for a changed semaphore, or a replaced watch."""
    change = Response.DescribeSemaphoreChanged(
        req_id=req_id, data_changed=data, owners_changed=owners
    )
    return Response(describe_semaphore_changed=change)


def described(
    req_id: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> Any:
    """Return the description of a semaphore.

    Args:
        req_id: the request id.
        found: the semaphore.
        timeouts: known timeouts of waiters, in milliseconds, by session and name.
        owners: whether the client requested the owners.
        watched: whether a watch was added.
    """
    result = _bare(req_id, found, watched=watched)
    description = result.describe_semaphore_result.semaphore_description
    for field, each, data in _entries(found, timeouts, owners=owners):
        each.data = data
        getattr(description, field).append(each)
    return result


def described_at_length(
    req_id: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> LongReply:
    """Return the same as `described`, encoded while it is sent."""
    base = _bare(req_id, found, watched=watched)
    return LongReply(base, list(_entries(found, timeouts, owners=owners)))


def _bare(req_id: int, found: SemaphoreDescription, *, watched: bool) -> Any:
    """Return the description of a semaphore without owners and waiters."""
    description = coordination.SemaphoreDescription(
        name=found.name,
        data=found.data,
        count=min(found.held, EPHEMERAL_LIMIT),
        limit=found.limit,
        ephemeral=found.ephemeral,
    )
    return _result(
        "describe_semaphore_result", req_id, semaphore_description=description, watch_added=watched
    )


def _entries(
    found: SemaphoreDescription, timeouts: Mapping[tuple[int, str], int], *, owners: bool
) -> Iterator[tuple[str, Any, bytes]]:
    """Yield for each owner and waiter: its field, the message without data, and its data."""
    for each in found.owners if owners else ():
        yield "owners", _request(each, 0), each.data
    for each in found.waiters:
        req_id = timeouts.get((each.session_id, found.name))
        yield "waiters", _request(each, req_id or _timeout_of(each)), each.data


def _request(found: RequestDescription, timeout_millis: int) -> Any:
    return coordination.SemaphoreSession(
        order_id=found.order_id,
        session_id=found.session_id,
        timeout_millis=timeout_millis,
        count=found.count,
    )


def _timeout_of(waiter: RequestDescription) -> int:
    """Return the timeout of a waiter; infinite if the store does not report it.

    It is the sum of the remaining and the elapsed time. After a repeated acquire it is longer than
    requested, by the time that had elapsed before.
    """
    if waiter.timeout is None:
        return EPHEMERAL_LIMIT
    return max(0, round((waiter.timeout + (waiter.since or 0.0)) * 1000))


FOREVER = 2**64 - 1
"""Timeout of an acquire that waits until it is granted, in milliseconds."""
_LONGEST_WAIT = 24 * 60 * 60 * 1000


class _Place:
    """The session's request for a name.

    Attributes:
        req_id: the request id that waits for the result, or ``None``.
        granted: whether it owns its tokens.
        gone: the reason why it has left the queue, if the store reported one.
    """

    __slots__ = ("count", "ephemeral", "gone", "granted", "name", "req_id", "request_id")

    def __init__(self, request_id: int, name: str, count: int, ephemeral: bool) -> None:
        self.request_id = request_id
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.req_id: int | None = None
        self.granted = False
        self.gone: Removal | None = None


class ConversationRequests:
    """The requests of one session.

    Args:
        node: the path of the session's node.
        limits: the server's limits.
        semaphores, account: count its requests.
        replies: the replies of the running script.
        timeouts: timeouts of waiters, in milliseconds, by session and name.

    Attributes:
        session_id: the session's id.
        next_id: the first unused request id of the session.
    """

    def __init__(
        self,
        node: str,
        limits: Limits,
        semaphores: SemaphoreCounts,
        account: Account | None,
        replies: list[Any],
        timeouts: dict[tuple[int, str], int],
    ) -> None:
        self.session_id = 0
        self.next_id = 0
        self._node = node
        self._limits = limits
        self._semaphores = semaphores
        self._account = account
        self._replies = replies
        self._timeouts = timeouts
        self._places: dict[str, _Place] = {}
        self._by_id: dict[int, _Place] = {}

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Register requests that the session already has; of several for a name, the first."""
        for each in requests:
            if each.name not in self._places:
                place = _Place(each.request_id, each.name, each.count, each.ephemeral)
                place.granted = each.granted
                self._semaphores.add_existing_request(
                    self._node, each.name, ephemeral=each.ephemeral, account=self._account
                )
                self._places[each.name] = self._by_id[each.request_id] = place

    def granted(self, request_id: int) -> str | None:
        """Record that a request owns its tokens; return its name, if it exists."""
        place = self._by_id.get(request_id)
        if place is None:
            return None
        place.granted = True
        return place.name

    def removed(self, request_id: int, why: Removal) -> str | None:
        """Record that a request has left its queue; return its name, if it exists."""
        place = self._by_id.get(request_id)
        if place is None:
            return None
        place.gone = why
        return place.name

    def is_settled(self, name: str) -> bool:
        """Return true if the session's request for a name no longer waits."""
        place = self._places.get(name)
        return place is None or self._is_settled(place)

    def deleted(self, name: str) -> None:
        """Forget the session's request for a semaphore that it has deleted."""
        place = self._places.get(name)
        if place is not None:
            self._abort(place, "the semaphore was deleted")
            self._forget(place)

    def forget_all(self) -> None:
        """Forget all requests: the conversation has ended."""
        for place in list(self._places.values()):
            self._forget(place)

    def report(self, name: str) -> None:
        """Reply to an acquire that waited, if its result was not sent yet."""
        place = self._places.get(name)
        if place is None:
            return
        if place.req_id is not None:
            if place.granted:
                self._replies.append(acquired(place.req_id, True))
                place.req_id = None
            elif place.gone is not None:
                self._report_gone(place.req_id, place.gone)
        if place.gone is not None:
            self._forget(place)

    def _report_gone(self, req_id: int, why: Removal) -> None:
        if why == Removal.TIMED_OUT:
            self._replies.append(acquired(req_id, False))
        else:
            self._replies.append(aborted(req_id, f"the request was removed: {why.value}"))

    def _forget(self, place: _Place) -> None:
        del self._places[place.name]
        del self._by_id[place.request_id]
        self._timeouts.pop((self.session_id, place.name), None)
        self._semaphores.remove_request(self._node, place.name)

    # Scripts

    def acquire(self, message: Any) -> Script:
        """Add a request, or change the session's request for the name."""
        if message.count == 0:
            self._refuse_acquire(message, Status.BAD_REQUEST, "a count is at least 1")
            return
        if message.timeout_millis > _LONGEST_WAIT and message.timeout_millis != FOREVER:
            text = "a timeout is at most 24 hours, or 2^64-1 for ever"
            self._refuse_acquire(message, Status.BAD_REQUEST, text)
            return
        if text := what_is_wrong(message.name, message.data, self._node, self._limits):
            status = Status.BAD_REQUEST
            if not message.ephemeral and data_fit(message.data, self._limits):
                status = Status.NOT_FOUND  # no lasting semaphore can have that name
            self._refuse_acquire(message, status, text)
            return
        place = self._places.get(message.name)
        if place is None:
            yield from self._enqueue(message)
        elif place.ephemeral != message.ephemeral:
            kind = "ephemeral" if place.ephemeral else "lasting"
            text = f"{message.name!r} is {kind} and is used here as the other"
            self._refuse_acquire(message, Status.PRECONDITION_FAILED, text)
        elif place.count < message.count:
            text = f"the session's request for {message.name!r} cannot grow from {place.count}"
            self._refuse_acquire(message, Status.BAD_REQUEST, text)
        else:
            yield from self._acquire_again(place, message)

    def _enqueue(self, message: Any) -> Script:
        try:
            if len(self._places) >= self._limits.requests_per_session:
                raise LimitReached(
                    f"the session has as many requests as the server's limit requests_per_session "
                    f"= {self._limits.requests_per_session} allows",
                    "requests_per_session",
                )
            self._semaphores.add_request(
                self._node, message.name, ephemeral=message.ephemeral, account=self._account
            )
        except LimitReached as error:
            self._refuse_acquire(message, Status.OVERLOADED, str(error))
            return
        place = _Place(self.next_id, message.name, message.count, message.ephemeral)
        self.next_id += 1
        self._places[place.name] = self._by_id[place.request_id] = place
        try:
            enqueued: Enqueued = yield EnqueueOperation(
                place.request_id,
                message.name,
                message.count,
                message.data,
                _seconds(message),
                message.ephemeral,
            )
        except TenureError as error:
            self._forget(place)
            status = status_of(error)
            if isinstance(error, InvalidArgument):
                status = yield from self._why_invalid(message)
            self._refuse_acquire(message, status, str(error))
            return
        if enqueued.place is Place.REFUSED:
            self._forget(place)
            self._replies.append(acquired(message.req_id, False))
            return
        place.req_id = message.req_id
        if enqueued.place is Place.GRANTED:
            place.granted = True
        if not self._is_settled(place):
            self._waits(message)

    def _acquire_again(self, place: _Place, message: Any) -> Script:
        """Yield operations that change the session's request for that name in place."""
        waiting = not place.granted
        try:
            yield AlterOperation(
                place.request_id,
                message.name,
                message.count,
                message.data,
                waiting,
                _seconds(message),
            )
        except LeaseReleased:  # it has left the queue, and the event was received or will be soon
            self._abort(place, "it has left the queue")
            self._forget(place)
            yield from self._enqueue(message)
            return
        except TenureError as error:
            self._refuse_acquire(message, status_of(error), str(error))
            return
        shrunk = message.count < place.count
        place.count = message.count
        if waiting:
            self._abort(place, "a later acquire of the session has taken its place")
        place.req_id = message.req_id
        if self._is_settled(place):
            return
        if not message.timeout_millis or (shrunk and (yield from self._owns(place))):
            # The store has decided, and its event is on the way: the result, without a Pending. The
            # next request for this name is answered from that result.
            yield Settled(message.name)
        else:
            self._waits(message)

    def _waits(self, message: Any) -> None:
        self._timeouts[self.session_id, message.name] = message.timeout_millis
        self._replies.append(pending(message.req_id))

    @staticmethod
    def _is_settled(place: _Place) -> bool:
        return place.granted or place.gone is not None

    def _owns(self, place: _Place) -> Generator[Operation, Any, bool]:
        """Return true if a waiting request owns its tokens by now."""
        try:
            found: SemaphoreDescription = yield DescribeOperation(place.name, owners=True)
        except TenureError:
            return False  # Pending, and then the store's event
        return any(each.session_id == self.session_id for each in found.owners)

    def _abort(self, place: _Place, why: str) -> None:
        """End the waiting acquire without a result of the store."""
        if place.req_id is not None:
            if place.gone == Removal.TIMED_OUT:
                self._report_gone(place.req_id, place.gone)
            else:
                self._replies.append(aborted(place.req_id, why))
            place.req_id = None

    def _why_invalid(self, message: Any) -> Generator[Operation, Any, int]:
        """Yield operations to determine the status of an acquire that the store rejected."""
        try:
            found: SemaphoreDescription = yield DescribeOperation(message.name)
        except TenureError:
            return Status.BAD_REQUEST
        mismatch = found.ephemeral != message.ephemeral
        return Status.PRECONDITION_FAILED if mismatch else Status.BAD_REQUEST

    def _refuse_acquire(self, message: Any, status: int, text: str) -> None:
        self._replies.append(not_acquired(message.req_id, status, text))

    def release(self, message: Any) -> Script:
        """Withdraw or release the session's request for the name."""
        place = self._places.get(message.name)
        if place is None:
            self._replies.append(released(message.req_id, False))
            return
        try:
            withdrawn: Withdrawn = yield WithdrawOperation(place.request_id, message.name)
        except TenureError as error:
            self._replies.append(not_released(message.req_id, status_of(error), str(error)))
            return
        was_there = withdrawn is Withdrawn.LEFT and place.gone is None
        self._abort(place, "it was released while it waited")
        self._forget(place)
        self._replies.append(released(message.req_id, was_there))


def _seconds(message: Any) -> float | None:
    """Return the timeout of an acquire in seconds; ``None`` for no limit."""
    timeout: int = message.timeout_millis
    return None if timeout == FOREVER else timeout / 1000
