"""One request for a key, from its turn in the operation queue to its end.

A withdrawn request (`withdraw`, its timeout, the end of its session) leaves at once, or after the
pending reply. When its connection is lost, a request that is not held yet returns to TRYING or
JOINING; a request that is HELD or LEAVING ends.

States and transitions (`Standing`)::

    NEW        waits for its turn, or for a connection              -> TRYING
    TRYING     sent with a timeout of 0, on the shared connection   -> PROVING, JOINING, GONE
    JOINING    about to enter the queue, on a connection of its own -> WAITING, PROVING, GONE
    WAITING    in the server's queue                                -> PROVING
    PROVING    granted; if its proof is old, it is being renewed    -> HELD
    HELD       its session has been notified                        -> GONE
    LEAVING    it is being released, or is leaving the queue        -> GONE
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from tenure.clock import Clock
from tenure.engines._kit.operations import OperationQueue
from tenure.engines.contract import Answer, Enqueued, Place, Removal, SessionEvents, Withdrawn
from tenure.engines.dflockd.connection import DflockdConnection, Kind
from tenure.engines.dflockd.semaphores import refusal, uncounted
from tenure.engines.dflockd.shard import Shard
from tenure.errors import TenureError
from tenure.model import UNCHANGED, Unchanged
from tenure.wire import lines
from tenure.wire.lines import Reply, fence_of


class Standing(Enum):
    """State of a request; the module's docstring has the transitions."""

    NEW = "new"
    TRYING = "trying"
    JOINING = "joining"
    WAITING = "waiting"
    PROVING = "proving"
    HELD = "held"
    LEAVING = "leaving"
    GONE = "gone"


class RequestSession(Protocol):
    """Session of a request.

    Attributes:
        path: the path of the node.
        lease: duration of its leases in seconds.
        over: whether it no longer accepts or renews anything.
    """

    path: str
    clock: Clock
    loop: asyncio.AbstractEventLoop
    events: SessionEvents
    lease: int
    over: bool

    def covers(self, sent: float) -> bool:
        """Return true if a grant of a request sent at that time is as fresh as the proof."""

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""


class RequestAnswers:
    """Answers about one request.

    Attributes:
        place: the future that `enqueue` returns.
        given: whether the caller has an answer, so that events follow.
        withdrawals: callers that wait for the end of the request.
    """

    def __init__(self, session: RequestSession, number: int) -> None:
        self.place: asyncio.Future[Enqueued] = session.loop.create_future()
        self.given = False
        self.withdrawals: list[asyncio.Future[Withdrawn]] = []
        self._session = session
        self._number = number

    def granted(self, order_id: int | None) -> None:
        """Report a grant."""
        if self.given:
            self._session.events.granted(self._number, order_id)
        else:
            self._set_place(Enqueued(Place.GRANTED, order_id))

    def waits(self) -> None:
        """Report that the request waits, once."""
        if not self.given:
            self._set_place(Enqueued(Place.WAITING, None))

    def timed_out(self) -> None:
        """Report that the request was not granted in time."""
        if self.given:
            self.removed(Removal.TIMED_OUT)
        else:
            self._set_place(Enqueued(Place.REFUSED, None))

    def failed(self, error: TenureError) -> None:
        """Report that the server rejected the request, perhaps after it had accepted it."""
        if self.given:
            self.removed(Removal.LAPSED)
        else:
            self.given = True
            if not self.place.done():
                self.place.set_exception(error)

    def removed(self, why: Removal) -> None:
        """Report the end of a request that waited or was granted."""
        self._session.events.removed(self._number, why)

    def withdrawal(self) -> asyncio.Future[Withdrawn]:
        """Return the answer to a withdrawal, which comes with the end of the request."""
        gone: asyncio.Future[Withdrawn] = self._session.loop.create_future()
        self.withdrawals.append(gone)
        return gone

    def over(self, withdrawn: Withdrawn) -> None:
        """Answer every caller that has no answer yet."""
        if not self.given:
            self._set_place(Enqueued(Place.REFUSED, None))
        for gone in self.withdrawals:
            if not gone.done():
                gone.set_result(withdrawn)

    def _set_place(self, place: Enqueued) -> None:
        self.given = True
        if not self.place.done():
            self.place.set_result(place)


NEW, TRYING, JOINING, WAITING, PROVING, HELD, LEAVING, GONE = Standing

_FOR_EVER = 1_000_000_000  # seconds; every wait in the protocol has a timeout
_LOOK_AGAIN = 1.0  # seconds, if a grant is being proven when the timeout passes
_REJOIN_PAUSE = 0.25  # seconds before a request joins again that a draining server rejected


