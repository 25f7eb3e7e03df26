"""One request of a session, from sending it until it has left its queue for good.

A granted request becomes a lease (`lease`), made by the handle class in its options.

Rules:

* The session owns the state, on its loop; only LOST may be set from another thread, under the
  session's lock. Whether a lease is held also depends on the session's clock (`Request.held`).
* A waiting task only waits for a change of the state, so a wait can be cancelled at any time.
* Loss is final. Its error is kept; each task raises a copy, so that tracebacks do not mix.
* The session sends the withdrawal, so it takes effect even when the calling task is cancelled.

States of a request and every transition between them:

::

    SENT --queued--> WAITING --granted--> HELD --withdrawn--> RELEASED --missing--> LOST
      |                 |                  `--removed, session ended-------------> LOST
      `--granted--------|----------------> HELD
      `-----------------+--rejected, withdrawn, removed, session ended--> GONE

Each event is a table of transitions. An event without a transition from the current state changes
nothing, because events may be reported twice, or too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from tenure._client.handles import CallSite, note_failure
from tenure._client.listeners import (
    EventKind,
    Listeners,
    ReportingSession,
    outcome_of,
    reason_of_end,
)
from tenure._client.loss import (
    OnLoss,
    carry_out,
    check_policy,
    late_release_error,
    lost_error,
)
from tenure._client.scope import Scope
from tenure._client.session_life import SessionLife
from tenure.core import refusals
from tenure.durations import Duration, seconds
from tenure.engines.contract import Enqueued, Place, Removal, Withdrawn, when_answered
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)

if TYPE_CHECKING:
    from tenure.events import LossCause, Outcome

L_co = TypeVar("L_co", covariant=True)


class RequestOptions(Generic[L_co]):
    """Options of a request: the tokens of a semaphore, and the type of the lease.

    Attributes:
        kind: the kind of primitive in messages, such as "mutex".
        handle: makes the program's lease from the granted `Request`.
    """

    __slots__ = (
        "count",
        "data",
        "ephemeral",
        "handle",
        "kind",
        "name",
        "on_loss",
        "stop_time",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        count: int,
        data: bytes = b"",
        *,
        handle: Callable[..., L_co],
        ephemeral: bool,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> None:
        if on_loss is not None:
            check_policy(on_loss)
        self.kind = kind
        self.name = name
        self.count = count
        self.data = data
        self.handle = handle
        self.ephemeral = ephemeral
        self.on_loss = on_loss
        usual = type(stop_time) is float and stop_time == 0.0
        self.stop_time = 0.0 if usual else seconds(stop_time, "a stop time")

    def __str__(self) -> str:
        return f"the request for {self.kind} {self.name!r}"


class RequestState(Enum):
    """State of a request."""

    SENT = "sent"
    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"
    GONE = "gone"

    # The hash of an enumeration is slow, and each grant looks up a table.
    __hash__ = object.__hash__


# Globals, because reading attributes of an enumeration is slow on the hot path.
SENT, WAITING, HELD, RELEASED, LOST, GONE = RequestState

RequestEvent: TypeAlias = Mapping[RequestState, RequestState]

QUEUED: RequestEvent = {SENT: WAITING}
GRANTED: RequestEvent = {SENT: HELD, WAITING: HELD}
REJECTED: RequestEvent = {SENT: GONE, WAITING: GONE}
WITHDRAWN: RequestEvent = {SENT: GONE, WAITING: GONE, HELD: RELEASED}
TAKEN: RequestEvent = {HELD: LOST}
"""The owner has left the queue, or its session has ended; for a waiter, see `REJECTED`."""
MISSING: RequestEvent = {RELEASED: LOST}
"""The store's answer to a release: the request had left the queue before."""

EVENTS: Mapping[str, RequestEvent] = {
    "queued": QUEUED,
    "granted": GRANTED,
    "rejected": REJECTED,
    "withdrawn": WITHDRAWN,
    "taken": TAKEN,
    "missing": MISSING,
}
"""All events, by name."""


