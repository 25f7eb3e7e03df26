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

Polls for waiters, in a store that delivers no events.

Rules:

* A poll is one command for all sessions of a program. It looks at the first waiter of each queue:
  those behind it are granted later. If it was granted, the others are looked at too.
* The first waiter of a queue is polled often, one behind others less.
* The more programs poll, and the more queues they wait in, the longer is the pause of each. So the
  polls of all programs together stay below 40 a second.
* A program with many queues polls less often, since a poll costs the server more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from tenure.engines._kit.commands.pipeline import (
    HANDED,
    OWNS,
    REMOVALS,
    SENT,
    WAITING,
    EnqueueOperation,
    WithdrawOperation,
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


class Handoff:
    """The requests of one session in queues, as far as they stand side by side.

    Requests are numbered as in the contract of engines.

    Attributes:
        order_ids: those of the requests, until their withdrawals are confirmed.
    """

    __slots__ = ("_ahead", "_behind", "_deadlines", "_numbers", "_released", "order_ids")

    def __init__(self) -> None:
        self.order_ids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of the exclusive requests, by order id
        self._ahead: dict[int, int] = {}  # the request that stands directly ahead of a waiter
        self._behind: dict[int, int] = {}  # the same the other way round
        self._released: set[int] = set()  # owners whose releases are on the way
        self._deadlines: dict[int, float] = {}  # of requests with a timeout in the store

    def joined(self, number: int, order_id: int) -> None:
        """Add a request that the store has put into its queue."""
        self.order_ids[number] = order_id

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
        self._numbers[self.order_ids[number]] = number
        if deadline is not None:
            self._deadlines[number] = deadline
        before = self._numbers.get(ahead)
        return None if before is None else self._link(before, number)

    def note_changed(self, number: int) -> None:
        """Note that the count or the timeout of a request changes: it is exclusive no more."""
        self._unlink(number)
        self._numbers.pop(self.order_ids.get(number, 0), None)

    def released(self, number: int) -> int | None:
        """Note that the release of an owner is on the way; return the next owner, if known.

        May be repeated.
        """
        if number not in self.order_ids:
            return None
        self._released.add(number)
        return self._behind.get(number)

    def is_released(self, number: int) -> bool:
        """Return whether the release of this request is on the way."""
        return number in self._released

    def is_behind(self, number: int) -> bool:
        """Return whether a request stands directly behind another one."""
        return number in self._ahead

    def side_by_side(self, number: int) -> Iterator[int]:
        """Yield a request, and those that stand side by side ahead of it, from back to front."""
        ahead: int | None = number
        while ahead is not None:
            yield ahead
            ahead = self._ahead.get(ahead)

    def deadline(self, number: int) -> float | None:
        """Return the time of a request's timeout, if it has one."""
        return self._deadlines.get(number)

    def left(self, number: int) -> int | None:
        """Forget a request that has left its queue otherwise.

        Returns:
            The request that is the next owner because of that, if it has no timeout.
        """
        before, after = self._unlink(number)
        self.confirmed(number)
        return None if before is None or after is None else self._link(before, after)

    def confirmed(self, number: int) -> None:
        """Forget a request whose release the store has confirmed."""
        self._unlink(number)
        self._numbers.pop(self.order_ids.pop(number, 0), None)
        self._released.discard(number)
        self._deadlines.pop(number, None)

    def _unlink(self, number: int) -> tuple[int | None, int | None]:
        """Forget what is ahead of a request and behind it, and return both."""
        before, after = self._ahead.pop(number, None), self._behind.pop(number, None)
        if before is not None:
            del self._behind[before]
        if after is not None:
            del self._ahead[after]
        return before, after

    def _link(self, before: int, after: int) -> int | None:
        if (removed := self._behind.get(before)) is not None:
            del self._ahead[removed]  # the store reports it later
        self._ahead[after] = before
        self._behind[before] = after
        return after if before in self._released and after not in self._deadlines else None


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

    def keep(self, kept: int | None) -> None:
        """Make the withdrawal depend on that request, or on none, when it is sent again."""
        self.kept = kept


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
            handoff.joined(request_id, reply[0] if waits else reply)
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
            self._removed(operation.kept, REMOVALS.get(reply[1], Removal.LAPSED))
        elif operation.kept is not None:
            self.unkept.add(operation.kept)  # and its release will find nothing
        operation.keep(self.handed(operation.name))
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
        if request_id in self._fresh:
            self.loop.call_soon(self._hand_on, request_id)  # after the answer to its caller
        elif self.requests.get(request_id) == WAITING:
            self.requests[request_id] = HANDED
            self.events.granted(request_id, self.handoff.order_ids[request_id])

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


S = TypeVar("S", bound=HandoffSession)

_POLL, _LONGEST_POLL = 0.1, 40.0
"""Seconds between two polls of the first waiter, and of any, at the most."""
_QUEUES = 1.5
"""Queues that programs poll without a longer pause.

The programs in one queue need up to 26 polls a second: ten for the first one, a third of it for the
second one, and so on.
"""
_REQUESTS = 100
"""Requests that one poll looks at without a longer pause."""
_LOOKS = 20
"""Looks for what has expired, in a second, of all programs with new waiters."""


class WaiterPolling(Generic[S]):
    """The polls of one engine.

    Args:
        look: looks at requests of sessions, given with their states as they are known here; calls
            a function then with true if one was granted.
        all_sessions: returns the sessions of the engine.
        now: returns the time, in seconds.
        wake_by: has `poll` called by a time.

    Attributes:
        at: the time of the next poll.
    """

    def __init__(
        self,
        look: Callable[[dict[S, dict[int, int]], Callable[[bool], None]], None],
        all_sessions: Callable[[], Sequence[S]],
        now: Callable[[], float],
        wake_by: Callable[[float], None],
    ) -> None:
        self._look = look
        self._all_sessions = all_sessions
        self._now = now
        self._wake_by = wake_by
        self._programs = self._queues = self._requests = 1
        self.at = 0.0

    @property
    def pause_of_looks(self) -> float:
        """Seconds until a look for what has expired, after a request has begun to wait."""
        return self._programs / _LOOKS

    def note_load(self, programs: int, queues: int) -> None:
        """Note how many programs poll for how many queues."""
        self._programs, self._queues = programs, queues

    def note_waiter(self) -> None:
        """Poll soon for a request that waits."""
        self.note_ahead(0)

    def note_ahead(self, ahead: int) -> None:
        """Poll when a request with so many ahead of it may have been granted."""
        queues = min(self._programs, self._queues) / _QUEUES
        pause = _POLL * max(1.0, queues, self._requests / _REQUESTS)
        self.at = min(self.at, self._now() + min(pause * (ahead + 1) ** 1.5, _LONGEST_POLL))
        self._wake_by(self.at)

    def poll(self) -> None:
        """Look at the first waiter of each queue."""
        self.at = self._now() + _LONGEST_POLL
        first: dict[tuple[str, str], tuple[int, S, int]] = {}
        for session in self._all_sessions():
            if session.early is not None or session.over:
                continue  # a takeover is not complete, or it has ended
            for request_id, order_id in session.waits():
                place = session.path, session.names[request_id]
                if place not in first or order_id < first[place][0]:
                    first[place] = order_id, session, request_id
        self._requests = len(first)
        requests: dict[S, dict[int, int]] = {}
        for _, session, request_id in first.values():
            requests.setdefault(session, {})[request_id] = WAITING
        if requests:
            self._look(requests, self._polled)

    def _polled(self, granted: bool) -> None:
        if granted:
            for session in self._all_sessions():
                session.look_up((WAITING,))