class DflockdRequest:
    """One request.

    Args:
        limit: the limit of the semaphore; 1 for a mutex.
        timeout: seconds to wait; 0: granted at once or not at all; ``None``: no limit.

    Attributes:
        answers: the answers for its caller, and its session.
        token: the server's identifier of the request while it is held.
    """

    def __init__(
        self,
        session: RequestSession,
        shard: Shard,
        number: int,
        name: str,
        limit: int,
        timeout: float | None,
    ) -> None:
        self.number = number
        self.name = name
        self.standing = NEW
        self.token = ""
        self.connection: DflockdConnection | None = None
        self.order_id: int | None = None
        self.answers = RequestAnswers(session, number)
        self._session = session
        self._shard = shard
        self._limit = None if limit == 1 else limit
        self._at_once = timeout == 0
        self._sent = 0.0
        self._withdrawn = False
        self._refused: Reply | None = None
        self._in_order = False  # later operations wait for it
        self._new_timeout: float | Unchanged | None = UNCHANGED  # to set once it waits
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None
        if timeout:
            self._timer = session.loop.call_later(timeout, self._timed_out)

    # Its turn

    @property
    def _queue(self) -> OperationQueue:
        return self._shard.queues.of(self.name)

    def begin(self) -> None:
        """Send the request when all earlier operations on its key are answered."""
        self._queue.add(self._begin)

    def _begin(self) -> bool:
        if self.standing is GONE:
            return True
        queue = self._queue
        if not queue.idle:
            return False
        self._in_order = True
        queue.begin(self)
        self.go()
        return True

    def _hold_order(self) -> None:
        """Make later operations on the key wait for this request."""
        if not self._in_order:
            self._in_order = True
            self._queue.begin(self)

    def _settled(self) -> None:
        """Let the next operation on the key begin."""
        if self._in_order:
            self._in_order = False
            self._queue.end(self)

    # Acquiring

    def go(self) -> None:
        """Try, as soon as there is a connection."""
        shared, shard = self._shard.shared, self._shard
        self.standing = NEW
        if shared is None:
            shard.await_shared(self)
            return
        if self._limit is not None and shard.kind is Kind.PLAIN:
            self._fail(uncounted(shard, self._session.path, self.name))
            return
        self.standing = TRYING
        self._use(shared)
        request = lines.acquire(self.name, 0, self._session.lease, limit=self._limit)
        shared.send(request, self._tried)

    def _tried(self, reply: Reply) -> None:
        if reply.status == "ok" and reply.token:
            self._got(reply)
            return
        self._disuse()
        if self._withdrawn or (reply.status == "timeout" and self._at_once):
            self._finish()
        elif reply.status == "timeout":
            self._join()
        elif reply.status == "error_draining":
            self._after_pause(self.go)
        else:
            self._refuse(reply)

    def _join(self) -> None:
        """Enter the queue, perhaps again."""
        self._later = None
        self.standing = JOINING
        if self._withdrawn:
            self._finish()
        else:
            self._shard.await_own(self)

    def _again(self) -> None:
        """Try again after the loss of a grant that was not reported."""
        if self._at_once:
            self.go()
        else:
            self._join()

    def _after_pause(self, step: Callable[[], None]) -> None:
        """Try again after a pause: the server is draining."""
        self.standing = NEW
        self._later = self._session.loop.call_later(_REJOIN_PAUSE, step)

    def take(self, connection: DflockdConnection) -> None:
        """Join the queue over a separate connection."""
        self._use(connection)
        self._refused = None
        lease, limit = self._session.lease, self._limit
        connection.send(lines.enqueue(self.name, lease, limit=limit), self._enqueued)
        wait = lines.wait(self.name, _FOR_EVER, counted=limit is not None)
        connection.send(wait, self._waited, blocking=True)

    def _enqueued(self, reply: Reply) -> None:
        if reply.status == "queued":
            self.standing = WAITING
            self.answers.waits()
            if self._withdrawn:
                self._leave()
            else:
                self._settled()
            if self._new_timeout is not UNCHANGED:
                self.wait_no_longer_than(self._new_timeout)
        elif reply.status != "acquired":
            self._refused = reply  # so that the reply to `wait` is ignored

    def _waited(self, reply: Reply) -> None:
        if self.standing is LEAVING:
            return  # the connection is being closed, which releases a grant
        if reply.status == "ok" and reply.token:
            self._got(reply)
            return
        connection = self._disuse()
        refused = self._refused
        if refused is not None and refused.status != "error_draining":
            self._shard.put_back(connection)
            self._refuse(refused)
        else:
            self._shard.drop(connection)
            if self._withdrawn:
                self._finish()
            else:
                self._after_pause(self._join)

    def _got(self, reply: Reply) -> None:
        """Prove a grant, unless its proof is fresh."""
        self.token = reply.token
        if self._shard.kind is Kind.FENCING:
            self.order_id = fence_of(reply.token)
        self.standing = PROVING
        if self._withdrawn:
            self._leave()
        elif self._session.covers(self._sent):
            self._grant()
        else:
            self._sent = self._session.clock.now()
            assert self.connection is not None
            self.connection.send(self.renewal(self.token), self._proved)

    def _proved(self, reply: Reply) -> None:
        if self.standing is LEAVING:
            return
        if reply.status == "ok":
            self._grant()
        else:  # it ended before it was reported
            self.token = ""
            self._shard.put_back(self._disuse())
            self._again()

    def _grant(self) -> None:
        self.standing = HELD
        self._stop_timers()
        self.answers.granted(self.order_id)
        self._settled()

    def renewal(self, token: str) -> bytes:
        """Return the message that renews the lock with that token."""
        counted = self._limit is not None
        return lines.renew(self.name, token, self._session.lease, counted=counted)

    @property
    def is_leaving(self) -> bool:
        """True if it is withdrawn."""
        return self._withdrawn or self.standing is GONE

    def _fail(self, error: TenureError) -> None:
        """Report that the server rejected it."""
        self.answers.failed(error)
        self._finish()

    def _refuse(self, reply: Reply) -> None:
        self._fail(refusal(self._shard, reply, self._session.path, self.name, self._limit or 1))

    # Leaving

    def withdraw(self) -> Answer[Withdrawn]:
        """Leave the queue, or release."""
        if self.standing is GONE:
            return Withdrawn.MISSING
        gone = self.answers.withdrawal()
        if self.answers.given or self._session.over or self._waits_for_a_connection():
            self._abandon()
        else:  # for other clients, it is answered first
            self._queue.add(self._depart)
        return gone.result() if gone.done() else gone

    def _waits_for_a_connection(self) -> bool:
        """Return true if it, or a request before it, needs a connection."""
        return any(
            isinstance(each, DflockdRequest) and each.needs_connection
            for each in self._queue.unanswered
        )

    @property
    def needs_connection(self) -> bool:
        """True if it cannot be sent yet, for lack of a connection."""
        return self.standing in {NEW, JOINING} and self.connection is None

    def _depart(self) -> bool:
        if self.standing is not GONE:
            if not self._queue.idle:
                return False
            self._abandon()
        return True

    def wait_no_longer_than(self, timeout: float | None) -> None:
        """Change the timeout, counted from now."""
        if self.standing in {HELD, LEAVING, GONE}:
            return
        self._new_timeout = UNCHANGED if self.answers.given else timeout
        if not self.answers.given:
            return
        if self._timer is not None:
            self._timer.cancel()
        later = self._session.loop.call_later
        self._timer = None if timeout is None else later(timeout, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        if self.standing is PROVING:  # it is granted, unless the grant was lost: check again
            self._timer = self._session.loop.call_later(_LOOK_AGAIN, self._timed_out)
            return
        if self.standing in {HELD, LEAVING, GONE}:
            return
        self.answers.timed_out()
        self._abandon()

    def _abandon(self) -> None:
        if not self._withdrawn:
            self._withdrawn = True
            self._stop_timers()
            self._leave()

    def _leave(self) -> None:
        """Leave, unless a reply must arrive first."""
        if self.standing is NEW or (self.standing is JOINING and self.connection is None):
            self._finish()
        elif self.standing in {WAITING, HELD, PROVING}:
            self.standing = LEAVING
            self._hold_order()
            self._leave_server()

    def _leave_server(self) -> None:
        """Release it, or close the connection on which it waits."""
        connection = self.connection
        if connection is None:
            self._finish()
        elif self.token:
            connection.send(self._release(), self._released)
        else:
            self.connection = None
            self._shard.part(connection, self._finish)

    def _release(self) -> bytes:
        return lines.release(self.name, self.token, counted=self._limit is not None)

    def _released(self, reply: Reply) -> None:
        self._shard.put_back(self._disuse())
        self._finish(Withdrawn.MISSING if reply.status == "error" else Withdrawn.LEFT)

    def cut(self, why: str) -> None:  # noqa: ARG002  the shard has logged it
        """Handle the loss of the connection."""
        connection, self.connection = self.connection, None
        if self.token:
            self._shard.leave_behind(self._release())
        self.token, self.order_id = "", None
        if connection is not None:
            self._shard.closed(connection)
        if self.standing is HELD:
            self.answers.removed(Removal.CUT_OFF)
            self._finish()
        elif self.standing is LEAVING or self._withdrawn:
            self._finish()
        elif self.standing is TRYING:
            self.go()
        else:
            self._again()

    def forgotten(self, token: str) -> None:
        """Report the loss of a lease that the server does not know."""
        if self.standing is HELD and self.token == token:
            self._shard.put_back(self._disuse())
            self.answers.removed(Removal.LAPSED)
            self._finish()

    def _finish(self, withdrawn: Withdrawn = Withdrawn.LEFT) -> None:
        """End the request, and answer its callers.

        Args:
            withdrawn: the answer to a withdrawal; a release may have been lost with a connection.
        """
        if self.standing is GONE:
            return
        self.standing = GONE
        self.token = ""
        self._stop_timers()
        self._shard.forget(self)
        self._session.forget(self.number)
        if self.connection is not None:
            self._disuse()
        self.answers.over(withdrawn)
        self._queue.drop(self._begin)
        self._settled()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._later):
            if timer is not None:
                timer.cancel()
        self._timer = self._later = None

    def _use(self, connection: DflockdConnection) -> None:
        self.connection = connection
        self._sent = self._session.clock.now()
        connection.users[self] = None

    def _disuse(self) -> DflockdConnection:
        connection, self.connection = self.connection, None
        assert connection is not None
        connection.users.pop(self, None)
        return connection
