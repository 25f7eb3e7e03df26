"""Interface to the stores of permits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from tenure.errors import EngineError

__all__ = ["Backing", "BackingError", "LosingBacking", "PushBacking"]


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
