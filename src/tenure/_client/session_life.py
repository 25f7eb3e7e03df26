"""Life of one session: its states, its proof, and its end.

A session ends once, in two steps:

* `begin_end` sets the reason. It may run in any thread, such as that of the keeper or of a call
  that reads the clock. It marks every held lease as lost, and carries out the leases' policies.
* `finish_end` runs on the session's loop. It cancels bodies, wakes the waiters, and closes the
  engine's session in a task that the client owns.

Rules:

* The deadline is that of the latest proof, on the local clock.
* The state, the deadline and the loss of a lease change under one lock, so no proof revives an
  ended session, and no lease is lost twice.
* A session that ends while it is being attached is finished when the engine has attached it.
* Each task raises a copy of the error kept here, so that tracebacks do not mix. The copy's
  attribute `ORIGIN` refers to the original.
* The session's loop owns all other state.

**The states** and every transition between them, without clock, I/O and threads::

    CONNECTING --attached--> ATTACHED <--contact lost, re-established--> DETACHED

    any of these --expired--> EXPIRED
    any of these --closed---> CLOSED
    any of these --left-----> LEFT       (the session lives on in the store)

Each event is a table of transitions. An event without a transition from the current state changes
nothing, so an end is final.

**The proof** has the time until which a session is proven to live in its store, and that of its
next renewal. Deadline = proof + window - margin, where the proof counts from when the answered
renewal was *sent*, and margin = max(5% of the window, 100 ms, the longest stop time of a held
lease).

Only the session's event loop changes the margin; proofs may be recorded from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial
from math import inf
from typing import Generic, Literal, Self, TypeAlias, TypeVar

from tenure import fork
from tenure._client.client_core import ClientCore
from tenure._client.contact import shortened
from tenure._client.listeners import EventKind
from tenure._client.loss import OnLoss
from tenure._client.scope import Scope
from tenure.background import Ending
from tenure.engines.contract import Attach, EngineSession, Withdrawn
from tenure.errors import EngineError, Misuse, SessionClosed, SessionExpired, TenureError

SessionState = Literal["connecting", "attached", "detached", "expired", "closed"]


class SessionPhase(Enum):
    """State of a session."""

    CONNECTING = "the engine attaches it"
    ATTACHED = "attached"
    DETACHED = "the contact is broken, and the engine tries to attach again"
    EXPIRED = "the store ended it, or its deadline has passed"
    CLOSED = "the program closed it"
    LEFT = "the program detached from it for good"


_P = SessionPhase

LIVING = frozenset({_P.CONNECTING, _P.ATTACHED, _P.DETACHED})
"""The states of a session that has not ended."""

SessionEvent: TypeAlias = Mapping[SessionPhase, SessionPhase]

ATTACHED: SessionEvent = {_P.CONNECTING: _P.ATTACHED}
CONTACT_LOST: SessionEvent = {_P.ATTACHED: _P.DETACHED}
CONTACT_RESTORED: SessionEvent = {_P.DETACHED: _P.ATTACHED}
EXPIRED: SessionEvent = dict.fromkeys(LIVING, _P.EXPIRED)
CLOSED: SessionEvent = dict.fromkeys(LIVING, _P.CLOSED)
LEFT: SessionEvent = dict.fromkeys(LIVING, _P.LEFT)

REPORTED: Mapping[SessionPhase, SessionState] = {
    _P.CONNECTING: "connecting",
    _P.ATTACHED: "attached",
    _P.DETACHED: "detached",
    _P.EXPIRED: "expired",
    _P.CLOSED: "closed",
    _P.LEFT: "detached",
}
"""The state that `Session.state` reports."""


class Proof:
    """Proof of one session's life, from its renewals.

    Attributes:
        at: when the latest answered renewal was sent.
        sent: when the latest renewal was sent.
        span: seconds from a proof to the deadline that it gives.
    """

    __slots__ = ("_least_margin", "_stop_times", "_window", "at", "sent", "span")

    def __init__(self, window: float) -> None:
        self.at = 0.0
        self.sent = 0.0
        self._window = window
        self._least_margin = max(0.05 * window, 0.1)
        self._stop_times: dict[int, float] = {}
        self.span = window - self._least_margin

    @property
    def deadline(self) -> float:
        """Time until which the session is proven."""
        return self.at + self.span

    @property
    def interval(self) -> float:
        """Longest time between renewals, in seconds."""
        return self.span / 3

    @property
    def due(self) -> float:
        """Time at which the session should be renewed."""
        return self.at + self.span / 3

    @property
    def renew_at(self) -> float:
        """Time of the next renewal. An unanswered renewal gets some time before it is repeated."""
        return max(self.at + self.span / 3, self.sent + self.span / 12)

    def add_stop_time(self, request_id: int, stop_time: float) -> None:
        """Move the deadline forward by the time that a lease's work needs to stop."""
        self._stop_times[request_id] = stop_time
        self._measure()

    def drop_stop_time(self, request_id: int) -> None:
        """Remove the stop time of a lease that has ended. Safe for a lease that never had any."""
        if self._stop_times.pop(request_id, None) is not None:
            self._measure()

    def _measure(self) -> None:
        self.span = self._window - max([self._least_margin, *self._stop_times.values()])


