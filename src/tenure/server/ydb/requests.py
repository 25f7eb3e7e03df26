"""A session's requests: at most one for each name, as YDB has it.

* `_Place.asked` is the one request id that still waits for the result of an acquire: each gets one
  result, and an acquire that another one replaces, or a release ends, is aborted first.
* A push of the store (`granted`, `removed`) is noted here, and `tell` sends its result when no
  script of that name runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from tenure.engines.contract import Enqueued, Place, Removal, Withdrawn
from tenure.errors import InvalidArgument, LeaseReleased, TenureError
from tenure.model import Recovered, SemaphoreDescription
from tenure.server.auth.accounts import Account
from tenure.server.limits import LimitReached, Limits
from tenure.server.semaphores import Semaphores
from tenure.server.ydb import answers
from tenure.server.ydb.messages import Status, status_of
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

__all__ = ["FOREVER", "ConversationRequests"]

FOREVER = 2**64 - 1
"""The timeout of an acquire that waits until it is granted, in milliseconds."""
_LONGEST_WAIT = 24 * 60 * 60 * 1000


class _Place:
    """The session's request for a name.

    Attributes:
        asked: the request id that waits for the result; ``None`` if there is none.
        granted: it owns its tokens.
        gone: why it has left the queue, if the store said so.
    """

    __slots__ = ("asked", "count", "ephemeral", "gone", "granted", "name", "request_id")

    def __init__(self, request_id: int, name: str, count: int, ephemeral: bool) -> None:
        self.request_id = request_id
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.asked: int | None = None
        self.granted = False
        self.gone: Removal | None = None


class ConversationRequests:
    """The requests of one session.

    Args:
        node: the path of the session's node.
        limits: the server's.
        semaphores, account: where its requests are counted.
        replies: of the script that runs.
        timeouts: those of its waiters, in milliseconds, by session and name.

    Attributes:
        session_id: the session's id.
        next_id: from here on the session has used no request's number.
    """

    def __init__(
        self,
        node: str,
        limits: Limits,
        semaphores: Semaphores,
        account: Account | None,
        replies: list[Any],
        timeouts: dict[tuple[int, str], int],
    ) -> None:
        """Start without requests."""
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
        """Note requests that the session has already; of several for a name, the first."""
        for each in requests:
            if each.name not in self._places:
                place = _Place(each.request_id, each.name, each.count, each.ephemeral)
                place.granted = each.granted
                self._semaphores.rejoin(
                    self._node, each.name, ephemeral=each.ephemeral, account=self._account
                )
                self._places[each.name] = self._by_id[each.request_id] = place

    def granted(self, request_id: int) -> str | None:
        """Note that a request owns its tokens; returns its name, if it is there."""
        place = self._by_id.get(request_id)
        if place is None:
            return None
        place.granted = True
        return place.name

    def removed(self, request_id: int, why: Removal) -> str | None:
        """Note that a request has left its queue; returns its name, if it is there."""
        place = self._by_id.get(request_id)
        if place is None:
            return None
        place.gone = why
        return place.name

    def is_settled(self, name: str) -> bool:
        """Tell whether the session's request for a name waits no more."""
        place = self._places.get(name)
        return place is None or self._is_settled(place)

    def deleted(self, name: str) -> None:
        """Forget the session's request for a semaphore that it has deleted."""
        place = self._places.get(name)
        if place is not None:
            self._abort(place, "the semaphore was deleted")
            self._forget(place)

    def forget_all(self) -> None:
        """Forget all requests: the conversation is over."""
        for place in list(self._places.values()):
            self._forget(place)

    def tell(self, name: str) -> None:
        """Reply to an acquire that waited, if it has a result that was not sent yet."""
        place = self._places.get(name)
        if place is None:
            return
        if place.asked is not None:
            if place.granted:
                self._replies.append(answers.acquired(place.asked, True))
                place.asked = None
            elif place.gone is not None:
                self._tell_gone(place.asked, place.gone)
        if place.gone is not None:
            self._forget(place)

    def _tell_gone(self, asked: int, why: Removal) -> None:
        if why is Removal.TIMED_OUT:
            self._replies.append(answers.acquired(asked, False))
        else:
            self._replies.append(answers.aborted(asked, f"the request was removed: {why.value}"))

    def _forget(self, place: _Place) -> None:
        del self._places[place.name]
        del self._by_id[place.request_id]
        self._timeouts.pop((self.session_id, place.name), None)
        self._semaphores.leave(self._node, place.name)

    # The scripts

    def acquire(self, ask: Any) -> Script:
        """Add a request, or change the one that the session has for the name."""
        if ask.count == 0:
            self._refuse_acquire(ask, Status.BAD_REQUEST, "a count is at least 1")
            return
        if ask.timeout_millis > _LONGEST_WAIT and ask.timeout_millis != FOREVER:
            text = "a timeout is at most 24 hours, or 2^64-1 for ever"
            self._refuse_acquire(ask, Status.BAD_REQUEST, text)
            return
        if text := what_is_wrong(ask.name, ask.data, self._node, self._limits):
            status = Status.BAD_REQUEST
            if not ask.ephemeral and data_fit(ask.data, self._limits):
                status = Status.NOT_FOUND  # no lasting semaphore can have that name
            self._refuse_acquire(ask, status, text)
            return
        place = self._places.get(ask.name)
        if place is None:
            yield from self._enqueue(ask)
        elif place.ephemeral != ask.ephemeral:
            kind = "ephemeral" if place.ephemeral else "lasting"
            text = f"{ask.name!r} is {kind} and is used here as the other"
            self._refuse_acquire(ask, Status.PRECONDITION_FAILED, text)
        elif place.count < ask.count:
            text = f"the session's request for {ask.name!r} cannot grow from {place.count}"
            self._refuse_acquire(ask, Status.BAD_REQUEST, text)
        else:
            yield from self._acquire_again(place, ask)

    def _enqueue(self, ask: Any) -> Script:
        try:
            if len(self._places) >= self._limits.requests_per_session:
                raise LimitReached(
                    f"the session has as many requests as the server's limit requests_per_session "
                    f"= {self._limits.requests_per_session} allows",
                    "requests_per_session",
                )
            self._semaphores.join(
                self._node, ask.name, ephemeral=ask.ephemeral, account=self._account
            )
        except LimitReached as error:
            self._refuse_acquire(ask, Status.OVERLOADED, str(error))
            return
        place = _Place(self.next_id, ask.name, ask.count, ask.ephemeral)
        self.next_id += 1
        self._places[place.name] = self._by_id[place.request_id] = place
        try:
            enqueued: Enqueued = yield EnqueueOperation(
                place.request_id, ask.name, ask.count, ask.data, _seconds(ask), ask.ephemeral
            )
        except TenureError as error:
            self._forget(place)
            status = status_of(error)
            if isinstance(error, InvalidArgument):
                status = yield from self._why_invalid(ask)
            self._refuse_acquire(ask, status, str(error))
            return
        if enqueued.place is Place.REFUSED:
            self._forget(place)
            self._replies.append(answers.acquired(ask.req_id, False))
            return
        place.asked = ask.req_id
        if enqueued.place is Place.GRANTED:
            place.granted = True
        if not self._is_settled(place):
            self._waits(ask)

    def _acquire_again(self, place: _Place, ask: Any) -> Script:
        """The session has a request for that name already: it is changed in place."""
        waiting = not place.granted
        try:
            yield AlterOperation(
                place.request_id, ask.name, ask.count, ask.data, waiting, _seconds(ask)
            )
        except LeaseReleased:  # it has left the queue, and the news of it is on its way, or here
            self._abort(place, "it has left the queue")
            self._forget(place)
            yield from self._enqueue(ask)
            return
        except TenureError as error:
            self._refuse_acquire(ask, status_of(error), str(error))
            return
        shrunk = ask.count < place.count
        place.count = ask.count
        if waiting:
            self._abort(place, "a later acquire of the session has taken its place")
        place.asked = ask.req_id
        if self._is_settled(place):
            return
        if not ask.timeout_millis or (shrunk and (yield from self._owns(place))):
            # The store has decided, and its push is on its way: the result, without a Pending.
            # What the client asks next of this name is answered from that result.
            yield Settled(ask.name)
        else:
            self._waits(ask)

    def _waits(self, ask: Any) -> None:
        self._timeouts[self.session_id, ask.name] = ask.timeout_millis
        self._replies.append(answers.pending(ask.req_id))

    @staticmethod
    def _is_settled(place: _Place) -> bool:
        return place.granted or place.gone is not None

    def _owns(self, place: _Place) -> Generator[Operation, Any, bool]:
        """Tell whether a request that was waiting owns its tokens by now."""
        try:
            found: SemaphoreDescription = yield DescribeOperation(place.name, owners=True)
        except TenureError:
            return False  # Pending, and then what the store pushes
        return any(each.session_id == self.session_id for each in found.owners)

    def _abort(self, place: _Place, why: str) -> None:
        """End the waiting acquire without a result of the store."""
        if place.asked is not None:
            if place.gone is Removal.TIMED_OUT:
                self._tell_gone(place.asked, place.gone)
            else:
                self._replies.append(answers.aborted(place.asked, why))
            place.asked = None

    def _why_invalid(self, ask: Any) -> Generator[Operation, Any, int]:
        """The status for an acquire that the store found wrong."""
        try:
            found: SemaphoreDescription = yield DescribeOperation(ask.name)
        except TenureError:
            return Status.BAD_REQUEST
        mismatch = found.ephemeral != ask.ephemeral
        return Status.PRECONDITION_FAILED if mismatch else Status.BAD_REQUEST

    def _refuse_acquire(self, ask: Any, status: int, text: str) -> None:
        self._replies.append(answers.not_acquired(ask.req_id, status, text))

    def release(self, ask: Any) -> Script:
        """Withdraw the session's request for the name, or release it."""
        place = self._places.get(ask.name)
        if place is None:
            self._replies.append(answers.released(ask.req_id, False))
            return
        try:
            withdrawn: Withdrawn = yield WithdrawOperation(place.request_id, ask.name)
        except TenureError as error:
            self._replies.append(answers.not_released(ask.req_id, status_of(error), str(error)))
            return
        was_there = withdrawn is Withdrawn.LEFT and place.gone is None
        self._abort(place, "it was released while it waited")
        self._forget(place)
        self._replies.append(answers.released(ask.req_id, was_there))


def _seconds(ask: Any) -> float | None:
    """Return the timeout of an acquire in seconds; ``None`` for ever."""
    timeout: int = ask.timeout_millis
    return None if timeout == FOREVER else timeout / 1000
