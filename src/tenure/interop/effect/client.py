"""Permits on any of tenure's engines: a semaphore of the client's implicit session.

They are leases: kept alive by the session, given back when it ends. A holder is known to the
program that acquired, so that permits cannot be resumed in another one.
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
    """Permits on the store of a client, which stays open. Times to live are its session's own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._leases: dict[tuple[str, str], Lease] = {}

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        del ttl
        semaphore = self._client.semaphore(key)
        with _explained("try_acquire", key):
            await semaphore.create(limit=limit, exist_ok=True)
            lease = await semaphore.try_acquire(permits, data=holder_id.encode())
            if lease is None:
                return False
            if self._leases.setdefault((key, holder_id), lease) is not lease:
                await lease.release()  # that holder has some already
                return False
        return True

    async def release(self, key: str, holder_id: str, permits: int) -> int:
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
        del ttl, limit, permits
        return self.is_held(key, holder_id)

    def is_held(self, key: str, holder_id: str) -> bool:
        lease = self._leases.get((key, holder_id))
        return lease is not None and lease.held

    async def wait_lost(self, key: str, holder_id: str) -> None:
        lease = self._leases.get((key, holder_id))
        if lease is not None:
            await lease.wait_lost()

    async def get_count(self, key: str, ttl: float) -> int:
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
        watching = asyncio.get_running_loop().create_task(
            self._watch(key, notify), name=f"tenure-permits-{key}"
        )
        try:
            yield
        finally:
            watching.cancel()
            await over(watching)
            if not watching.cancelled():
                watching.exception()  # those who wait ask now and then, and hear of it so

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
