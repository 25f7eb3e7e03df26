"""Permits whose taker is interrupted: at each step, and while answers of Redis are late or lost.

Permits live for an hour here: what is left behind stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry as RedisRetry
from redis.backoff import NoBackoff

from tenure.errors import EngineError
from tenure.interop.effect import BackingError, DistributedSemaphore, RedisBacking, recurs
from tenure.interop.exclusive_lock import ExclusiveLock
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import a_folder, shared

KEY = "semaphore:interrupted"
CHANNEL = f"{KEY}:released"


@dataclass
class Place:
    """A semaphore of one permit behind a bad line, and another program's on a good one."""

    proxy: Proxy
    client: redis.asyncio.Redis
    mine: DistributedSemaphore
    others: DistributedSemaphore
    eye: redis.asyncio.Redis

    async def held(self) -> int:
        count: int = await self.eye.zcard(KEY)
        return count


@asynccontextmanager
async def a_place(patience: float | None = None) -> AsyncIterator[Place]:
    """With a client that waits so long for an answer."""
    server = shared()
    retry = RedisRetry(NoBackoff(), 0)
    with a_folder() as folder:
        async with (
            Proxy(server.socket, str(folder / "proxy")) as proxy,
            redis.asyncio.Redis(
                unix_socket_path=proxy.path, socket_timeout=patience, retry=retry
            ) as client,
            redis.asyncio.Redis(unix_socket_path=server.socket) as eye,
        ):
            await eye.delete(KEY)
            mine, others = (
                DistributedSemaphore("interrupted", RedisBacking(each), ttl=3600)
                for each in (client, eye)
            )
            yield Place(proxy, client, mine, others, eye)
            await mine.aclose()
            assert await eye.zcard(KEY) == 0


async def hold(semaphore: DistributedSemaphore, entered: asyncio.Event) -> None:
    async with semaphore.take(1):
        entered.set()
        await asyncio.Event().wait()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def passes(proxy: Proxy) -> None:
    """Return when something more has been passed on to the server."""
    before = proxy.passed
    async with asyncio.timeout(30):
        while proxy.passed == before:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def is_late(proxy: Proxy) -> None:
    """Return when the first answer comes late, which is the last one to do so."""
    async with asyncio.timeout(30):
        while not proxy.late:  # noqa: ASYNC110
            await asyncio.sleep(0)
    proxy.delay = 0


async def hold_until(leaves: asyncio.Event, semaphore: DistributedSemaphore | None) -> None:
    if semaphore is not None:
        async with semaphore.take(1):
            await leaves.wait()


async def is_held(place: Place) -> None:
    async with asyncio.timeout(30):
        while await place.held() == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def is_listening(place: Place) -> None:
    async with asyncio.timeout(30):
        while (await place.eye.pubsub_numsub(CHANNEL))[0][1] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after waiting"])
@pytest.mark.no_debug
async def test_a_take_that_is_cancelled_at_any_step_leaves_nothing(waits: bool) -> None:
    async with a_place() as place:
        await place.mine.current_count()  # connected
        for steps in itertools.count():
            entered, leaves = asyncio.Event(), asyncio.Event()
            holding = asyncio.create_task(hold_until(leaves, place.others if waits else None))
            if waits:
                await is_held(place)
            taking = asyncio.create_task(hold(place.mine, entered))
            if waits:
                await is_listening(place)
            leaves.set()  # from here on steps are counted: the other release takes some, too
            for _ in range(steps):
                await asyncio.sleep(0)
            was_inside = entered.is_set()
            await cancelled(taking)
            await holding
            assert await place.held() == 0
            if was_inside:
                break
        assert steps > 1


async def test_a_take_that_is_cancelled_while_its_answer_is_late_leaves_nothing() -> None:
    async with a_place() as place:
        await place.mine.current_count()
        place.proxy.delay = 0.1
        taking = asyncio.create_task(hold(place.mine, asyncio.Event()))
        await passes(place.proxy)
        await cancelled(taking)
        assert await place.held() == 0


async def test_a_take_whose_answer_comes_too_late_asks_again() -> None:
    async with a_place(patience=0.5) as place:
        await place.mine.current_count()
        entered = asyncio.Event()
        place.proxy.delay = 1.0
        taking = asyncio.create_task(hold(place.mine, entered))
        await is_late(place.proxy)
        await entered.wait()
        assert await place.held() == 1
        await cancelled(taking)
        assert await place.held() == 0


async def test_a_take_that_fails_because_its_answer_comes_too_late_leaves_nothing() -> None:
    async with a_place(patience=0.5) as place:
        backing = RedisBacking(place.client)
        once = DistributedSemaphore(
            "interrupted", backing, ttl=3600, backing_failure_retry_policy=recurs(0)
        )
        await once.current_count()
        place.proxy.delay = 1.0
        taking = asyncio.create_task(hold(once, asyncio.Event()))
        await is_late(place.proxy)
        with pytest.raises(BackingError):
            await taking
        assert await place.held() == 0


async def test_a_take_that_is_cancelled_when_its_answer_was_lost_leaves_nothing() -> None:
    async with a_place() as place:
        await place.mine.current_count()
        place.proxy.swallows = True
        taking = asyncio.create_task(hold(place.mine, asyncio.Event()))
        await passes(place.proxy)
        taking.cancel()
        await place.proxy.lose_an_answer()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await place.held() == 0


async def test_a_second_cancellation_waits_for_nothing() -> None:
    async with a_place() as place:
        await place.mine.current_count()
        place.proxy.swallows = True
        taking = asyncio.create_task(hold(place.mine, asyncio.Event()))
        await passes(place.proxy)
        taking.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not taking.done()
        taking.cancel()
        await asyncio.wait([taking])
        await place.proxy.lose_an_answer()


async def test_an_acquire_of_an_exclusive_lock_that_fails_likewise_leaves_nothing() -> None:
    async with a_place(patience=0.5) as place:
        lock = ExclusiveLock("late", place.client, lock_ttl=3600)
        assert await lock.inspect() is None
        place.proxy.delay = 1.0
        acquiring = asyncio.create_task(lock.acquire())
        await is_late(place.proxy)
        with pytest.raises(EngineError, match="cannot be acquired"):
            await acquiring
        assert not await place.eye.exists(lock.key)
