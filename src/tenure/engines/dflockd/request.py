"""One request for a key: from its place in this program's line to its end.

Its standing, and what moves it on::

    NEW        its turn has not come, or there is no connection     -> TRYING
    TRYING     asked for at once, on the shared connection          -> PROVING, JOINING, GONE
    JOINING    about to enter the queue, on a connection of its own -> WAITING, PROVING, GONE
    WAITING    in the server's queue                                -> PROVING
    PROVING    granted; if its proof is old, it is being renewed    -> HELD
    HELD       its session has been notified                        -> GONE
    LEAVING    it is being released, or is leaving the queue        -> GONE

Whatever is not wanted any more (`withdraw`, its timeout, the end of its session) leaves from where
it stands: at once, or when the answer that is under way has come. A lost connection sends a request
that does not hold yet back to TRYING or JOINING, and is the end of what is held or leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from functools import partial

from tenure.engines.contract import Answer, Removal, Withdrawn
from tenure.engines.dflockd.answers import RequestAnswers, RequestSession
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.dialing import Kind
from tenure.engines.dflockd.semaphores import refusal, uncounted
from tenure.engines.dflockd.shard import Shard
from tenure.errors import TenureError
from tenure.model import UNCHANGED, Unchanged
from tenure.wire.lines import asking
from tenure.wire.lines.replies import Reply, fence_of

__all__ = ["DflockdRequest", "Standing"]

_FOR_EVER = 1_000_000_000  # seconds; the protocol has no waiting without an end

_LOOK_AGAIN = 1.0  # seconds, if a grant is being proven when the time to wait for it is over
_REJOIN_PAUSE = 0.25  # seconds before a request joins again that the server has sent away


class Standing(Enum):
    """State of a request; the module's text has the transitions."""

    NEW = "new"
    TRYING = "trying"
    JOINING = "joining"
    WAITING = "waiting"
    PROVING = "proving"
    HELD = "held"
    LEAVING = "leaving"
    GONE = "gone"


NEW, TRYING, JOINING, WAITING, PROVING, HELD, LEAVING, GONE = Standing


