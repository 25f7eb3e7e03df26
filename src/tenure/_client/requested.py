"""A request, from the moment it is asked for until it is out of its queue for good.

States and what moves between them::

    ASKED --answered--> WAITING --granted--> HELD --release--> RELEASED
       |  `--granted-------|-------------------^ `--lost-----> LOST
       `-------------------+--refused, given up, timed out, deleted, evicted, session over--> GONE

    RELEASED --the store answers that the request had left its queue before--> LOST

Rules:

* The session owns the state, on its loop; only LOST may be set from another thread. Whether a
  lease is held is for the session's clock to say, too (`Lease.held`).
* Whoever waits for a request waits for its state to change and touches nothing else, so that a
  wait can be cancelled at any moment and its place kept or given up as the waiter's owner likes.
* Loss is final. Its error is kept; what is raised is a copy, so that tracebacks of several tasks
  do not mix.
* A release is told to the store by the session, so that it happens even when the task that
  asked for it is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING

from tenure._client.handles import AsyncHandle
from tenure._client.loss import carry_out, late_release_error, lost_error
from tenure._client.scope import Scope, note_failure
from tenure.engines.contract import Enqueued, Place, Removal
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)

if TYPE_CHECKING:
    from tenure._client.request import Wanted
    from tenure._client.session import Session
    from tenure._client.slots import Slots

__all__ = ["Requested", "State"]


class State(Enum):
    """Where a request is in its life; the module's text has the transitions."""

    ASKED = "asked for"
    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"
    GONE = "gone"


_log = logging.getLogger("tenure")

# Globals: the hot path reads no attribute of an enumeration.
ASKED, WAITING, HELD, RELEASED, LOST, GONE = State
_GRANTED, _REFUSED = Place.GRANTED, Place.REFUSED


