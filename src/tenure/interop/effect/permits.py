"""Permits that are held for a block: refreshed, possibly lost, and released.

Rules:

* A task refreshes permits from their acquisition to the end of their block. The body of the block
  is cancelled, and the block raises `LockLost`, when the permits are lost, when the backing fails
  permanently, or when it does not answer before they could have expired. A backing that reports
  losses is awaited in addition.
* The release at the end of a block continues when it is cancelled, and when the permits have
  expired meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from tenure._client.scope import Scope
from tenure.clock import Clock
from tenure.errors import EngineError, LeaseLost, LeaseReleased
from tenure.interop.endings import UNDO_TIMEOUT, Endings, margin

__all__ = [
    "Backing",
    "BackingError",
    "LockLost",
    "LosingBacking",
    "Permits",
    "PermitsOrigin",
    "PushBacking",
    "in_time",
]


class BackingError(EngineError):
    """Failure of the store of the permits; `operation` names the failed operation."""

    def __init__(self, operation: str, cause: object, *, name: str | None = None) -> None:
        """Describe the failed operation and its cause, for the semaphore `name`."""
        super().__init__(f"the backing of {name!r} failed in {operation}: {cause}", name=name)
        self.operation = operation


class Backing(Protocol):
    """A store of permits. Times to live are in seconds; every method raises `BackingError`."""

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        """Acquire all of the permits or none; return whether they were acquired."""
        ...

    async def release(self, key: str, holder_id: str, permits: int) -> int:
        """Release a holder's permits; return how many it had."""
        ...

    async def refresh(self, key: str, holder_id: str, ttl: float, limit: int, permits: int) -> bool:
        """Restart the time to live of a holder's permits; return false if they are lost."""
        ...

    async def get_count(self, key: str, ttl: float) -> int:
        """Return the number of permits held."""
        ...


@runtime_checkable
class PushBacking(Backing, Protocol):
    """Store that notifies when permits may have been released."""

    def on_permits_released(
        self, key: str, notify: Callable[[], None]
    ) -> AbstractAsyncContextManager[None]:
        """During the block, call `notify` whenever permits may have been released.

        A broken connection is re-established, and then `notify` is called once for missed releases.
        """
        ...


@runtime_checkable
class LosingBacking(Backing, Protocol):
    """Store that detects lost permits itself, also between refreshes."""

    def is_held(self, key: str, holder_id: str) -> bool:
        """Return whether a holder still has its permits. Safe from any thread."""
        ...

    async def wait_lost(self, key: str, holder_id: str) -> object:
        """Return when a holder has lost its permits."""
        ...


TICK = 1.0
"""Longest delay in seconds until a suspension of the machine is detected."""


class LockLost(LeaseLost):
    """Permits were lost inside their block."""


@dataclass(frozen=True, slots=True)
class PermitsOrigin:
    """The semaphore, as seen by permits acquired from it."""

    key: str
    ttl: float
    refresh_interval: float
    backing: Backing
    clock: Clock
    endings: Endings
    refresh: Callable[[Permits], Awaitable[bool]]
    release: Callable[[Permits], Coroutine[Any, Any, None]]


class Permits:
    """Permits that are held for a block.

    Attributes:
        count: number of permits.
        identifier: the holder; a program that knows it can take them over.
        loss: the error of their loss.
        abandoned: set when the program no longer waits for them.
    """

    def __init__(self, origin: PermitsOrigin, count: int, identifier: str) -> None:
        """Start as not held."""
        self.count = count
        self.identifier = identifier
        self.loss: LockLost | None = None
        self._origin = origin
        self._until = float("-inf")
        self._scope = Scope(self)
        self._keeping: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self.abandoned = asyncio.Event()

    def __repr__(self) -> str:
        """Return the count, the key and the holder."""
        held = "held" if self.held else "not held"
        return f"<{self.count} permits of {self._origin.key!r}, {held} by {self.identifier!r}>"

    @property
    def held(self) -> bool:
        """True while they are held and cannot have expired yet."""
        now, backing = self._origin.clock.now(), self._origin.backing
        return (
            self._keeping is not None
            and self.loss is None
            and now < self._until
            and (
                not isinstance(backing, LosingBacking)
                or backing.is_held(self._origin.key, self.identifier)
            )
        )

    def check(self) -> None:
        """Raise `LockLost` unless they are held. Useful in loops and threads."""
        if self.loss is not None:
            raise self.loss
        if not self.held:
            raise LockLost(f"permits of {self._origin.key!r} are not held any more")

    async def wait_lost(self) -> LockLost:
        """Wait until they are lost, and return the loss.

        Raises:
            LeaseReleased: their block has ended normally.
        """
        await self._over.wait()
        if self.loss is None:
            raise LeaseReleased(f"permits of {self._origin.key!r} were released")
        return self.loss

    def live_until(self, sent: float) -> None:
        """Record that they were acquired or refreshed by a command sent at that time."""
        ttl = self._origin.ttl
        self._until = sent + ttl - margin(ttl)

    async def __aenter__(self) -> Permits:
        """Start refreshing the permits."""
        self._scope.enter()
        self._keeping = asyncio.get_running_loop().create_task(
            self._keep(), name=f"tenure-permits-{self._origin.key}"
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop refreshing and release the permits, or raise the loss."""
        cancelled = self._scope.exit(error)
        keeping, self._keeping = self._keeping, None
        assert keeping is not None
        self._over.set()
        releasing = self._origin.endings.begin(self._end(keeping))
        left = self._until - self._origin.clock.now()
        await asyncio.wait([releasing], timeout=max(left, UNDO_TIMEOUT))
        if releasing.done():
            releasing.result()
        if self.loss is not None:
            if error is None or cancelled:
                raise self.loss
            if error is not self.loss:
                error.add_note(f"meanwhile: {self.loss}")

    async def _end(self, keeping: asyncio.Task[None]) -> None:
        keeping.cancel()
        await asyncio.wait([keeping])
        with contextlib.suppress(BackingError):  # they will expire
            await self._origin.release(self)

    async def _keep(self) -> None:
        key = self._origin.key
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
        origin, backing = self._origin, self._origin.backing
        left = origin.refresh_interval
        if isinstance(backing, LosingBacking):
            await in_time(backing.wait_lost(origin.key, self.identifier), left)
            return
        while left > 0 and origin.clock.now() < self._until:
            await asyncio.sleep(min(left, TICK))
            left -= TICK

    async def _keep_once(self) -> None:
        origin = self._origin
        sent = origin.clock.now()
        unconfirmed = LockLost(
            f"permits of {origin.key!r} were not confirmed before they could expire",
            name=origin.key,
        )
        if sent >= self._until:
            raise unconfirmed
        try:
            async with asyncio.timeout(self._until - sent):
                kept = await origin.refresh(self)
        except TimeoutError:
            raise unconfirmed from None
        if not kept:
            raise LockLost(
                f"permits of {origin.key!r} have expired or were removed",
                name=origin.key,
            )
        self.live_until(sent)


async def in_time(what: Coroutine[Any, Any, object], time: float) -> bool:
    """Wait for something; return false on timeout."""
    try:
        async with asyncio.timeout(time):
            await what
    except TimeoutError:
        return False
    return True
