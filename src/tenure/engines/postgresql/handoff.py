"""Hand-off of a mutex between requests of one session, ahead of the store's confirmation.

A request that stands directly behind another one of its session is the next owner when that one is
released: no request can get in between. So the program grants it as soon as it has sent the
release. Tasks of one program do not wait for the store in between. Rules:

* The session owns the mutex in the store throughout. Other sessions see that one owner follows the
  other, and the lease is lost with the session, as always.
* The store reports the request that stands directly ahead when another one joins the queue. The
  report stays true: requests leave a queue, and none is inserted.
* Both requests are exclusive: each takes all tokens of an ephemeral semaphore. Beside one that
  takes less, others may be owners.
* A timeout could remove a request in the store while the release ahead is on the way, and the store
  would grant the mutex to another session. So this release names the request: it takes effect only
  if that one is in the queue, and removes its timeout. A release that was sent before names none.
  The store replies "unkept", and why the request has left the queue, if it did not take effect.
  If the request has timed out, it is lost, so nothing is handed on to one that soon times out.
* A session that may be resumed hands nothing on: the process that resumes it knows what the store
  knows, and may be a server whose clients know more.
* Nothing is handed on while the store grants nothing, so that outages and quarantines look as they
  do on every engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from tenure.engines._kit.commands.pipeline import (
    HANDED,
    OWNS,
    SENT,
    WAITING,
    EnqueueOperation,
    WithdrawOperation,
    removal,
)
from tenure.engines._kit.commands.replies import first_word
from tenure.engines._kit.commands.session import (
    CommandSender,
    CommandSession,
    CommandSessionEngine,
    SessionParameters,
)
from tenure.engines.contract import Answer, Removal, Withdrawn
from tenure.model import UNCHANGED, Recovered, Unchanged

MARGIN = 1.0
"""Seconds that a request may still wait if a mutex is handed on to it, at the least."""


class QueuedRequest:
    """One request of the session in a queue.

    Attributes:
        number: as in the contract of engines.
        order_id: its place in the queue.
        deadline: the time of its timeout in the store, if it has one.
        ahead: the exclusive request of the session that stands directly ahead of it, if known.
        behind: the same the other way round.
        released: its release is on the way.
    """

    __slots__ = ("ahead", "behind", "deadline", "number", "order_id", "released")

    def __init__(self, number: int, order_id: int) -> None:
        self.number = number
        self.order_id = order_id
        self.deadline: float | None = None
        self.ahead: QueuedRequest | None = None
        self.behind: QueuedRequest | None = None
        self.released = False

    def put_behind(self, ahead: QueuedRequest) -> int | None:
        """Note what is directly ahead; return this request if it is the next owner.

        It is not if it has a timeout: the release on the way does not name it.
        """
        if ahead.behind is not None:
            ahead.behind.ahead = None  # it was removed: the store reports it later
        self.ahead, ahead.behind = ahead, self
        return self.number if ahead.released and self.deadline is None else None

    def step_out(self) -> tuple[QueuedRequest | None, QueuedRequest | None]:
        """Forget what is ahead of the request and behind it, and return both."""
        ahead, behind = self.ahead, self.behind
        self.ahead = self.behind = None
        if ahead is not None:
            ahead.behind = None
        if behind is not None:
            behind.ahead = None
        return ahead, behind


class Handoff:
    """The requests of one session in queues, as far as they stand side by side.

    They are known until their withdrawals are confirmed. Methods take and return their numbers.
    """

    __slots__ = ("_exclusive", "_requests")

    def __init__(self) -> None:
        self._requests: dict[int, QueuedRequest] = {}
        self._exclusive: dict[int, QueuedRequest] = {}  # of these, by order id

    @property
    def order_ids(self) -> dict[int, int]:
        """The order ids of all requests."""
        return {number: each.order_id for number, each in self._requests.items()}

    def order_id(self, number: int) -> int:
        """Return the order id of a request; 0 if it is in no queue."""
        request = self._requests.get(number)
        return 0 if request is None else request.order_id

    def joined(self, number: int, order_id: int) -> None:
        """Add a request that the store has put into its queue."""
        self._requests[number] = QueuedRequest(number, order_id)

    def note_exclusive(
        self, number: int, ahead: int = 0, deadline: float | None = None
    ) -> int | None:
        """Note that a request which has joined is exclusive.

        Args:
            number: of the request.
            ahead: the order id of the request directly ahead; 0 if it is unknown, or there is none.
            deadline: the time of its timeout, if it has one.

        Returns:
            The request if it is the next owner, and has no timeout.
        """
        request = self._requests[number]
        request.deadline = deadline
        self._exclusive[request.order_id] = request
        before = self._exclusive.get(ahead)
        return None if before is None else request.put_behind(before)

    def note_changed(self, number: int) -> None:
        """Note that the count or the timeout of a request changes: it is exclusive no more."""
        if (request := self._requests.get(number)) is not None:
            request.step_out()
            self._exclusive.pop(request.order_id, None)

    def released(self, number: int) -> int | None:
        """Note that the release of an owner is on the way; return the next owner, if known.

        May be repeated.
        """
        request = self._requests.get(number)
        if request is None:
            return None
        request.released = True
        return None if request.behind is None else request.behind.number

    def is_released(self, number: int) -> bool:
        """Return whether the release of this request is on the way."""
        request = self._requests.get(number)
        return request is not None and request.released

    def is_behind(self, number: int) -> bool:
        """Return whether a request stands directly behind another one."""
        request = self._requests.get(number)
        return request is not None and request.ahead is not None

    def side_by_side(self, number: int) -> Iterator[int]:
        """Yield a request, and those that stand side by side ahead of it, from back to front."""
        yield number
        request = self._requests.get(number)
        while request is not None and (request := request.ahead) is not None:
            yield request.number

    def deadline(self, number: int) -> float | None:
        """Return the time of a request's timeout, if it has one."""
        request = self._requests.get(number)
        return None if request is None else request.deadline

    def left(self, number: int) -> int | None:
        """Forget a request that has left its queue otherwise.

        Returns:
            The request that is the next owner because of that, if it has no timeout.
        """
        request = self._requests.get(number)
        if request is None:
            return None
        ahead, behind = request.step_out()
        self.confirmed(number)
        return None if ahead is None or behind is None else behind.put_behind(ahead)

    def confirmed(self, number: int) -> None:
        """Forget a request whose release the store has confirmed."""
        request = self._requests.pop(number, None)
        if request is not None:
            request.step_out()
            self._exclusive.pop(request.order_id, None)