class Requested(AsyncHandle):
    """One request of a session, and what has become of it.

    Attributes:
        session: the session that asked.
        name: the name of the mutex, semaphore or election.
    """

    __slots__ = (
        "_asked_at",
        "_count",
        "_granted_at",
        "_hold",
        "_loss",
        "_order_id",
        "_scope",
        "_slots",
        "_state",
        "_waiters",
        "_wanted",
        "_why_gone",
        "name",
        "session",
    )

    def __init__(self, session: Session, hold: int, wanted: Wanted) -> None:
        self.session = session
        self.name = wanted.name
        self._hold = hold
        self._wanted = wanted
        self._count = wanted.count
        self._asked_at = self._granted_at = 0.0
        self._order_id: int | None = None
        self._state = ASKED
        self._scope: Scope | None = None
        self._slots: Slots | None = None
        self._loss: LeaseLost | None = None
        self._why_gone: Place | Removal | Exception | None = None
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} on {self.node} {self._state.value}"
            f"{'' if self._order_id is None else f' fencing_token={self._order_id}'}>"
        )

    @property
    def node(self) -> str:
        """The path of the node."""
        return self.session.node

    # Leaving the queue

    async def _give_back(self) -> None:
        """Leave the queue, whether owning or waiting. Does nothing when out of it already.

        Raises:
            LeaseLost: it was an owner, and the store says that it had left the queue before.
        """
        answer = self._give_up()
        if answer is not None:
            await self._answered_by_store(answer)
            if self.session._ending.why is None:
                answer.result()
        if self._loss is not None:
            raise self._why_not_held()

    async def _answered_by_store(self, answer: asyncio.Future[bool]) -> None:
        """Wait until a withdrawal is answered, or the session's end has made that needless.

        If the store ended the session, its answer says whether the withdrawal came before. An
        outage may keep that answer back; then it is not known.
        """
        await self._change()
        session = self.session
        if session._ending.by_the_store:
            # If it is there, this takes until it has been heard.
            await asyncio.wait([answer], timeout=session._client_contact.answer_timeout)

    def _give_up(self) -> asyncio.Future[bool] | None:
        """Begin to leave the queue.

        Returns:
            the store's answer: when that has come, or the session has ended, the lease changes
            for the last time. ``None`` when there is nothing to wait for.
        """
        session = self.session
        if self._slots is not None:
            self._slots.release()
        if self._state is HELD:
            self._state = RELEASED
            if session._listeners.streams:
                held_for = session._now() - self._granted_at
                session._tell("Released", self.name, self._order_id, held_for)
        elif self._state is WAITING or self._state is ASKED:
            self._state = GONE
        else:
            return None
        if self._waiters:
            self._wake()
        return session._withdrawals.begin(self)

    # What the session tells it, on its loop

    def _answered(self, answer: asyncio.Future[Enqueued]) -> None:
        """The store has answered the request, or did not take it."""
        error = answer.exception()
        if error is None:
            self._answer(answer.result())
        else:
            assert isinstance(error, Exception)
            self._refused(error)

    def _refused(self, error: Exception) -> None:
        """The store did not take the request."""
        if isinstance(error, SessionExpired):
            self.session.ended(error)
        self._fail(error)
        if not isinstance(error, SessionExpired | InvalidArgument | SemaphoreNotFound):
            # Whether it reached the queue is not certain, so it is made certain.
            try:
                self.session._withdrawals.begin(self)
            except Exception as failure:
                note_failure(error, failure, "its withdrawal")

    def _answer(self, placed: Enqueued) -> None:
        """The store's answer to the request."""
        place, order_id = placed
        if place is _GRANTED:
            self._grant(order_id)
        elif place is _REFUSED:
            self._fail(place)
        else:
            if self._order_id is None:
                self._order_id = order_id
            if self._state is ASKED:
                self._state = WAITING
                self._wake()

    def _grant(self, order_id: int | None) -> None:
        """The request is an owner; perhaps the order id comes later, with a second call."""
        if order_id is not None:
            self._order_id = order_id
        if self._state is not ASKED and self._state is not WAITING:
            return
        session = self.session
        self._granted_at = now = session._now()
        self._state = HELD
        if self._wanted.stop_time:
            session._hold_stop_time(self)
        if session._listeners.streams:
            waited = now - self._asked_at if self._asked_at else 0.0
            session._tell("Acquired", self.name, order_id, waited)
        if self._waiters:
            self._wake()

    def _fail(self, why: Place | Removal | Exception | None) -> None:
        """The request will not be granted."""
        if self._state is ASKED or self._state is WAITING:
            self._why_gone = why
            self._state = GONE
            self.session._forget(self)
            self._wake()

    def _remove(self, why: Removal) -> None:
        """The request left its queue by somebody else's doing."""
        self._fail(why)
        self._taken(why.value)

    def _taken(self, how: str) -> None:
        if self._state is HELD:
            self.session._forget(self)
            self._lose(how, None)
            self._announce_loss()

    def _withdrawn(self, answer: asyncio.Future[bool]) -> None:
        """The store has answered the withdrawal, whether that was a release or not."""
        error = answer.exception()
        if error is None:
            self._left(was_there=answer.result())
        else:
            self.session._withdrawals.failed(self, error)
        if self._loss is not None:
            self._log_loss()
        if self._waiters:
            self._wake()

    def _left(self, *, was_there: bool) -> None:
        """It is out of its queue. A release that came too late is a loss.

        The policies of a loss are not carried out: they stop work, and this work has ended.
        """
        session = self.session
        session._leases.pop(self._hold, None)
        if was_there or self._state is not RELEASED:  # a waiter has left either way
            return
        ending = session._ending
        cause = ending.why if ending.by_the_store else None
        self._loss = loss = late_release_error(self, cause)
        self._state = LOST
        session._tell("Lost", self.name, self._order_id, str(loss))

    def _log_loss(self) -> None:
        """Log the loss of a lease that its release has shown, if no caller waits to be told.

        One that the session's end explains is reported with that.
        """
        loss = self._loss
        assert loss is not None
        if loss.__cause__ is None and all(waiter.done() for waiter in self._waiters):
            _log.warning("%s", self._loss)

    def _wake(self) -> None:
        """Have all who wait for a change go on, but for those who were cancelled."""
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        """What is done at the next change. On the session's loop."""
        waiter: asyncio.Future[None] = self.session._loop.create_future()
        if self._waiters:  # forget whoever does not wait any more
            self._waiters = tuple(waiter for waiter in self._waiters if not waiter.done())
        self._waiters += (waiter,)
        return waiter

    # Loss

    def _lose(self, reason: str, cause: SessionExpired | SessionClosed | None) -> None:
        """Keep how it was lost, and carry out the policy. From any thread; once."""
        with self.session._ending.lock:
            if self._state is not HELD:
                return
            self._loss = loss = lost_error(self, reason, cause)
            self._state = LOST
        if not isinstance(cause, SessionClosed):
            carry_out(self._wanted.on_loss or self.session._on_loss, loss)

    def _announce_loss(self, *, but_not: asyncio.Task[object] | None = None) -> None:
        """Cancel the body, unless it is that task's, and wake who waits. On the loop."""
        session = self.session
        if self._slots is not None:
            self._slots.release()
        session._tell("Lost", self.name, self._order_id, str(self._loss))
        self._wake()
        scope = self._scope
        if scope is not None and (but_not is None or scope.task is not but_not):
            scope.trigger()

    def _why_not_held(self) -> Exception:
        """What to raise when it is not held (any more), or never was."""
        loss, why, node, name = self._loss, self._why_gone, self.node, self.name
        if loss is not None:
            copy = LeaseLost(str(loss), node=node, name=name, fencing_token=loss.fencing_token)
            copy.__cause__ = loss.__cause__
            return copy
        if isinstance(why, Exception):
            return why
        if why is Removal.DELETED:
            return SemaphoreNotFound(
                f"{name!r} on {node} was deleted while this request waited", node=node, name=name
            )
        if isinstance(why, Removal) and why is not Removal.TIMED_OUT:
            return lost_error(self, f"its request was {why.value} while it waited", None)
        if self._state is GONE and self.session._ending.why is not None:
            return self.session._ending.error()
        return LeaseReleased(
            f"the lease of {name!r} on {node} has been released", node=node, name=name
        )
