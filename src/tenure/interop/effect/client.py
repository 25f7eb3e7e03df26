"""Permits on any of tenure's engines: a semaphore of the client's implicit session.

They are leases: renewed by the session, and released when it ends. Only the program that acquired
permits knows their holder, so another program cannot take them over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure.errors import LeaseLost, LeaseReleased, SemaphoreNotFound, TenureError
from tenure.interop.effect.backing import BackingError
from tenure.interop.endings import over

__all__ = ["ClientBacking"]


class ClientBacking:
    """Permits on the store of a client, which stays open. The session keeps them alive."""

    def __init__(self, client: Client) -> None:
        """Start without permits."""
        self._client = client
        self._leases: dict[tuple[str, str], Lease] = {}

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        """Acquire all permits at once, or none; a holder acquires once at a time."""
        del ttl
        semaphore = self._client.semaphore(key)
        with _explained("try_acquire", key):
            await semaphore.create(limit=limit, exist_ok=True)
            lease = await semaphore.try_acquire(permits, data=holder_id.encode())
            if lease is None:
                return False
            if self._leases.setdefault((key, holder_id), lease) is not lease:
                await lease.release()  # the holder has some already
                return False
        return True

    async def release(self, key: str, holder_id: str, permits: int) -> int:
        """Release a holder's permits; return how many were released."""
        lease = self._leases.pop((key, holder_id), None)
        if lease is None:
            return 0
        try:
            with _explained("release", key):
                await lease.release()
        except (LeaseLost, LeaseReleased):
            return 0
        return permits

    async def refresh(self, key: str, holder_id: str, ttl: float, limit: int, permits: int) -> bool:
        """Return whether the holder still has its permits; the session renews them."""
        del ttl, limit, permits
        return self.is_held(key, holder_id)

    def is_held(self, key: str, holder_id: str) -> bool:
        """Return whether the holder's lease is held, by the local clock."""
        lease = self._leases.get((key, holder_id))
        return lease is not None and lease.held

    async def wait_lost(self, key: str, holder_id: str) -> None:
        """Wait until the holder's lease is lost; return at once if it has none."""
        lease = self._leases.get((key, holder_id))
        if lease is not None:
            await lease.wait_lost()

    async def get_count(self, key: str, ttl: float) -> int:
        """Return the number of permits that are held; 0 if there is no semaphore."""
        del ttl
        try:
            with _explained("get_count", key):
                return (await self._client.semaphore(key).describe()).held
        except SemaphoreNotFound:
            return 0

    @asynccontextmanager
    async def on_permits_released(
        self, key: str, notify: Callable[[], None]
    ) -> AsyncIterator[None]:
        """During the block, call `notify` whenever permits may be free."""
        watching = asyncio.get_running_loop().create_task(
            self._watch(key, notify), name=f"tenure-permits-{key}"
        )
        try:
            yield
        finally:
            watching.cancel()
            await over(watching)
            if not watching.cancelled():
                watching.exception()  # waiters retry periodically, and get its error then

    async def _watch(self, key: str, notify: Callable[[], None]) -> None:
        async with self._client.semaphore(key).watch(data=False, owners=True) as states:
            async for _ in states:
                notify()


@contextmanager
def _explained(operation: str, key: str) -> Iterator[None]:
    try:
        yield
    except (LeaseLost, LeaseReleased, SemaphoreNotFound):
        raise
    except TenureError as error:
        raise BackingError(operation, error, name=key) from error
