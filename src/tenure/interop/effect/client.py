"""Permits on any of tenure's engines: a semaphore of the client's implicit session.

They are leases: renewed by the session, and released when it ends. Only the program that acquired
permits knows their holder, so another program cannot take them over.

Permits in a sorted set of Redis, as ``effect-distributed-lock`` stores them.

Permit i of a holder is the member ``<holder id>_<i>``. Its score is the time in milliseconds of its
acquisition or refresh, by the clock of its program. The next caller removes permits whose score is
older than its time to live.

Scores are whole milliseconds, as in the Node.js library. redis-py may send a command again when its
answer was lost. A repeated acquisition finds all its permits with its own score, and succeeds;
otherwise the holder's own permits would count against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure.clock import Clock, SystemClock
from tenure.durations import Duration, seconds
from tenure.errors import LeaseLost, LeaseReleased, SemaphoreNotFound, TenureError
from tenure.interop.effect.permits import BackingError
from tenure.interop.endings import over
from tenure.interop.redis_py import FAILURES, Redis, check_client

__all__ = ["ClientBacking", "RedisBacking"]


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


# KEYS[1]; limit, permits, holder id, time to live and now in milliseconds.
_PURGE = "redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', tonumber(ARGV[5]) - tonumber(ARGV[4]))\n"
_SCORE = """
for i = 0, tonumber(ARGV[2]) - 1 do
  redis.call('ZADD', KEYS[1], ARGV[5], ARGV[3] .. '_' .. i)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""
_ACQUIRE = (
    _PURGE
    + "local sent = true\n"
    + "for i = 0, tonumber(ARGV[2]) - 1 do\n"
    + "  local score = redis.call('ZSCORE', KEYS[1], ARGV[3] .. '_' .. i)\n"
    + "  sent = sent and score and tonumber(score) == tonumber(ARGV[5])\n"
    + "end\n"
    + "if sent then return 1 end\n"
    + "if redis.call('ZCARD', KEYS[1]) + tonumber(ARGV[2]) > tonumber(ARGV[1]) then return 0 end"
    + _SCORE
)
_REFRESH = (
    _PURGE + "if not redis.call('ZSCORE', KEYS[1], ARGV[3] .. '_0') then return 0 end" + _SCORE
)

_COUNT = _PURGE + "return redis.call('ZCARD', KEYS[1])"

# KEYS[1], the channel; permits, holder id, whether to publish.
_RELEASE = """
local released = 0
for i = 0, tonumber(ARGV[1]) - 1 do
  released = released + redis.call('ZREM', KEYS[1], ARGV[2] .. '_' .. i)
end
if released > 0 and ARGV[3] == '1' then
  redis.call('PUBLISH', KEYS[2], released)
end
return released
"""


class RedisBacking:
    """Permits on one Redis, through a client of redis-py, which stays open.

    Args:
        redis: the client.
        key_prefix: prefix of the keys and channels.
        push: whether releases are published, and subscribed to; every waiter has its own connection
            for that.
        push_retry: seconds before a broken connection is re-established.
        clock: the source of time, for tests.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        key_prefix: str = "semaphore:",
        push: bool = True,
        push_retry: Duration = 0.1,
        clock: Clock | None = None,
    ) -> None:
        """Store permits on `redis`; nothing is sent yet."""
        check_client(redis)
        self._redis: Any = redis
        self._prefix = key_prefix
        self._push = push
        self._push_retry = seconds(push_retry, "push_retry")
        self._clock = clock or SystemClock()
        self._latest: dict[str, int] = {}  # the last scores, by holder

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        """Acquire all permits at once, or none."""
        return bool(await self._run("try_acquire", _ACQUIRE, key, limit, permits, holder_id, ttl))

    async def refresh(self, key: str, holder_id: str, ttl: float, limit: int, permits: int) -> bool:
        """Extend the time to live of a holder's permits; return whether it still has them."""
        return bool(await self._run("refresh", _REFRESH, key, limit, permits, holder_id, ttl))

    async def get_count(self, key: str, ttl: float) -> int:
        """Return the number of permits that are held."""
        return int(await self._run("get_count", _COUNT, key, 0, 0, "", ttl))

    async def release(self, key: str, holder_id: str, permits: int) -> int:
        """Release a holder's permits; return how many were released."""
        flag = "1" if self._push else "0"
        try:
            return int(
                await self._redis.eval(
                    _RELEASE, 2, self._prefix + key, self._channel(key), permits, holder_id, flag
                )
            )
        except FAILURES as error:
            raise BackingError("release", error, name=key) from error

    async def _run(
        self, operation: str, script: str, key: str, limit: int, permits: int, who: str, ttl: float
    ) -> Any:
        now = self._score(who)
        try:
            return await self._redis.eval(
                script, 1, self._prefix + key, limit, permits, who, round(ttl * 1000), now
            )
        except FAILURES as error:
            raise BackingError(operation, error, name=key) from error

    def _score(self, holder_id: str) -> int:
        """Return the time in milliseconds, later than the same holder's last score."""
        now = int(self._clock.wall() * 1000)
        self._latest = {holder: score for holder, score in self._latest.items() if score >= now}
        self._latest[holder_id] = now = max(now, self._latest.get(holder_id, 0) + 1)
        return now

    def _channel(self, key: str) -> str:
        return f"{self._prefix}{key}:released"

    @asynccontextmanager
    async def on_permits_released(
        self, key: str, notify: Callable[[], None]
    ) -> AsyncIterator[None]:
        """During the block, call `notify` when a release of permits is published."""
        if not self._push:
            yield
            return
        ended = asyncio.Event()
        listening = asyncio.get_running_loop().create_task(
            self._listen(self._channel(key), notify, ended), name=f"tenure-permits-{key}"
        )
        try:
            yield
        finally:
            ended.set()
            listening.cancel()
            await over(listening)

    async def _listen(self, channel: str, notify: Callable[[], None], ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(channel)
                    while not ended.is_set():
                        # The confirmed subscription is a message too: notify for releases before
                        # it.
                        if await pubsub.get_message(timeout=None) is not None:
                            notify()
            except FAILURES:
                await asyncio.sleep(self._push_retry)  # waiters retry periodically in any case