R = TypeVar("R")
T = TypeVar("T")

ORIGIN = "_origin"
"""Attribute that refers from a raised copy to the original error of the session's end."""

_log = logging.getLogger("tenure")


class SessionLife(ABC, Generic[R]):
    """State, proof and end of one session, with requests of type `R`.

    `SessionCore` implements what is done with the requests.

    Attributes:
        node, recovery_window, max_stall: see `tenure.Session`.
        on_loss: the default policy of its leases.
        requests: the requests that may be in a queue, by id.
        anchor: refers weakly to what keeps the session for the program (`SessionAnchor`).
        debug: whether its loop is in debug mode, and call sites include the lines around them.
        client: the core of the client.
        contact: the client's contact to the store.
        listeners: the streams and sinks of the client's events.
        engine: the engine's session; set by `start`.
        loop: the event loop of the session.
        now: reads the client's clock.
        lock: held while the state, the deadline or a lease's loss changes.
        phase: the state.
        why: the error of the end, once it has begun.
        ended_by_store: whether the store reported the end.
        scope: the session's block, once entered.
        finished: whether the end is complete, except for the store's answer.
    """

    __slots__ = (  # too many attributes for an efficient instance dictionary
        "_born",
        "_closers",
        "_leaving",
        "_racing",
        "_started",
        "_thread",
        "_until",
        "anchor",
        "client",
        "contact",
        "debug",
        "ended_by_store",
        "engine",
        "finished",
        "listeners",
        "lock",
        "loop",
        "max_stall",
        "node",
        "now",
        "on_loss",
        "phase",
        "proof",
        "recovery_window",
        "requests",
        "scope",
        "why",
    )

    engine: EngineSession
    anchor: Callable[[], object]

    def __init__(self, client: ClientCore, how: Attach, on_loss: OnLoss, max_stall: float) -> None:
        self.node = how.node
        self.recovery_window = how.recovery_window
        self.max_stall = max_stall
        self.on_loss = on_loss
        self.requests: dict[int, R] = {}
        self.client = client
        self.contact = client.contact
        self.listeners = client.listeners
        self.now = client.clock.now
        self.loop = asyncio.get_running_loop()
        self.debug = self.loop.get_debug()
        self.lock = threading.Lock()
        self.phase = SessionPhase.CONNECTING
        self.why: SessionExpired | SessionClosed | None = None
        self.ended_by_store = False
        self.finished = False
        self.scope: Scope | None = None
        self.proof = Proof(how.recovery_window)
        self._born = fork.generation
        self._thread = threading.get_ident()
        self._until = -inf  # the proof's deadline while the session lives; changed under the lock
        self._started = False  # whether the engine has attached the session
        self._racing: dict[Scope, None] = {}  # a set that keeps its order
        self._leaving: Ending  # set by `finish_end`
        self._closers = 0  # tasks that wait for it

    @abstractmethod
    def lose_requests(self) -> None:
        """Mark every held lease as lost. From any thread."""

    @abstractmethod
    def end_requests(self, closing: asyncio.Task[object] | None) -> None:
        """Wake everything that waits for a request, and forget the requests. On the loop.

        Args:
            closing: the task that closes the session, which is not cancelled.
        """

    @abstractmethod
    def withdraw(self, request: R) -> asyncio.Future[Withdrawn] | None:
        """Withdraw or release a request; return the answer to wait for, if there is one."""

    @abstractmethod
    def retry_withdrawal(self, request: R) -> None:
        """Send a withdrawal again until the store confirms it, or the session ends."""

    @abstractmethod
    def forget(self, request: R) -> None:
        """Forget a request that has left its queue."""

    @abstractmethod
    def lose(self, request: R) -> None:
        """Mark a held lease as lost: the session has ended. From any thread."""

    @abstractmethod
    def add_stop_time(self, request: R) -> None:
        """Move the deadline forward by the lease's stop time."""

    def held_requests(self) -> list[R]:
        """Return the requests that may be held. From any thread."""
        return list(self.requests.values())

    @property
    @abstractmethod
    def is_registered(self) -> bool:
        """True if the reaper ends the session after the death of the program."""

    @abstractmethod
    def stop_watches(self) -> None:
        """Wake the watches, and stop the release retries. On the loop."""

    # State

    @property
    def id(self) -> int:
        """The session's id."""
        return self.engine.id

    @property
    def state(self) -> SessionState:
        """The state that programs see. Reads the clock."""
        self.is_proven()
        return REPORTED[self.phase]

    @property
    def deadline(self) -> float:
        """Time until which the session is proven, on the client's clock."""
        return self.proof.deadline

    def is_proven(self) -> bool:
        """Return true if the session lives, by the clock. Ends a session past its deadline."""
        if fork.generation != self._born:
            self.check_process()
        if self.now() < self._until:
            return True
        if self.why is None:
            self.lapse()
        return False

    def alive(self) -> Self:
        """Return this session, if it can be used.

        Raises:
            SessionExpired, SessionClosed: it has ended.
            Misuse: it is used in a forked child, or on another event loop.
        """
        if not self.is_proven():
            raise self.error()
        if asyncio.get_running_loop() is not self.loop:
            self.check_loop()
        return self

    def check_process(self) -> None:
        """Raise `Misuse` in a forked child."""
        fork.check(self._born, f"the session on {self.node}")

    def check_loop(self) -> None:
        """Raise `Misuse` on another event loop."""
        if asyncio.get_running_loop() is not self.loop:
            raise Misuse(
                f"the session on {self.node} belongs to another event loop; call "
                "tenure.connect() in this one",
                node=self.node,
            )

    def emit(self, kind: EventKind, *facts: object, request: R | None = None) -> None:
        """Report an event; `facts` are the fields that this kind of event adds."""
        listeners = self.listeners
        if listeners.streams or listeners.sinks:
            listeners.emit(kind, self.node, self, request, facts)

    def enter(self) -> None:
        """Enter the session's block, in the current task."""
        self.scope = scope = Scope(self)
        scope.enter(asyncio.current_task(self.loop))
        if isinstance(self.why, SessionExpired):
            scope.trigger()  # expired after attaching and before entering

    # Proof; from any thread

    def proven(self, at: float) -> None:
        """Record the store's proof that the session lived at `at`. From any thread."""
        started = self._started
        # An ended session is not revived.
        if at > self.proof.at and (not started or self.is_proven()):
            self.proof.at = at
            self.measure()
            if self.listeners.streams and started:
                self.client.soon(partial(self.emit, "Renewed", self.deadline))

    def measure(self) -> None:
        """Update the deadline after a change of the proof."""
        with self.lock:
            if self.why is None:
                self._until = self.proof.deadline

    @property
    def renew_interval(self) -> float:
        return self.proof.interval

    @property
    def renew_at(self) -> float:
        return self.proof.renew_at

    def renew(self) -> None:
        """Send a renewal to the store."""
        self.proof.sent = now = self.now()
        if self.listeners.sinks:
            late = max(0.0, now - self.proof.due)
            self.client.soon(partial(self.listeners.report, "Renewing", self, None, late))
        self.engine.renew()

    def lapse(self) -> None:
        """End the session: its deadline has passed."""
        refusal = self.engine.refusal if self._started else ""
        why = refusal or "the store was out of reach, or this program was stopped or stalled"
        self.begin_end(
            SessionExpired(
                f"the session on {self.node} could not be proven alive within its recovery "
                f"window of {self.recovery_window:g} s ({why})",
                node=self.node,
            )
        )
        if threading.get_ident() == self._thread and self.loop.is_running():
            self.finish_end()
        else:
            self.client.soon(self.finish_end)

    # Transitions

    def step(self, event: SessionEvent) -> bool:
        """Take a transition; return false if the current state has no such transition."""
        with self.lock:
            after = event.get(self.phase)
            if after is not None:
                self.phase = after
            return after is not None

    # The end

    def error(self) -> SessionExpired | SessionClosed:
        """Return a copy of the end's error to raise, which refers to the original."""
        why = self.why
        assert why is not None
        error = type(why)(str(why), node=why.node)
        error.__dict__[ORIGIN] = why
        return error

    def ended(self, error: SessionExpired) -> None:
        """End the session: the store has ended it."""
        self.begin_end(error)
        self.ended_by_store = self.ended_by_store or self.why is error
        self.finish_end()

    def expired(self, error: SessionExpired) -> SessionExpired | SessionClosed:
        """End the session because of an answer of the store; return the error to raise."""
        self.ended(error)
        return self.error()

    async def race(self, operation: Awaitable[T]) -> T:
        """Wait for the store's answer or the session's end, the first of the two."""
        scope = Scope(self)
        scope.enter(asyncio.current_task(self.loop))
        self._racing[scope] = None
        try:
            answer = await operation
        except BaseException as error:
            if scope.exit(error):
                raise self.error() from None
            if isinstance(error, SessionExpired):
                raise self.expired(error) from None
            if isinstance(error, TenureError):
                shortened(error)
            raise
        finally:
            self._racing.pop(scope, None)
        scope.exit(None)
        return answer

    @property
    def racing(self) -> int:
        """Number of operations in `race`."""
        return len(self._racing)

    def close_soon(self, *, detach: bool = False) -> None:
        """Close the session, or detach from it; the store is informed in the background."""
        self.check_process()
        self.check_loop()
        how = "detached" if detach else "closed"
        why = SessionClosed(f"the session on {self.node} was {how}", node=self.node)
        self.begin_end(why, detach=detach)
        self.finish_end()

    async def close(self, *, detach: bool = False) -> None:
        """Close the session, or detach from it, and wait for the store. Safe to cancel.

        Raises:
            EngineError: the store could not be informed.
        """
        self.close_soon(detach=detach)
        self._closers += 1
        try:
            await self._leaving.wait()
        finally:
            self._closers -= 1

    def begin_end(self, why: SessionExpired | SessionClosed, *, detach: bool = False) -> None:
        """Set the reason of the end, and mark the leases as lost. Once, from any thread."""
        with self.lock:
            if self.phase not in LIVING:
                return
            expired = isinstance(why, SessionExpired)
            event = EXPIRED if expired else LEFT if detach else CLOSED
            self.phase = event[self.phase]
            self.why = why
            self._until = -inf
        self.lose_requests()

    def finish_end(self) -> None:
        """Wake everything that waits, and close the engine's session. Once, on the loop."""
        if self.finished or not self._started:
            return
        self.finished = True
        expired = self.phase is SessionPhase.EXPIRED
        self.client.forget_session(self)
        if expired:
            self.emit("Expired", str(self.why))
            me = None
        else:
            self.emit("Closed")
            me = asyncio.current_task()  # the closing task is not cancelled
        self.end_requests(me)
        for scope in self._racing:
            scope.trigger()
        self.stop_watches()
        if expired and self.scope is not None:
            self.scope.trigger()
        self._leaving = self.client.tasks.end(self._leave)

    async def _leave_in_time(self, limit: float) -> None:
        left = self.phase is SessionPhase.LEFT
        if left:
            self._unregister()  # first: it survives the program
        async with asyncio.timeout(limit):
            await (self.engine.detach() if left else self.engine.close())
        self._unregister()

    def _unregister(self) -> None:
        if self.client.registrations is not None:
            self.client.registrations.drop(self.id)

    async def _leave(self) -> None:
        try:
            # The store ends the session by itself after its window, so a program waits no longer
            # than for any answer. The engine keeps trying until it is closed.
            limit = min(self.recovery_window, self.contact.answer_timeout)
            await self._leave_in_time(limit)
        except Exception as error:
            failure = EngineError(
                f"the store did not confirm the end of the session on {self.node} "
                f"({str(error) or 'no answer'}); the session ends when its recovery window of "
                f"{self.recovery_window:g} s has passed",
                node=self.node,
            )
            expired = self.phase is SessionPhase.EXPIRED
            if (self._closers or self.client.closed) and not expired:
                raise failure from error
            # An outage that ends several sessions is logged once.
            known = expired and self.contact.obstacle() is not None
            _log.log(logging.DEBUG if known else logging.WARNING, "%s", failure)