class DflockdRequest:
    """One request.

    Args:
        limit: of the semaphore; 1 for a mutex.
        timeout: seconds to wait; 0: granted at once or not at all; ``None``: for ever.

    Attributes:
        answers: to its caller, and to its session.
        token: what the server knows it by while it is held.
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
        """Start new, with nothing sent."""
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
        self._unwanted = False
        self._refused: Reply | None = None
        self._departure: object = None  # a further step in its line, for leaving
        self._waits: float | Unchanged | None = UNCHANGED  # what it is to be given once it waits
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None
        if timeout:
            self._timer = session.loop.call_later(timeout, self._timed_out)

    # Its turn in the line

    def begin(self) -> None:
        """Get in line."""
        self._shard.lines.join(self.name, self, self.go)

    def _settled(self) -> None:
        """The next in line may go on."""
        self._shard.lines.done(self.name, self)

    # Asking

    def go(self) -> None:
        """Try, as soon as there is a connection."""
        shared, shard = self._shard.shared, self._shard
        self.standing = NEW
        if shared is None:
            shard.want_shared(self)
            return
        if self._limit is not None and shard.kind is Kind.PLAIN:
            self._fail(uncounted(shard, self._session.node, self.name))
            return
        self.standing = TRYING
        self._use(shared)
        request = asking.acquire(self.name, 0, self._session.lease, limit=self._limit)
        shared.ask(request, self._tried)

    def _tried(self, reply: Reply) -> None:
        if reply.status == "ok" and reply.token:
            self._got(reply)
            return
        self._disuse()
        if self._unwanted or (reply.status == "timeout" and self._at_once):
            self._finish()
        elif reply.status == "timeout":
            self._join()
        elif reply.status == "error_draining":
            self._soon(self.go)
        else:
            self._refuse(reply)

    def _join(self) -> None:
        """Enter the queue, or enter it anew."""
        self._later = None
        self.standing = JOINING
        if self._unwanted:
            self._finish()
        else:
            self._shard.want_own(self)

    def _again(self) -> None:
        """Ask again after the loss of a grant that was not reported."""
        if self._at_once:
            self.go()
        else:
            self._join()

    def _soon(self, step: Callable[[], None]) -> None:
        """The server has sent it away: go on after a moment."""
        self.standing = NEW
        self._later = self._session.loop.call_later(_REJOIN_PAUSE, step)

    def take(self, connection: DflockdConnection) -> None:
        """Here is a connection of its own."""
        self._use(connection)
        self._refused = None
        lease, limit = self._session.lease, self._limit
        connection.ask(asking.enqueue(self.name, lease, limit=limit), self._enqueued)
        wait = asking.wait(self.name, _FOR_EVER, counted=limit is not None)
        connection.ask(wait, self._waited, blocking=True)

    def _enqueued(self, reply: Reply) -> None:
        if reply.status == "queued":
            self.standing = WAITING
            self.answers.waits()
            if self._unwanted:
                self._leave()
            else:
                self._settled()
            if self._waits is not UNCHANGED:
                self.wait_no_longer_than(self._waits)
        elif reply.status != "acquired":
            self._refused = reply  # so that the reply to `wait` means nothing

    def _waited(self, reply: Reply) -> None:
        if self.standing is LEAVING:
            return  # the connection is being closed, and gives back what this says
        if reply.status == "ok" and reply.token:
            self._got(reply)
            return
        connection = self._disuse()
        refused = self._refused
        if refused is not None and refused.status != "error_draining":
            self._shard.give_back(connection)
            self._refuse(refused)
        else:
            self._shard.drop(connection)
            if self._unwanted:
                self._finish()
            else:
                self._soon(self._join)

    def _got(self, reply: Reply) -> None:
        """The server has granted it."""
        self.token = reply.token
        if self._shard.kind is Kind.FENCING:
            self.order_id = fence_of(reply.token)
        self.standing = PROVING
        if self._unwanted:
            self._leave()
        elif self._session.covers(self._sent):
            self._grant()
        else:
            self._sent = self._session.clock.now()
            assert self.connection is not None
            self.connection.ask(self.renewal(self.token), self._proved)

    def _proved(self, reply: Reply) -> None:
        if self.standing is LEAVING:
            return
        if reply.status == "ok":
            self._grant()
        else:  # it was over before it was reported
            self.token = ""
            self._shard.give_back(self._disuse())
            self._again()

    def _grant(self) -> None:
        self.standing = HELD
        self._stop_timers()
        self.answers.granted(self.order_id)
        self._settled()

    def renewal(self, token: str) -> bytes:
        """The request that renews what is held by that token."""
        counted = self._limit is not None
        return asking.renew(self.name, token, self._session.lease, counted=counted)

    @property
    def is_leaving(self) -> bool:
        """True if it is withdrawn."""
        return self._unwanted or self.standing is GONE

    def _fail(self, error: TenureError) -> None:
        """The server does not take it."""
        self.answers.failed(error)
        self._finish()

    def _refuse(self, reply: Reply) -> None:
        limit = self._limit or 1
        self._fail(refusal(self._shard, reply, self._session.node, self.name, limit))

    # Leaving

    def withdraw(self) -> Answer[Withdrawn]:
        """Leave the queue, or release."""
        if self.standing is GONE:
            return Withdrawn.MISSING
        gone = self.answers.withdrawal()
        if self.answers.given or self._session.over or self._waits_for_a_connection():
            self._give_up()
        else:  # it takes its course first, as others see it
            step = object()
            self._shard.lines.join(self.name, step, partial(self._depart, step))
        return gone.result() if gone.done() else gone

    def _waits_for_a_connection(self) -> bool:
        """True if it, or a request in line before it, needs a connection."""
        first = self._shard.lines.first(self.name)
        return isinstance(first, DflockdRequest) and first.connection is None

    def _depart(self, step: object) -> None:
        """Leave; that step of the line is done when it has left."""
        if self.standing is GONE:
            self._shard.lines.done(self.name, step)
        else:
            self._departure = step
            self._give_up()

    def wait_no_longer_than(self, timeout: float | None) -> None:
        """Change for how long it waits, from now on."""
        if self.standing in {HELD, LEAVING, GONE}:
            return
        if not self.answers.given:
            self._waits = timeout
            return
        self._waits = UNCHANGED
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if timeout is not None:
            self._timer = self._session.loop.call_later(timeout, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        if self.standing is PROVING:  # it is granted, unless that is over already: look again
            self._timer = self._session.loop.call_later(_LOOK_AGAIN, self._timed_out)
            return
        if self.standing in {HELD, LEAVING, GONE}:
            return
        self.answers.timed_out()
        self._give_up()

    def _give_up(self) -> None:
        if not self._unwanted:
            self._unwanted = True
            self._stop_timers()
            self._leave()

    def _leave(self) -> None:
        """Leave from where it stands, unless an answer must come first."""
        if self.standing is NEW or (self.standing is JOINING and self.connection is None):
            self._finish()
        elif self.standing in {WAITING, HELD, PROVING}:
            self.standing = LEAVING
            self._shard.lines.begin(self.name, self)
            self._leave_server()

    def _leave_server(self) -> None:
        """Release it, or close the connection on which it waits."""
        connection = self.connection
        if connection is None:
            self._finish()
        elif self.token:
            connection.ask(self._release(), self._released)
        else:
            self.connection = None
            self._shard.part(connection, self._finish)

    def _release(self) -> bytes:
        return asking.release(self.name, self.token, counted=self._limit is not None)

    def _released(self, reply: Reply) -> None:
        self._shard.give_back(self._disuse())
        self._finish(Withdrawn.MISSING if reply.status == "error" else Withdrawn.LEFT)

    def cut(self, why: str) -> None:  # noqa: ARG002  the shard has logged it
        """The connection is lost."""
        connection, self.connection = self.connection, None
        if self.token:
            self._shard.leave_behind(self._release())
        self.token, self.order_id = "", None
        if connection is not None:
            self._shard.closed(connection)
        if self.standing is HELD:
            self.answers.removed(Removal.CUT_OFF)
            self._finish()
        elif self.standing is LEAVING or self._unwanted:
            self._finish()
        elif self.standing is TRYING:
            self.go()
        else:
            self._again()

    def forgotten(self, token: str) -> None:
        """The server says that it does not know that token."""
        if self.standing is HELD and self.token == token:
            self._shard.give_back(self._disuse())
            self.answers.removed(Removal.LAPSED)
            self._finish()

    def _finish(self, withdrawn: Withdrawn = Withdrawn.LEFT) -> None:
        """It is out of everything.

        Args:
            withdrawn: the answer to a withdrawal. A release that a lost connection has cut off may
                have been carried out.
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
        self._settled()
        if self._departure is not None:
            self._shard.lines.done(self.name, self._departure)

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