_log = logging.getLogger("tenure")

_GRANTED, _REFUSED = Place.GRANTED, Place.REFUSED

_CAUSES: Mapping[Removal, LossCause] = {Removal.EVICTED: "evicted", Removal.DELETED: "deleted"}


def _cause_of(end: SessionExpired | SessionClosed) -> LossCause:
    return "session_expired" if isinstance(end, SessionExpired) else "session_closed"


class HeldSlots(Protocol):
    """The slots of a lease, released together with it."""

    async def take(self) -> tuple[int, ...]:
        """Take the missing slots, and return all."""
        ...

    def release(self) -> None:
        """Release all."""

    def shrink(self, count: int) -> None:
        """Release all but the first `count`."""


class Request:
    """One request of a session.

    Attributes:
        session: the session that sent it; `session_of` returns all of it.
        id: its number within the session.
        options: as sent.
        name: the name of the mutex, semaphore or election.
        site: the program's call that made it, or that obtained its handle.
        contended: whether it was logged that this program waits for it.
        count: the number of tokens that it takes now.
        sent_at, granted_at: times on the client's clock; 0 before.
        order_id: its place in the store's order, once it is known.
        state: its state.
        scope: the block of its lease, once entered.
        when_queued: called when the store has put the request into its queue, instead of waking
            the tasks that wait for a change.
        unentered: deleted to enter the block. Of two threads that do so, one gets an error, and no
            lock is left held if one of them is interrupted.
        slots: the slots of its lease, if it has any.
        loss: the error of its loss.
        loss_cause: the cause of its loss.
        why_gone: the reason why it was not granted.
    """

    __slots__ = (
        "_waiters",
        "contended",
        "count",
        "granted_at",
        "id",
        "loss",
        "loss_cause",
        "name",
        "options",
        "order_id",
        "scope",
        "sent_at",
        "session",
        "site",
        "slots",
        "state",
        "unentered",
        "when_queued",
        "why_gone",
    )

    order_id: int | None
    scope: Scope | None
    slots: HeldSlots | None
    when_queued: Callable[[], None] | None
    loss: LeaseLost | None
    loss_cause: LossCause
    why_gone: Place | Removal | Exception | None

    def __init__(
        self,
        session: SessionLife[Request],
        request_id: int,
        options: RequestOptions[object],
        site: CallSite | None = None,
    ) -> None:
        self.session = session
        self.id = request_id
        self.options = options
        self.name = options.name
        self.count = options.count
        self.sent_at = self.granted_at = 0.0
        self.state = SENT
        self.contended = False
        self.when_queued = None
        self.unentered = True
        self.site = site
        self.order_id = self.scope = self.slots = self.loss = self.why_gone = None
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    def __str__(self) -> str:
        token = "" if self.order_id is None else f" fencing_token={self.order_id}"
        return f"{self.name!r} on {self.node} {self.state.value}{token}"

    @property
    def node(self) -> str:
        """The path of the node."""
        return self.session.node

    @property
    def held(self) -> bool:
        """True while the lease is held. Reads the clock at every call; safe from any thread."""
        if self.state is HELD:
            if self.session.is_proven():
                return True
            self.session.lose(self)  # another thread may not have noticed it yet
        return False

    def check(self) -> None:
        """Raise unless the lease is held.

        Raises:
            LeaseLost, LeaseReleased: it is no longer held.
        """
        if not self.held:
            raise self.why_not_held()

    # Leaving the queue

    async def leave(self) -> None:
        """Leave the queue, as an owner or a waiter. Does nothing if it has left already.

        Raises:
            LeaseLost: it was an owner, and according to the store it had left the queue before.
        """
        answer = self.withdraw()
        if answer is not None:
            await self.answered_by_store(answer)
            if self.session.why is None:
                answer.result()
        if self.loss is not None:
            raise self.why_not_held()

    async def answered_by_store(self, answer: asyncio.Future[Withdrawn]) -> None:
        """Wait until a withdrawal is answered, or the session's end has made it unnecessary.

        If the store ended the session, its answer says whether the withdrawal came first. During an
        outage that answer may be missing.
        """
        await self.change()
        session = self.session
        if session.ended_by_store:
            # An answer that has already arrived is processed in the next iteration.
            await asyncio.wait([answer], timeout=session.contact.answer_timeout)

    def withdraw(
        self, outcome: Outcome = "withdrawn", reason: str = ""
    ) -> asyncio.Future[Withdrawn] | None:
        """Begin to leave the queue.

        Args:
            outcome: the end of the wait, if it is not granted yet.
            reason: the reason in words.

        Returns:
            The store's answer. The request changes for the last time when it arrives or the session
            ends. ``None`` when there is nothing to wait for.
        """
        session = self.session
        if self.slots is not None:
            self.slots.release()
        after = WITHDRAWN.get(self.state)
        if after is None:
            return None
        self.state = after
        listeners = session.listeners
        if listeners.streams or listeners.sinks:
            if after is RELEASED:
                facts = (self.name, self.order_id, session.now() - self.granted_at)
                listeners.emit("Released", session.node, session, self, facts)
            else:
                self._emit_end(outcome, reason)
        if self._waiters:
            self.wake()
        return session.withdraw(self)

    def withdraw_because(self, error: BaseException) -> None:
        """Leave the queue because of `error`, which remains the error to raise."""
        withdraw = partial(self.withdraw, outcome_of(error), reason_of_end(error))
        if isinstance(error, GeneratorExit):
            # An abandoned task can be closed in any thread.
            self.session.client.soon(withdraw)
            return
        try:
            withdraw()
        except Exception as failure:
            note_failure(error, failure, f"withdrawing the request for {self.name!r}")

    def abandon(self, outcome: Outcome = "withdrawn") -> None:
        """Leave the queue for a caller that needs no answer. After an error it is sent again."""
        with contextlib.suppress(Exception):
            self.withdraw(outcome)

    def _emit_end(self, outcome: Outcome, reason: str) -> None:
        """Report the end of a wait without a lease."""
        waited = self.session.now() - self.sent_at if self.sent_at else 0.0
        if outcome == "timed_out":
            self.session.emit("TimedOut", self.name, waited, request=self)
        else:
            self.session.emit("NotAcquired", self.name, waited, outcome, reason, request=self)

    # Reports of the session, on its loop

    def answered(self, answer: asyncio.Future[Enqueued]) -> None:
        """Process the store's answer to the request, or its error."""
        error = answer.exception()
        if error is None:
            self.place(answer.result())
        else:
            assert isinstance(error, Exception)
            self.refused(error)

    def refused(self, error: Exception) -> None:
        """Fail: the store has rejected the request with an error."""
        if isinstance(error, SessionExpired):
            self.session.ended(error)
        self.fail(error)
        if not isinstance(error, SessionExpired | InvalidArgument | SemaphoreNotFound):
            # The request may have reached the queue.
            try:
                self.session.withdraw(self)
            except Exception as failure:
                note_failure(error, failure, "its withdrawal")

    def place(self, placed: Enqueued) -> None:
        """Process the store's answer to the request."""
        place, order_id = placed
        if place is _GRANTED:
            self.grant(order_id)
        elif place is _REFUSED:
            self.fail(place)
        else:
            if self.order_id is None:
                self.order_id = order_id
            if self.state in QUEUED:
                self.state = QUEUED[self.state]
                if self.session.listeners.sinks:
                    self.session.listeners.report("Queued", self.session, self)
                if self.when_queued is None:
                    self.wake()
                else:
                    self.when_queued()

    def grant(self, order_id: int | None) -> None:
        """Make the request an owner. The order id may follow in a second call."""
        if order_id is not None:
            self.order_id = order_id
        after = GRANTED.get(self.state)
        if after is None:
            return
        session = self.session
        self.granted_at = now = session.now()
        self.state = after
        if self.options.stop_time:
            session.add_stop_time(self)
        listeners = session.listeners
        if listeners.streams or listeners.sinks:
            facts = (self.name, order_id, now - self.sent_at if self.sent_at else 0.0)
            listeners.emit("Acquired", session.node, session, self, facts)
        if self._waiters:
            self.wake()

    def fail(self, why: Place | Removal | Exception | None) -> None:
        """End the request: it will not be granted."""
        if self.state in REJECTED:
            self.why_gone = why
            self.state = REJECTED[self.state]
            listeners = self.session.listeners
            if listeners.streams or listeners.sinks:
                self._emit_end(*self._why_ended(why))
            self.session.forget(self)
            self.wake()

    def _why_ended(self, why: Place | Removal | Exception | None) -> tuple[Outcome, str]:
        match why:
            case Exception():
                return outcome_of(why), reason_of_end(why)
            case Removal():
                return "timed_out" if why == Removal.TIMED_OUT else "failed", why.value
            case None:
                return "failed", str(self.session.why)
            case _:
                return "rejected", "not free"

    def remove(self, why: Removal) -> None:
        """End the request: it has left its queue without being withdrawn by this session."""
        self.fail(why)
        self.taken(why.value, _CAUSES.get(why, "removed"))

    def taken(self, how: str, cause: LossCause = "removed") -> None:
        """Lose the lease: the owner has left its queue without being released by this session."""
        if self.state in TAKEN:
            self.session.forget(self)
            self.loss_cause = cause
            self.lose(how, None)
            self.announce_loss()

    def await_withdrawal(self, answer: asyncio.Future[Withdrawn]) -> None:
        """Process the answer to a withdrawal, of an owner or a waiter."""
        when_answered(answer, self._withdrawn)

    def _withdrawn(self, answer: asyncio.Future[Withdrawn]) -> None:
        error = answer.exception()
        if error is None:
            self.left(answer.result())
        else:
            self.withdrawal_failed(error)
        if self.loss is not None:
            self.log_loss()
        if self._waiters:
            self.wake()

    def withdrawal_failed(self, error: BaseException) -> None:
        """Process an error with which the store answered a withdrawal."""
        session = self.session
        if isinstance(error, SessionExpired):
            session.ended(error)
            self.left(Withdrawn.MISSING if session.ended_by_store else Withdrawn.LEFT)
        elif session.why is None:
            session.retry_withdrawal(self)

    def left(self, withdrawn: Withdrawn) -> None:
        """Record that the request has left its queue. A release that came too late is a loss.

        Loss policies are not carried out: they stop work, and this work has ended.
        """
        session = self.session
        session.requests.pop(self.id, None)
        # A waiter has left in either case.
        if withdrawn is Withdrawn.LEFT or self.state not in MISSING:
            return
        cause = session.why if session.ended_by_store else None
        self.loss = late_release_error(self, cause)
        self.loss_cause = "late_release" if cause is None else _cause_of(cause)
        self.state = MISSING[self.state]
        self._emit_loss()

    def log_loss(self) -> None:
        """Log a loss that the release has revealed, unless a caller waits for it.

        A loss caused by the session's end is reported with that end.
        """
        loss = self.loss
        assert loss is not None
        if loss.__cause__ is None and all(waiter.done() for waiter in self._waiters):
            _log.warning("lease lost: node=%s name=%r error=%s", self.node, self.name, loss)

    def wake(self) -> None:
        """Wake all tasks that wait for a change, except cancelled ones."""
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def change(self) -> asyncio.Future[None]:
        """Return a future of the next change. On the session's loop."""
        waiter: asyncio.Future[None] = self.session.loop.create_future()
        if self._waiters:  # forget cancelled waiters
            self._waiters = tuple(waiter for waiter in self._waiters if not waiter.done())
        self._waiters += (waiter,)
        return waiter

    # Loss

    def lose(self, reason: str, cause: SessionExpired | SessionClosed | None) -> None:
        """Keep the error of the loss, and carry out the policy. Called once, from any thread."""
        session = self.session
        with session.lock:
            after = TAKEN.get(self.state)
            if after is None:
                return
            self.loss = loss = lost_error(self, reason, cause)
            if cause is not None:
                self.loss_cause = _cause_of(cause)
            self.state = after
        if not isinstance(cause, SessionClosed):
            carry_out(self.options.on_loss or session.on_loss, loss)

    def announce_loss(self, *, but_not: asyncio.Task[object] | None = None) -> None:
        """Cancel the body, unless the current task runs it, and wake the waiters. On the loop."""
        if self.slots is not None:
            self.slots.release()
        self._emit_loss()
        self.wake()
        scope = self.scope
        if scope is not None and (but_not is None or scope.task is not but_not):
            scope.trigger()

    def _emit_loss(self) -> None:
        facts = (self.name, self.order_id, str(self.loss), self.loss_cause)
        self.session.emit("Lost", *facts, request=self)

    def why_not_held(self) -> Exception:
        """Return the error to raise when the lease is not held."""
        loss, why, node, name = self.loss, self.why_gone, self.node, self.name
        if loss is not None:
            copy = LeaseLost(str(loss), node=node, name=name, fencing_token=loss.fencing_token)
            copy.__cause__ = loss.__cause__
            return copy
        if isinstance(why, Exception):
            return why
        if why == Removal.DELETED:
            return SemaphoreNotFound(
                f"{name!r} on {node} was deleted while this request waited", node=node, name=name
            )
        if isinstance(why, Removal) and why.limit is not None:
            return refusals.limit_changed(node, name, why.limit, self.count)
        if isinstance(why, Removal) and why != Removal.TIMED_OUT:
            return lost_error(self, f"its request was {why.value} while it waited", None)
        if self.state is GONE and self.session.why is not None:
            return self.session.error()
        return LeaseReleased(
            f"the lease of {name!r} on {node} has been released", node=node, name=name
        )


