"""Connection of threads to Redis, used by the loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from weakref import WeakSet

from tenure.errors import SessionClosed
from tenure.interop import exclusive_lock as async_lock
from tenure.interop.effect import semaphore as async_semaphore
from tenure.interop.redis_py import Redis

__all__ = ["Program"]


class Program:
    """Connection used by the loop's thread, with its locks and semaphores.

    It refers weakly to locks and semaphores, held ones included.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        """Prepare the connection; redis-py connects at the first command."""
        self.redis = Redis.from_url(url, **options)
        self.locks = WeakSet[async_lock.ExclusiveLock]()
        self.semaphores = WeakSet[async_semaphore.DistributedSemaphore]()
        self._holding: set[asyncio.Task[None]] = set()
        self.closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server, without secrets."""
        options = self.redis.connection_pool.connection_kwargs
        if "path" in options:
            return f"unix://{options['path']}"
        return f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}"

    def check_open(self) -> None:
        """Raise `SessionClosed` unless the connection is open."""
        if self.closing is not None:
            raise SessionClosed("the connection to Redis has been closed")

    def hold(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that holds permits, at most until the connection is closed."""
        task = asyncio.get_running_loop().create_task(work, name="tenure-holding-permits")
        self._holding.add(task)
        task.add_done_callback(self._held)
        return task

    def _held(self, task: asyncio.Task[None]) -> None:
        self._holding.discard(task)
        if not task.cancelled():
            task.exception()  # raised at the end of the block that holds

    async def aclose(self) -> None:
        """Release everything held, and close the connection."""
        if self.closing is None:
            self.closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.wait([self.closing])
        self.closing.result()

    async def _close(self) -> None:
        try:
            for task in self._holding:
                task.cancel()
            if self._holding:
                await asyncio.wait(self._holding)
            releases = [lock.release() for lock in self.locks]
            failures = await asyncio.gather(*releases, return_exceptions=True)
            for semaphore in list(self.semaphores):
                await semaphore.aclose()
        finally:
            await self.redis.aclose()
        for failure in failures:
            if failure is not None:
                raise failure
