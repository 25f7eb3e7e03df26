"""A lease: one request, from the moment it is asked for until it is released or lost.

A program gets to see it when it is granted. States and what moves between them::

    WAITING --granted--> HELD --release--> RELEASED
       |                  `--lost--------> LOST
       `--withdrawn, timed out, deleted, evicted, session over--> GONE

Rules:

* The session owns the lease's state, on its loop; the deadline is the session's. A lease whose
  deadline has passed is not held, whatever its state says: every question reads the clock.
* Loss is final. Its error is kept in `loss`; what is raised is a copy, so that tracebacks of
  several tasks do not mix.
* A release is told to the store by the session, so that it happens even when the task that
  asked for it is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from tenure.engines.contract import Removal
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.events import Acquired, Lost, Released
from tenure.scope import Scope

if TYPE_CHECKING:
    from tenure.request import Wanted
    from tenure.session import Session

__all__ = ["LOSS_EXIT_STATUS", "Lease", "OnLoss", "State", "lost_error"]

OnLoss = Literal["cancel", "exit"] | Callable[[LeaseLost], object]
"""What happens when a lease is lost: ``"cancel"`` cancels the task that entered its block;
``"exit"`` ends the process at once; a callable is called, perhaps from another thread, and the
task is cancelled too."""

LOSS_EXIT_STATUS = 79
"""The exit status of a process that ``on_loss="exit"`` ended."""


class State(Enum):
    """Where a request is in its life; the module's text has the transitions."""

    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"
    GONE = "gone"


WAITING, HELD, RELEASED, LOST, GONE = State  # for the hot path: a global is read, no attribute