class UnsentRequest:
    """A request that waits for its session to be attached.

    Attributes:
        node, name: those of the semaphore.
        options: the request's options.
        since: the beginning of the wait, on the client's clock.
    """

    __slots__ = ("_listeners", "_session", "name", "node", "options", "since")

    def __init__(
        self,
        listeners: Listeners,
        node: str,
        session: ReportingSession | None,
        options: RequestOptions[object],
    ) -> None:
        self.node = node
        self.name = options.name
        self.options = options
        self.since = listeners.now()
        self._listeners = listeners
        self._session = session

    def begin(self) -> None:
        """Report the beginning of the wait."""
        self._listeners.unsent[self.ended] = None
        self._emit("Requested")

    def sent(self, request: Request) -> None:
        """Report that the request is sent; it reports its end itself."""
        self._listeners.unsent.pop(self.ended, None)
        self._listeners.report("Sent", request.session, request, self)

    def ended(self, error: BaseException) -> None:
        """Report the end of the wait because of `error`, unless it has ended or was sent."""
        if isinstance(error, GeneratorExit):
            # An abandoned task can be closed in any thread.
            self._listeners.soon(partial(self._end, error))
        else:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        if self.ended not in self._listeners.unsent:
            return
        del self._listeners.unsent[self.ended]
        waited = self._listeners.now() - self.since
        outcome = outcome_of(error)
        if outcome == "timed_out":
            self._emit("TimedOut", waited)
        else:
            self._emit("NotAcquired", waited, outcome, reason_of_end(error))

    def _emit(self, kind: EventKind, *facts: object) -> None:
        self._listeners.emit(kind, self.node, self._session, self, (self.name, *facts))


AnyRequest: TypeAlias = Request | UnsentRequest
"""The request of an event."""
