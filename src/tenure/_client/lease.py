"""A lease: a request that was granted, as the program that holds it sees it.

What becomes of the request, up to the grant and after it, is in `tenure._client.requested`. Rules:

* The deadline is the session's. A lease whose deadline has passed is not held, whatever its state
  says: every question reads the clock.
* A lease is entered once, by whichever task; only that task is cancelled when it is lost.
* Leaving the block gives the lease back. No failure of that hides the body's error, and a body
  that was cancelled does not wait for the store.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType

from tenure._client.requested import HELD, Requested
from tenure._client.scope import Scope, note_failure
from tenure.engines.contract import when_answered
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SessionExpired,
    Unsupported,
)

__all__ = ["Lease"]


class Lease(Requested):
    """A granted request: what a program holds.

    ``async with lease:`` enters it: from then on the body is cancelled when the lease is lost,
    before it can have expired, and the block raises `LeaseLost`. A lease that was only awaited
    cancels nobody; ask `held` or `check`, and `release` it.

    A lease is always true; it is `held` that tells.

    Attributes:
        session: the session that holds it.
        name: the name of the mutex, semaphore or election.
    """

    __slots__ = ()

    # What a program asks

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
                f"this engine gives no fencing tokens (for {self.name!r} on {self.node}); "
                "memory:// and sqlite:// do",
                node=self.node,
                name=self.name,
            )
        return self._order_id

    @property
    def store_token(self) -> str:
        """What the store itself knows this grant by, for its other clients: a dflockd token.

        Empty when the lease is over. With it they can renew and release behind this program's back,
        so keep it as a secret.

        Raises:
            Unsupported: the store has no such token.
        """
        token = self.session._engine.token_of(self._hold)
        if token is None:
            raise Unsupported(
                f"this engine's store has no tokens of its own (for {self.name!r} on {self.node}); "
                "dflockd:// does",
                node=self.node,
                name=self.name,
            )
        return token

    async def slot(self) -> int:
        """Return a number below the semaphore's limit that no other holder has meanwhile.

        The first call takes the lowest that is free; the lease keeps it until it ends. ::

            async with session.semaphore("gpu").acquire() as lease:
                await train(device=await lease.slot())

        Raises:
            InvalidArgument: the count is not 1 (use `slots`); or the semaphore is ephemeral, or
                its limit is above 1,024.
            AcquireTimeout, EngineUnavailable: the store cannot be reached, or does not answer.
            LeaseLost, LeaseReleased: it is not held any more.
        """
        if self._count != 1:
            raise InvalidArgument(
                f"the lease of {self.name!r} on {self.node} has {self._count} slots: use slots()",
                node=self.node,
                name=self.name,
            )
        (slot,) = await self.slots()
        return slot

    async def slots(self) -> tuple[int, ...]:
        """Return as many numbers as the lease's count, ascending; see `slot`.

        Raises:
            InvalidArgument: the semaphore is ephemeral, or its limit is above 1,024.
            AcquireTimeout, EngineUnavailable: the store cannot be reached, or does not answer.
            LeaseLost, LeaseReleased: it is not held any more.
        """
        if self._slots is None:
            from tenure._client.slots import Slots  # a slot is a lease, too

            self._slots = Slots(self)
        return await self._slots.take()

    @property
    def deadline(self) -> float:
        """Until when the lease is proven, on the client's clock (`Client.clock`), in seconds."""
        return self.session.deadline

    @property
    def held(self) -> bool:
        """Whether the lease is held. Reads the clock at every call; safe from any thread."""
        if self._state is HELD:
            if self.session._proven():
                return True
            self.session._ending.lose(self)  # another thread may not have come to it yet
        return False

    @property
    def loss(self) -> LeaseLost | None:
        """How the lease was lost, or ``None``. Reads the clock; safe from any thread."""
        return None if self.held else self._loss

    def check(self) -> None:
        """Raise unless the lease is held. For loops and threads.

        Raises:
            LeaseLost: it was lost.
            LeaseReleased: it was released.
        """
        if not self.held:
            raise self._why_not_held()

    async def wait_lost(self) -> LeaseLost:
        """Wait until the lease is lost, and return how.

        Raises:
            LeaseReleased: it was released instead.
        """
        while self.held:
            self.session._check_loop()
            await self._change()
        if self._loss is None:
            raise self._why_not_held()
        return self._loss

    # What a program does

    async def release(self) -> None:
        """Give the lease back. Safe to call twice; it takes effect even when cancelled.

        Raises:
            LeaseLost: it had been lost before, also if that is news to this program: the store's
                queue does not contain the request any more. `on_loss` is not carried out then.
        """
        if self.loss is not None:
            raise self._why_not_held()
        await self._give_back()

    async def update(self, data: bytes | None = None, *, count: int | None = None) -> None:
        """Shrink the count, or replace the request's data, keeping the place and the token.

        Raises:
            InvalidArgument: the count would grow, or is not positive.
            LeaseLost, LeaseReleased: it is not held any more.
        """
        self.check()
        if count is None and data is None:
            raise InvalidArgument("update a lease's count, its data, or both", name=self.name)
        session = self.session
        try:
            answer = session._engine.alter(self._hold, count=count, data=data)
            if answer is None:
                self._altered(count, None)
            else:
                when_answered(answer, partial(self._altered, count))
                await session._ending.race(asyncio.shield(answer))
        except SessionExpired as error:
            raise session._ending.by_store(error) from None
        except LeaseReleased:
            # The store does not know it, though the program has not released it (unless just now).
            self._taken("its request was not in the store's queue any more")
            raise self._why_not_held() from None

    def _altered(self, count: int | None, answer: asyncio.Future[None] | None) -> None:
        """The store has answered, whether or not somebody still waits for that."""
        failed = answer is not None and (answer.cancelled() or answer.exception() is not None)
        if count is not None and not failed:
            self._count = count
            if self._slots is not None:
                self._slots.shrink(count)

    async def __aenter__(self) -> Lease:
        self._check_enterable()
        self.session._check_loop()
        self._enter()
        return self

    def _check_enterable(self) -> None:
        held = self.held
        if self._scope is not None:
            raise Misuse(
                f"the lease of {self.name!r} has been entered already; a lease is entered once",
                node=self.node,
                name=self.name,
            )
        if not held:
            raise self._why_not_held()

    def _enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Enter, in that task; in the session's current one if it is not said."""
        self._scope = scope = Scope(self)
        scope.enter(task or asyncio.current_task(self.session._loop))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._scope is None:
            raise Misuse(
                f"the lease of {self.name!r} is left without having been entered",
                node=self.node,
                name=self.name,
            )
        ours = self._scope.exit(error)
        answer = self._leave(error)
        if answer is not None:
            await self._answered_by_store(answer)
            self._see_out(answer, error)
        if self._loss is not None:
            if error is None or ours:
                raise self._why_not_held()
            self._note_loss(error)

    def _note_loss(self, error: BaseException) -> None:
        """The body's own error stays; unless it says so itself, the loss is noted on it."""
        if not isinstance(error, asyncio.CancelledError | LeaseLost | SessionExpired):
            error.add_note(f"meanwhile: {self._loss}")

    def _leave(self, error: BaseException | None) -> asyncio.Future[bool] | None:
        """Begin to leave a block, which gives back unless it is lost; returns what to wait for.

        No failure hides the body's error.
        """
        if isinstance(error, GeneratorExit):
            self.session._client._soon(self._give_up)  # in whatever thread this is
            return None
        try:
            if self._state is not HELD or self.held:
                answer = self._give_up()
                if not isinstance(error, asyncio.CancelledError):
                    return answer  # who cancels does not wait for the store
        except Exception as failure:
            self._note(error, failure)
        return None

    def _see_out(self, answer: asyncio.Future[bool], error: BaseException | None) -> None:
        """It has left the queue, or could not; or the session's end has released everything."""
        if self.session._ending.why is None:
            failure = answer.exception()
            if failure is not None:
                assert isinstance(failure, Exception)
                self._note(error, failure)

    def _note(self, error: BaseException | None, failure: Exception) -> None:
        note_failure(error, failure, f"the release of {self.name!r} on {self.node}")
