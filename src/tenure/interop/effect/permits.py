"""Permits that are held for a block: refreshed meanwhile, lost perhaps, and given back.

Rules:

* Permits are refreshed from the moment in which they were acquired, by a task that ends with
  their block. When they are lost, when the backing fails for good or did not answer before they
  could have expired, the body of the block is cancelled, and the block raises `LockLost`. A backing
  that knows of a loss by itself is not asked now and then only.
* The giving back of a block goes on when its end is cancelled, and when the permits have expired
  meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenure._client.scope import Scope
from tenure.errors import LeaseLost, LeaseReleased
from tenure.interop.effect.backing import BackingError, LosingBacking
from tenure.interop.endings import PATIENCE, margin

if TYPE_CHECKING:
    from tenure.interop.effect.semaphore import DistributedSemaphore

__all__ = ["LockLost", "Permits", "in_time"]

TICK = 1.0
"""Seconds after which it is noticed, at the latest, that the machine was suspended for too long."""


class LockLost(LeaseLost):
    """Permits were lost while their block believed to hold them."""


class Permits:
    """Permits that are held for a block.

    Attributes:
        count: how many.
        identifier: who holds them: whoever is given it can take them over.
        loss: how they were lost.
        given_up: nobody waits any more until they are acquired.
    """

    def __init__(self, semaphore: DistributedSemaphore, count: int, identifier: str) -> None:
        self.count = count
        self.identifier = identifier
        self.loss: LockLost | None = None
        self._semaphore = semaphore
        self._until = float("-inf")
        self._scope = Scope(self)
        self._keeping: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.given_up = asyncio.Event()

    def __repr__(self) -> str:
        held = "held" if self.held else "not held"
        return f"<{self.count} permits of {self._semaphore.key!r}, {held} by {self.identifier!r}>"

    @property
    def held(self) -> bool:
        """Whether they are held, and cannot have expired yet."""
        now, backing = self._semaphore._clock.now(), self._semaphore._backing
        return (
            self._keeping is not None
            and self.loss is None
            and now < self._until
            and (
                not isinstance(backing, LosingBacking)
                or backing.is_held(self._semaphore.key, self.identifier)
            )
        )

    def check(self) -> None:
        """Raise `LockLost` unless they are held; for loops, and for threads."""
        if self.loss is not None:
            raise self.loss
        if not self.held:
            raise LockLost(f"permits of {self._semaphore.key!r} are not held any more")

    async def wait_lost(self) -> LockLost:
        """Wait until they are lost, and return how.

        Raises:
            LeaseReleased: their block has ended instead.
        """
        await self._over.wait()
        if self.loss is None:
            raise LeaseReleased(f"permits of {self._semaphore.key!r} were given back")
        return self.loss

    def live_until(self, sent: float) -> None:
        """They were acquired or refreshed by what was sent then."""
        ttl = self._semaphore.ttl
        self._until = sent + ttl - margin(ttl)

    async def __aenter__(self) -> Permits:
        self._scope.enter()
        self._keeping = asyncio.get_running_loop().create_task(
            self._keep(), name=f"tenure-permits-{self._semaphore.key}"
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ours = self._scope.exit(error)
        keeping, self._keeping = self._keeping, None
        assert keeping is not None
        self._over.set()
        letting_go = self._semaphore._endings.begin(self._let_go(keeping))
        left = self._until - self._semaphore._clock.now()
        await asyncio.wait([letting_go], timeout=max(left, PATIENCE))
        if letting_go.done():
            letting_go.result()
        if self.loss is not None:
            if error is None or ours:
                raise self.loss
            if error is not self.loss:
                error.add_note(f"meanwhile: {self.loss}")

    async def _let_go(self, keeping: asyncio.Task[None]) -> None:
        keeping.cancel()
        await asyncio.wait([keeping])
        with contextlib.suppress(BackingError):  # their time to live ends them
            await self._semaphore._release(self)

    async def _keep(self) -> None:
        key = self._semaphore.key
        try:
            await self._keep_once()
            while self._keeping is not None:
                await self._pause()
                await self._keep_once()
        except LockLost as loss:
            self.loss = loss
        except Exception as failure:
            self.loss = LockLost(f"permits of {key!r} could not be refreshed: {failure}", name=key)
            self.loss.__cause__ = failure
        self._over.set()
        self._scope.trigger()

    async def _pause(self) -> None:
        """Wait until the next refresh is due, or the permits may be lost."""
        semaphore, backing = self._semaphore, self._semaphore._backing
        left = semaphore.refresh_interval
        if isinstance(backing, LosingBacking):
            await in_time(backing.wait_lost(semaphore.key, self.identifier), left)
            return
        while left > 0 and semaphore._clock.now() < self._until:
            await asyncio.sleep(min(left, TICK))
            left -= TICK

    async def _keep_once(self) -> None:
        semaphore = self._semaphore
        sent = semaphore._clock.now()
        unconfirmed = LockLost(
            f"permits of {semaphore.key!r} were not confirmed before they could expire",
            name=semaphore.key,
        )
        if sent >= self._until:
            raise unconfirmed
        try:
            async with asyncio.timeout(self._until - sent):
                kept = await semaphore._refresh(self)
        except TimeoutError:
            raise unconfirmed from None
        if not kept:
            raise LockLost(
                f"permits of {semaphore.key!r} have expired, or somebody has removed them",
                name=semaphore.key,
            )
        self.live_until(sent)


async def in_time(what: Coroutine[Any, Any, object], time: float) -> bool:
    """Whether something has happened within so many seconds."""
    try:
        async with asyncio.timeout(time):
            await what
    except TimeoutError:
        return False
    return True
