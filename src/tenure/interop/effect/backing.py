"""Where permits are kept: what a semaphore asks of a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from tenure.errors import EngineError

__all__ = ["Backing", "BackingError", "LosingBacking", "PushBacking"]


class BackingError(EngineError):
    """The store of the permits failed; `operation` says in what."""

    def __init__(self, operation: str, cause: object, *, name: str | None = None) -> None:
        super().__init__(f"the backing of {name!r} failed in {operation}: {cause}", name=name)
        self.operation = operation


class Backing(Protocol):
    """A store of permits. Times to live are in seconds; all of it raises `BackingError`."""

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        """Take all of the permits or none; whether it did."""
        ...

    async def release(self, key: str, holder_id: str, permits: int) -> int:
        """Give a holder's permits back; how many it had."""
        ...

    async def refresh(self, key: str, holder_id: str, ttl: float, limit: int, permits: int) -> bool:
        """Have a holder's permits live on from now; false when it has lost them."""
        ...

    async def get_count(self, key: str, ttl: float) -> int:
        """How many permits are held."""
        ...


@runtime_checkable
class PushBacking(Backing, Protocol):
    """A store that says when permits may have been released."""

    def on_permits_released(
        self, key: str, notify: Callable[[], None]
    ) -> AbstractAsyncContextManager[None]:
        """Have `notify` called, for the block, whenever somebody may be lucky.

        A connection that breaks is made again; whatever was missed meanwhile counts as a release.
        """
        ...


@runtime_checkable
class LosingBacking(Backing, Protocol):
    """A store that knows by itself when permits are lost, between two refreshes too."""

    def is_held(self, key: str, holder_id: str) -> bool:
        """Whether a holder has not lost its permits; asked from any thread."""
        ...

    async def wait_lost(self, key: str, holder_id: str) -> object:
        """Return when a holder has lost its permits."""
        ...