class HandoffWithdraw(WithdrawOperation):
    """Operation that takes a request out of its queue, and may hand its mutex on.

    Attributes:
        kept: a request of the session that has to be in the queue, and loses its timeout.
    """

    __slots__ = ("kept",)

    def __init__(
        self,
        session: Any,
        request_id: int,
        name: str,
        *,
        retried: bool = False,
        kept: int | None = None,
    ) -> None:
        super().__init__(session, request_id, name, retried=retried)
        self.kept = kept

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        unkept = self.session.unkept
        if unkept and self.request_id in unkept:
            unkept.discard(self.request_id)
            self.may_have_run = True  # the session owned the mutex until now
        super().answered(reply)


class HandoffSession(CommandSession):
    """A session that hands mutexes on between its requests.

    Attributes:
        handoff: the order ids of its requests, and which of these stand side by side.
        unkept: requests that had left the queue before their releases arrived.
    """

    withdrawing: ClassVar[type[HandoffWithdraw]] = HandoffWithdraw

    def __init__(
        self, engine: CommandSessionEngine, sender: CommandSender, given: SessionParameters
    ) -> None:
        super().__init__(engine, sender, given)
        self.handoff = Handoff()
        self.unkept: set[int] = set()
        self._hands_on = given.how.liveness == "process"

    # Defined by each engine

    @abstractmethod
    def _ahead_of(self, reply: list[Any]) -> int:
        """Return the order id of the request directly ahead of one that waits; 0 if unknown."""

    @abstractmethod
    def _may_hand_on(self, request_id: int) -> bool:
        """Return whether the next request may be granted while this one's release is on the way."""

    # Requests

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        super().placed(operation, reply)
        request_id = operation.request_id
        standing = self.requests.get(request_id)
        if standing in (OWNS, WAITING):
            handoff, waits = self.handoff, standing == WAITING
            handoff.joined(request_id, reply if type(reply) is int else reply[0])
            if operation.exclusive and self._hands_on:
                ahead = self._ahead_of(reply) if waits else 0
                self._hand_on(handoff.note_exclusive(request_id, ahead, operation.deadline))

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue, and hand its mutex on."""
        if self.over:
            self.check()
        handoff = self.handoff
        owned = self.requests.get(request_id, SENT) >= HANDED
        may_hand_on = self._may_hand_on(request_id)
        name = self._drop(request_id)
        after = kept = None
        if not owned and not handoff.is_released(request_id):
            after = handoff.left(request_id)
        elif may_hand_on:
            after = handoff.released(request_id)
        else:
            handoff.confirmed(request_id)  # the store grants the mutex to the request behind
        if after is not None and (deadline := handoff.deadline(after)) is not None:
            waits = self.requests.get(after) == WAITING
            kept = after = after if not waits or self.loop.time() < deadline - MARGIN else None
        operation = self.withdrawing(self, request_id, name, kept=kept)
        self._sender.operate(operation)
        self._hand_on(after)
        return operation

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal, or that it has not taken effect."""
        if not isinstance(operation, HandoffWithdraw) or first_word(reply) != "unkept":
            super().not_withdrawn(operation, reply)
            return
        if operation.kept in self.requests:  # the store has granted nothing meanwhile
            self._removed(operation.kept, removal(reply[1]) if reply[1] else Removal.LAPSED)
        elif operation.kept is not None:
            self.unkept.add(operation.kept)  # and its release will find nothing
        operation.kept = self.handed(operation.name)
        self._withdraw_again(operation)

    def _withdraw_again(self, operation: HandoffWithdraw) -> None:
        if not self.over:
            self._sender.operate(operation)
        elif not operation.retried:
            operation.fail(self.reason)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        if self.requests.get(request_id) == HANDED:
            timeout = UNCHANGED  # as for any owner
        if count is not None or timeout is not UNCHANGED:
            self.handoff.note_changed(request_id)
            if self.requests.get(request_id) == SENT:
                self._hands_on = False  # its answer would say too much
        return super().alter(request_id, count=count, data=data, timeout=timeout)

    def confirmed(self, request_id: int) -> None:
        """Forget a request whose withdrawal the store has confirmed."""
        super().confirmed(request_id)
        self.handoff.confirmed(request_id)

    def _hand_on(self, request_id: int | None) -> None:
        """Grant a request of which the session owns the mutex, unless the store grants nothing."""
        if request_id is None or self.over or self._engine.trouble() is not None:
            return
        if self.requests.get(request_id) == WAITING:
            self.requests[request_id] = HANDED
            self.events.granted(request_id, self.handoff.order_id(request_id))

    def _granted(self, request_id: int, order_id: int) -> None:
        if self.requests[request_id] == HANDED:
            self.requests[request_id] = OWNS
        else:
            super()._granted(request_id, order_id)

    def _removed(self, request_id: int, why: Removal) -> None:
        waited = self.requests.get(request_id) == WAITING
        super()._removed(request_id, why)
        if waited:
            self._hand_on(self.handoff.left(request_id))
        else:  # its holder has to stop first
            self.handoff.confirmed(request_id)

    def _recovered(self, request: Recovered) -> None:
        super()._recovered(request)
        self.handoff.joined(request.request_id, request.order_id)

    def handed(self, name: str) -> int | None:
        """Return the request that was handed the mutex, and waits in the store."""
        for each, standing in self.requests.items():
            if standing == HANDED and self.names[each] == name:
                return each
        return None

    def waiting_names(self) -> set[str]:
        """Return the names for which requests wait in the store.

        One that was handed a mutex waits there during a quarantine, after the release ahead.
        """
        return {
            self.names[each]
            for each, at in self.requests.items()
            if at == WAITING or (at == HANDED and not self.handoff.is_behind(each))
        }

    def waits(self) -> Iterator[tuple[int, int]]:
        """Yield the requests that wait, with their order ids."""
        order_ids = self.handoff.order_ids
        return ((each, order_ids[each]) for each, at in self.requests.items() if at == WAITING)