class Lease:
    """A granted request: what a program holds.

    ``async with lease:`` enters it: from then on the body is cancelled when the lease is lost,
    before it can have expired, and the block raises `LeaseLost`. A lease that was only awaited
    cancels nobody; ask `held` or `check`, and `release` it.

    A lease is always true; it is `held` that tells.

    Attributes:
        name: the name of the mutex, semaphore or election.
        session: the session that holds it.
    """

    __slots__ = (
        "_asked_at",
        "_count",
        "_granted_at",
        "_hold",
        "_loss",
        "_lost_waiters",
        "_on_loss",
        "_order_id",
        "_removal",
        "_scope",
        "_settled",
        "_state",
        "name",
        "session",
    )

    def __init__(self, session: Session, hold: int, wanted: Wanted, asked_at: float) -> None:
        self.session = session
        self.name = wanted.name
        self._hold = hold
        self._count = wanted.count
        self._on_loss = wanted.on_loss or session._on_loss
        self._asked_at = asked_at
        self._granted_at = 0.0
        self._order_id: int | None = None
        self._state = WAITING
        self._scope: Scope | None = None
        self._loss: LeaseLost | None = None
        self._removal: Removal | None = None
        self._settled: asyncio.Event | None = None
        self._lost_waiters: asyncio.Event | None = None

    def __repr__(self) -> str:
        return (
            f"<Lease {self.name!r} on {self.session.node} {self._state.value}"
            f"{'' if self._order_id is None else f' fencing_token={self._order_id}'}>"
        )

    # What a program asks

    @property
    def node(self) -> str:
        """The path of the node."""
        return self.session.node

    @property
    def count(self) -> int:
        """How many of the semaphore's tokens are held."""
        return self._count

    @property
    def fencing_token(self) -> int:
        """Rises with every grant in the store: pass it to what the lease protects.

        Raises:
            Unsupported: the store has no order to make one of.
        """
        if self._order_id is None:
            raise Unsupported(
                f"this engine gives no fencing tokens (for {self.name!r} on {self.node})",
                node=self.node,
                name=self.name,
            )
        return self._order_id

    @property
    def deadline(self) -> float:
        """Until when the lease is proven, on the client's clock (`Client.clock`), in seconds."""
        return self.session.deadline

    @property
    def held(self) -> bool:
        """Whether the lease is held. Reads the clock at every call; safe from any thread."""
        return self._state is HELD and self.session._proven()

    @property
    def loss(self) -> LeaseLost | None:
        """How the lease was lost, or ``None``. Safe from any thread."""
        if self._state is HELD:
            self.session._proven()
        return self._loss

    def check(self) -> None:
        """Raise unless the lease is held. For loops and threads.

        Raises:
            LeaseLost: it was lost.
            LeaseReleased: it was released.
        """
        if self.held:
            return
        if self._loss is not None:
            raise self._copy_of_loss()
        raise LeaseReleased(
            f"the lease of {self.name!r} on {self.node} has been released",
            node=self.node,
            name=self.name,
        )

    async def wait_lost(self) -> LeaseLost:
        """Wait until the lease is lost, and return how.

        Raises:
            LeaseReleased: it was released instead.
        """
        while self.held:
            if self._lost_waiters is None:
                self._lost_waiters = asyncio.Event()
            await self._lost_waiters.wait()
        if self._loss is None:
            self.check()
        assert self._loss is not None
        return self._loss

    # What a program does

    async def release(self) -> None:
        """Give the lease back. Safe to call twice; it takes effect even when cancelled.

        Raises:
            LeaseLost: it had been lost before.
        """
        if self.loss is not None:
            raise self._copy_of_loss()
        await self._give_back()

    async def update(self, *, count: int | None = None, data: bytes | None = None) -> None:
        """Shrink the count, or replace the request's data, keeping the place and the token.

        Raises:
            InvalidArgument: the count would grow, or is not positive.
            LeaseLost, LeaseReleased: it is not held any more.
        """
        self.check()
        if count is None and data is None:
            raise InvalidArgument("update a lease's count, its data, or both", name=self.name)
        answer = self.session._engine.alter(self._hold, count=count, data=data)
        if answer is not None:
            await answer
        if count is not None:
            self._count = count

    async def __aenter__(self) -> Lease:
        if self._scope is not None:
            raise Misuse(
                f"the lease of {self.name!r} has been entered already; a lease is entered once",
                node=self.node,
                name=self.name,
            )
        self.check()
        self._scope = scope = Scope(self)
        scope.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        ours = self._scope.exit(error)
        if self._state is HELD and self.session._proven():
            await self._give_back_after(error)
        elif self._loss is not None:
            if error is None or ours:
                raise self._copy_of_loss()
            if not isinstance(error, asyncio.CancelledError | LeaseLost | SessionExpired):
                error.add_note(f"meanwhile: {self._loss}")

    async def _give_back_after(self, error: BaseException | None) -> None:
        """Release; an error in that never takes the place of the body's."""
        try:
            await self._give_back()
        except TenureError as failure:
            if error is None:
                raise
            error.add_note(f"and the release of {self.name!r} on {self.node} failed: {failure}")

    async def _give_back(self) -> None:
        """Leave the queue, whether owning or waiting. Does nothing when out of it already."""
        session = self.session
        state = self._state
        if state is HELD:
            self._state = RELEASED
            if session._client._streams:
                held_for = session._clock.now() - self._granted_at
                session._tell(
                    Released(session.node, session.id, self.name, self._order_id, held_for)
                )
            if self._lost_waiters is not None:
                self._lost_waiters.set()
        elif state is WAITING:
            self._state = GONE
        else:
            return
        answer = session._withdraw(self)
        if answer is not None:
            await asyncio.shield(answer)

    # What the session tells it, on its loop

    def _grant(self, order_id: int | None) -> None:
        if order_id is not None:
            self._order_id = order_id
        if self._state is not WAITING:
            return
        self._state = HELD
        session = self.session
        self._granted_at = now = session._clock.now()
        if session._client._streams:
            session._tell(
                Acquired(session.node, session.id, self.name, order_id, now - self._asked_at)
            )
        self._settle()

    def _remove(self, why: Removal) -> None:
        """The request left its queue by somebody else's doing."""
        if self._state is WAITING:
            self._removal = why
            self._state = GONE
            self._settle()
        elif self._state is HELD:
            self._lose(lost_error(self, why.value, None))
            self._announce_loss(cancel=True)

    def _session_over(self) -> None:
        """The session ended while this was waiting."""
        if self._state is WAITING:
            self._state = GONE
            self._settle()

    def _settle(self) -> None:
        if self._settled is not None:
            self._settled.set()

    async def _wait_settled(self) -> None:
        """Wait until the request is not waiting any more. May be cancelled at will."""
        while self._state is WAITING:
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()

    def _refusal(self) -> TenureError:
        """Why a request that is not waiting any more was not granted."""
        where = f"{self.name!r} on {self.node}"
        if self._removal is Removal.DELETED:
            return SemaphoreNotFound(
                f"{where} was deleted while this request waited",
                node=self.node,
                name=self.name,
            )
        if self._removal is not None:
            return lost_error(self, f"its request was {self._removal.value} while waiting", None)
        if self.session._ended is not None:
            return self.session._end_error()
        return LeaseReleased(
            f"the request for {where} was withdrawn", node=self.node, name=self.name
        )

    # Loss

    def _lose(self, loss: LeaseLost) -> None:
        """Keep why it was lost, and carry out the policy. From any thread; once."""
        if self._state is not HELD:
            return
        self._loss = loss
        self._state = LOST
        if not isinstance(loss.__cause__, SessionClosed):
            self.session._carry_out(self._on_loss, loss)

    def _announce_loss(self, *, cancel: bool) -> None:
        """Cancel the body and wake who waits for the loss. On the loop."""
        if self._loss is None:
            return
        session = self.session
        session._tell(
            Lost(session.node, session.id, self.name, self._order_id, str(self._loss))
        )
        if self._lost_waiters is not None:
            self._lost_waiters.set()
        if self._scope is not None and cancel:
            self._scope.trigger()

    def _copy_of_loss(self) -> LeaseLost:
        loss = self._loss
        assert loss is not None
        copy = LeaseLost(
            str(loss), node=loss.node, name=loss.name, fencing_token=loss.fencing_token
        )
        copy.__cause__ = loss.__cause__
        return copy


def lost_error(
    lease: Lease, reason: str, cause: SessionExpired | SessionClosed | None
) -> LeaseLost:
    """The loss of a lease, with its reason and, when it is the session's end, its cause."""
    error = LeaseLost(
        f"the lease of {lease.name!r} on {lease.node} is lost: {reason}; "
        "stop what it protects, somebody else may hold it already",
        node=lease.node,
        name=lease.name,
        fencing_token=lease._order_id,
    )
    error.__cause__ = cause
    return error
