"""A session: what a program holds things through, and what proves that it is alive.

States, as `Session.state` tells them::

    connecting --> attached <--> detached (the contact is broken; the engine tries again)
                      |             |
                      +-------------+--> expired   the store's word, or the deadline has passed
                      +-------------+--> closed    aclose(), or the end of the block
                      `----------------> detached  detach(): for good, from this object's view

Rules:

* The deadline is that of the latest proof (`tenure._client.proof`), on the holder's own clock.
* The end is final and happens once, whoever notices first (`tenure._client.ending`).
* The session's loop owns everything else here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from tenure import fork
from tenure._client.election import Election
from tenure._client.ending import Ending
from tenure._client.handles import AsyncHandle
from tenure._client.lease import Lease
from tenure._client.listeners import EventKind
from tenure._client.loss import OnLoss
from tenure._client.mutex import Mutex
from tenure._client.proof import Proof
from tenure._client.request import Wanted
from tenure._client.requested import Requested
from tenure._client.resume import ResumeToken
from tenure._client.runs import Jobs
from tenure._client.scope import Scope, note_failure
from tenure._client.semaphore import Semaphore
from tenure._client.withdrawal import Withdrawals
from tenure.engines.contract import Attach, EngineSession, Enqueued, Place, Removal
from tenure.errors import InvalidArgument, Misuse, SessionExpired, Unsupported
from tenure.model import Recovered

if TYPE_CHECKING:
    from tenure._client.client import Client

__all__ = ["Session", "SessionState"]

SessionState = Literal["connecting", "attached", "detached", "expired", "closed"]


class Session(Jobs, AsyncHandle):
    """A program's session on a node. `Client.session` makes one.

    ``async with client.session(...) as session`` closes it at the end of the block, and cancels
    the body when it expires; the block then raises `SessionExpired`. A session that was awaited
    is closed with `aclose`.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
        max_stall: seconds that the event loop may be stuck before it is no longer renewed.
    """

    _engine: EngineSession  # set by _start, before a program sees the session

    def __init__(self, client: Client, how: Attach, on_loss: OnLoss, max_stall: float) -> None:
        self.node = how.node
        self.recovery_window = how.recovery_window
        self.max_stall = max_stall
        self._description = how.description
        self._key = how.key
        self._resumable = how.liveness == "window"
        self._client = client
        self._listeners = client._listeners
        self._client_contact = client._contact
        self._now = client.clock.now
        self._born = fork.generation()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._on_loss = on_loss
        self._contact: Literal["connecting", "attached", "detached"] = "connecting"
        self._proof = Proof(how.recovery_window)
        self._until = -inf  # the proof's deadline while it is not over; changed under the lock
        self._ending = Ending(self)
        self._leases: dict[int, Lease] = {}
        self._recovered: dict[int, Recovered] = {}
        self._watchers: dict[Callable[[], None], None] = {}  # a set that keeps its order
        self._withdrawals = Withdrawals(self)
        self._readings: dict[str, asyncio.Task[str]] = {}  # of `tenure._client.contention`
        self._probes: dict[str, asyncio.Task[bool]] = {}  # of `tenure._client.probe`
        self._last_hold = 0
        self._scope: Scope | None = None

    def __repr__(self) -> str:
        return f"<Session {self.id} on {self.node}{'' if self._ending.why is None else ' (over)'}>"

    # What a program asks

    @property
    def id(self) -> int:
        """The session's id: positive, never reused in a store."""
        return self._engine.id

    @property
    def state(self) -> SessionState:
        """One of ``connecting, attached, detached, expired, closed``. Reads the clock."""
        if self._proven():
            return self._contact
        if isinstance(self._ending.why, SessionExpired):
            return "expired"
        return "detached" if self._ending.detached else "closed"

    @property
    def deadline(self) -> float:
        """Until when the session is proven, on the client's clock, in seconds."""
        return self._proof.deadline

    @property
    def resume_token(self) -> str:
        """What a restarted program gives to `Client.session` to take this session over.

        Keep it like a password, and where a restart finds it. It stays the same for the whole
        life of the session.

        Raises:
            Unsupported: the session was not asked for with ``resumable=True``.
        """
        if not self._resumable:
            raise Unsupported(
                f"the session on {self.node} ends with its program; one that can be resumed is "
                "asked for with client.session(..., resumable=True)",
                node=self.node,
            )
        return str(ResumeToken(self.node, self.id, self.recovery_window, self._key))

    @property
    def recovered(self) -> tuple[Recovered, ...]:
        """What a resumed session found in queues and nobody has claimed yet, in order.

        `Mutex.recover`, `Semaphore.recover` and `Election.recover` claim it. What is left
        unclaimed keeps its place, or its tokens, until the session ends.
        """
        return tuple(self._recovered.values()) if self._proven() else ()

    # What a program does

    def mutex(self, name: str) -> Mutex:
        """The mutex of that name on the session's node."""
        return Mutex(self, name)

    def semaphore(self, name: str, *, ephemeral: bool = False) -> Semaphore:
        """The semaphore of that name on the session's node.

        Args:
            ephemeral: it comes and goes with its requests, and needs no creation.
        """
        return Semaphore(self, name, ephemeral=ephemeral)

    def election(self, name: str) -> Election:
        """The election of that name on the session's node."""
        return Election(self, name)

    async def aclose(self) -> None:
        """End the session: everything held through it is released, in one step.

        Safe to call twice, and when cancelled. Leases that other tasks are inside are lost, and
        their bodies cancelled; a block that the calling task itself is inside raises at its end.

        Raises:
            EngineError: the store failed; it will end the session when its window is over.
        """
        self._ending.by_program()
        await self._ending.told()

    async def detach(self) -> None:
        """Leave without ending the session: it keeps its places until its window is over.

        Until then its `resume_token`, if it has one, takes it up again, here or in another
        process. From this object's view it is over: leases count as lost, because nobody
        proves them.
        """
        self._ending.by_program(detach=True)
        await self._ending.told()

    async def __aenter__(self) -> Session:
        self._alive()
        if self._scope is not None:
            raise Misuse(
                f"the session on {self.node} has been entered already; a session is entered once",
                node=self.node,
            )
        self._enter()
        return self

    def _enter(self) -> None:
        self._scope = Scope(self)
        self._scope.enter(asyncio.current_task(self._loop))
        if isinstance(self._ending.why, SessionExpired):
            self._scope.trigger()  # between its attaching and now

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._scope is None:
            raise Misuse(
                f"the session on {self.node} is left without having been entered",
                node=self.node,
            )
        ours = self._scope.exit(error)
        if isinstance(error, GeneratorExit):  # nothing can be awaited, in whatever thread
            self._client._soon(self._ending.by_program)
            return
        try:
            if self.state == "expired":
                pass
            elif isinstance(error, asyncio.CancelledError):
                self._ending.by_program()  # who cancels does not wait for the store
            else:
                await self.aclose()
        except Exception as failure:
            note_failure(error, failure, f"closing the session on {self.node}")
        if isinstance(self._ending.why, SessionExpired) and (error is None or ours):
            raise self._ending.error()

    # For the primitives

    def _source(self) -> Session:
        return self

    async def _obtain(self) -> Session:
        return self._alive()

    def _current(self) -> Session:
        return self

    def _alive(self) -> Session:
        """This session, if it can be used.

        Raises:
            SessionExpired, SessionClosed: it is over.
            Misuse: it is used in a forked child, or on another event loop.
        """
        if not self._proven():
            raise self._ending.error()
        if asyncio.get_running_loop() is not self._loop:
            self._check_loop()
        return self

    _ready = _alive

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise Misuse(
                f"the session on {self.node} belongs to another event loop; call "
                "tenure.connect() in this one",
                node=self.node,
            )

    def _proven(self) -> bool:
        """Whether the session is alive by the clock; if its deadline has passed, it ends here."""
        if fork._generation != self._born:
            fork.check(self._born, f"the session on {self.node}")
        if self._now() < self._until:
            return True
        if self._ending.why is None:
            self.lapse()
        return False

    def _measure(self) -> None:
        """The proof has changed."""
        with self._ending.lock:
            if self._ending.why is None:
                self._until = self._proof.deadline

    def _request(self, wanted: Wanted) -> Lease:
        """A new request of this session, numbered before anything is sent."""
        if self._ending.why is not None:  # since it was obtained: nobody would hear of the request
            raise self._ending.error()
        if wanted.stop_time:
            self._check_stop_time(wanted)
        self._last_hold = hold = self._last_hold + 1
        self._leases[hold] = lease = wanted.handle(self, hold, wanted)
        return lease

    def _check_stop_time(self, wanted: Wanted) -> None:
        if wanted.stop_time >= self.recovery_window / 2:
            raise InvalidArgument(
                f"a stop time is under half the recovery window ({self.recovery_window:g} s), "
                f"not {wanted.stop_time:g} s: ask for a longer window",
                node=self.node,
                name=wanted.name,
            )

    def _claim(self, wanted: Wanted) -> Lease | None:
        """The first request of that name that was recovered and fits, as a lease."""
        for found in self._recovered.values():
            if (found.name, found.ephemeral) == (wanted.name, wanted.ephemeral):
                break
        else:
            return None
        self._check_stop_time(wanted)
        del self._recovered[found.hold]
        self._leases[found.hold] = lease = wanted.handle(self, found.hold, wanted)
        lease._count = found.count
        lease._asked_at = self._now()
        lease._answer(Enqueued(Place.GRANTED if found.granted else Place.WAITING, found.order_id))
        return lease

    def _hold_stop_time(self, lease: Requested) -> None:
        """Lose the lease, and all else, earlier by its stop time; so prove anew, and more often."""
        self._proof.add_stop_time(lease._hold, lease._wanted.stop_time)
        self._measure()
        self.renew()
        self._client._keeper.reschedule()

    def _drop_stop_time(self, lease: Requested) -> None:
        """The lease is over. Safe for one that was never held."""
        self._proof.drop_stop_time(lease._hold)
        self._measure()

    def _forget(self, lease: Requested) -> None:
        """The request is in no queue any more."""
        self._leases.pop(lease._hold, None)
        if lease._wanted.stop_time:
            self._drop_stop_time(lease)

    def _tell(self, kind: EventKind, *facts: object) -> None:
        """Tell whoever listens; `facts` are the fields that this kind of event adds."""
        if self._listeners.streams:
            self._listeners.tell(kind, self.node, self.id, *facts)

    # What the engine tells (`SessionEvents`); on the loop, except `proven`

    def proven(self, at: float) -> None:
        """The store has proven that the session lived at `at`. From any thread."""
        connecting = self._contact == "connecting"
        if at > self._proof.at and (connecting or self._proven()):  # it does not revive
            self._proof.at = at
            self._measure()
            if self._listeners.streams and not connecting:
                self._client._soon(partial(self._tell, "Renewed", self.deadline))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """What was found in queues when the session was taken over."""
        self._recovered = {found.hold: found for found in requests}

    def granted(self, hold: int, order_id: int | None) -> None:
        """A waiting request is an owner now."""
        lease = self._leases.get(hold)
        if lease is not None:
            lease._grant(order_id)
        elif hold in self._recovered:
            self._recovered[hold] = replace(self._recovered[hold], granted=True)

    def removed(self, hold: int, why: Removal) -> None:
        """A request has left its queue by somebody else's doing."""
        lease = self._leases.get(hold)
        if lease is not None:
            lease._remove(why)
        self._recovered.pop(hold, None)

    def detached(self, cause: BaseException | None = None) -> None:
        """The contact is broken."""
        if self._contact == "attached" and self._ending.why is None:
            self._contact = "detached"
            self._client_contact.detached(self, cause)
            self._tell("SessionDetached")

    def attached(self) -> None:
        """The contact is back."""
        if self._contact == "detached" and self._ending.why is None:
            self._contact = "attached"
            self._client_contact.attached(self)
            self._tell("SessionAttached")
            self.renew()

    def ended(self, error: SessionExpired) -> None:
        """The session is over by the store's word."""
        self._ending.by_store(error)

    # What the keeper asks (`Kept`); from any thread

    @property
    def renew_interval(self) -> float:
        return self._proof.interval

    @property
    def renew_at(self) -> float:
        return self._proof.renew_at

    def renew(self) -> None:
        """Ask the store for proof."""
        self._proof.asked = self._now()
        self._engine.renew()

    def lapse(self) -> None:
        """The deadline has passed: end the session."""
        self._ending.by_clock()

    # The beginning

    def _start(self, engine: EngineSession) -> None:
        """The engine has attached the session."""
        self._engine = engine
        # No attachment numbers its requests as a former one did.
        self._last_hold = (engine.attach_number - 1) << 32
        self._contact = "attached"
        if self._ending.why is not None:
            self._ending.finish()
        else:
            self._tell("SessionAttached")
