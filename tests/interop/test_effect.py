"""The semaphore of effect-distributed-lock: permits on a real Redis, and on tenure's engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import Any, TypeAlias

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry as RedisRetry
from redis.backoff import NoBackoff

import tenure
from tenure.errors import InvalidArgument
from tenure.interop.effect import (
    Backing,
    BackingError,
    ClientBacking,
    DistributedSemaphore,
    LockLost,
    LockNotAcquired,
    Permits,
    RedisBacking,
    recurs,
    spaced,
)
from tests.fencing.servers import a_redis
from tests.interop.conftest import Connecting

Backings: TypeAlias = Callable[[], AbstractAsyncContextManager[Backing]]

KEY = "semaphore:pool"
SELDOM = spaced(3600)
"""So that nothing but a push ends a wait."""


@pytest.fixture(params=["redis", "memory", "sqlite"])
def backings(request: pytest.FixtureRequest) -> Backings:
    """``async with backings() as backing``: another program's, on the same store."""
    if request.param == "redis":
        connected: Connecting = request.getfixturevalue("connected")

        @asynccontextmanager
        async def on_redis() -> AsyncIterator[Backing]:
            async with connected() as client:
                yield RedisBacking(client)

        return on_redis
    folder = request.getfixturevalue("tmp_path")
    url = f"sqlite:///{folder}/store.db" if request.param == "sqlite" else f"memory://{folder.name}"

    @asynccontextmanager
    async def on_engine() -> AsyncIterator[Backing]:
        async with tenure.connect(url) as client:
            yield ClientBacking(client)

    return on_engine


def is_held(permits: Permits) -> bool:
    """The same as requesting them, without a type checker taking the answer for lasting."""
    return permits.held


# On every backing


async def test_all_permits_or_none_are_taken_and_given_back(backings: Backings) -> None:
    async with backings() as here, backings() as there:
        one = DistributedSemaphore("pool", here, limit=3)
        two = DistributedSemaphore("pool", there, limit=3)
        async with one.take(2) as held:
            assert (held.count, await two.current_count()) == (2, 2)
            held.check()
            async with two.try_take(2) as taken:
                assert taken is None
            async with two.try_take(1) as taken:
                assert taken is not None
                assert is_held(taken)
                assert await one.current_count() == 3
            assert await one.current_count() == 2
        assert not is_held(held)
        assert await two.current_count() == 0


async def test_a_release_wakes_who_waits(backings: Backings) -> None:
    async with backings() as here, backings() as there:
        one = DistributedSemaphore("pool", here)
        two = DistributedSemaphore("pool", there, acquire_retry_policy=SELDOM)
        async with one.take(1):
            waiting = asyncio.create_task(two.with_permits(1, done))
            async with two.try_take(1) as taken:
                assert taken is None
        assert await asyncio.wait_for(waiting, 20) == "done"
        assert await one.current_count() == 0


async def test_work_is_done_with_permits_or_not_at_all(backings: Backings) -> None:
    async with backings() as here, backings() as there:
        one, two = DistributedSemaphore("pool", here), DistributedSemaphore("pool", there)

        async def work() -> str:
            assert await two.with_permits_if_available(1, done, otherwise="busy") == "busy"
            return "worked"

        assert await one.with_permits(1, work) == "worked"
        assert await two.with_permits_if_available(1, done, otherwise="busy") == "done"
        with pytest.raises(KeyError):
            await one.with_permits(1, failing)
        assert await one.current_count() == 0


async def test_the_limit_is_never_exceeded(backings: Backings) -> None:
    inside, most, done_by = 0, 0, [0] * 8

    async def work(number: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        done_by[number] += 1
        await asyncio.sleep(0)
        inside -= 1

    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        programs = [await stack.enter_async_context(backings()) for _ in range(4)]

        async def program(number: int) -> None:
            semaphore = DistributedSemaphore(
                "pool", programs[number % 4], limit=3, acquire_retry_policy=spaced(0.01)
            )
            for _ in range(5):
                await semaphore.with_permits(1, lambda: work(number))

        tasks = [group.create_task(program(number)) for number in range(8)]
        await asyncio.wait(tasks)
    assert most <= 3
    assert done_by == [5] * 8


async def test_when_the_policy_ends_so_does_the_wait(backings: Backings) -> None:
    async with backings() as here, backings() as there:
        two = DistributedSemaphore("pool", there, acquire_retry_policy=recurs(3))
        async with DistributedSemaphore("pool", here).take(1):
            with pytest.raises(LockNotAcquired, match="not free in time"):
                await two.with_permits(1, done)


async def test_a_cancelled_acquisition_leaves_nothing(backings: Backings) -> None:
    async with backings() as here, backings() as there:
        one, two = DistributedSemaphore("pool", here), DistributedSemaphore("pool", there)
        assert await one.current_count() == 0
        for turns in range(15):
            working = asyncio.create_task(one.with_permits(1, forever))
            for _ in range(turns):
                await asyncio.sleep(0)
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
            await one.aclose()
            assert await two.current_count() == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"key": ""}, "not empty"),
        ({"limit": 0}, "from 1 on"),
        ({"limit": True}, "from 1 on"),
        ({"ttl": 1.0, "refresh_interval": 1.0}, "more than 0 and less than 0.9 s, not 1 s"),
        ({"refresh_interval": 0}, "more than 0"),
        ({"ttl": -1.0}, "ttl"),
        ({"acquire_retry_policy": 0.5}, "a retry policy is a function"),
        ({"backing_failure_retry_policy": "3"}, "a retry policy is a function"),
        ({"backing": redis.asyncio.Redis()}, "not in a Redis"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        DistributedSemaphore(
            **{"key": "pool", "backing": RedisBacking(redis.asyncio.Redis()), **arguments}
        )


def test_a_number_of_attempts_is_a_number() -> None:
    for times in (-1, "3", True, 1.5):
        with pytest.raises(InvalidArgument, match="from 0 on"):
            recurs(times)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="for asyncio"):
        RedisBacking("redis://localhost")  # type: ignore[arg-type]


async def test_permits_that_make_no_sense_are_refused(backings: Backings) -> None:
    async with backings() as backing:
        semaphore = DistributedSemaphore("pool", backing, limit=2)
        for permits in (0, 3, -1, True):
            with pytest.raises(InvalidArgument, match="from 1 to the limit"):
                await semaphore.with_permits(permits, done)
        with pytest.raises(InvalidArgument, match="by their identifier"):
            await semaphore.with_permits(1, done, acquired_externally=True)
        for identifier in ("", 5):
            with pytest.raises(InvalidArgument, match="is a str, and not empty"):
                await semaphore.with_permits(1, done, identifier=identifier)  # type: ignore[arg-type]


# On Redis


async def test_permits_are_where_the_original_has_them(connected: Connecting) -> None:
    async with connected() as client:
        semaphore = DistributedSemaphore("pool", RedisBacking(client), limit=3, ttl=20)
        before = int(time.time() * 1000)
        async with semaphore.take(2, identifier="me"):
            assert await client.zrange(KEY, 0, -1) == [b"me_0", b"me_1"]
            for member in ("me_0", "me_1"):
                score = await client.zscore(KEY, member)
                assert score is not None
                assert before - 1 < score <= before + 20_000
                assert score.is_integer()  # as the Node.js library writes it
            assert 0 < await client.pttl(KEY) <= 20_000
        assert not await client.exists(KEY)


async def test_permits_that_nobody_refreshes_are_free_after_their_time(
    connected: Connecting,
) -> None:
    async with connected() as client:
        old = int(time.time() * 1000) - 10_000
        await client.zadd(KEY, {"dead_0": old, "alive_0": old + 8000})
        semaphore = DistributedSemaphore("pool", RedisBacking(client), limit=2, ttl=5)
        async with semaphore.take(1):
            assert await semaphore.current_count() == 2
            assert await client.zscore(KEY, "dead_0") is None


async def test_lost_permits_stop_the_work(connected: Connecting) -> None:
    async with connected() as client, connected() as eye:
        semaphore = DistributedSemaphore(
            "pool", RedisBacking(client), ttl=30, refresh_interval=0.05
        )
        held: Permits | None = None

        async def work() -> None:
            nonlocal held
            async with semaphore.take(1) as held:
                await eye.delete(KEY)
                await forever()

        with pytest.raises(LockLost, match="expired or were removed"):
            await work()
        assert held is not None
        with pytest.raises(LockLost):
            held.check()

        async def ask() -> None:
            async with semaphore.take(1) as held:
                await eye.delete(KEY)
                await held.wait_lost()
                held.check()

        with pytest.raises(LockLost) as told:
            await ask()
        assert not hasattr(told.value, "__notes__")  # that it was lost is said once
        assert await held.wait_lost() is held.loss


async def test_a_loss_does_not_hide_what_the_work_raises(connected: Connecting) -> None:
    async with connected() as client, connected() as eye:
        semaphore = DistributedSemaphore(
            "pool", RedisBacking(client), ttl=30, refresh_interval=0.05
        )

        async def work() -> None:
            await eye.delete(KEY)
            try:
                await forever()
            finally:
                raise KeyError("mine")

        with pytest.raises(KeyError) as told:
            await semaphore.with_permits(1, work)
        assert "expired or were removed" in told.value.__notes__[0]


async def test_a_redis_that_does_not_answer_stops_the_work_in_time(connected: Connecting) -> None:
    async with connected() as client, connected() as eye:
        semaphore = DistributedSemaphore(
            "pool", RedisBacking(client), ttl=1.5, refresh_interval=0.2
        )
        working = asyncio.Event()
        taking = asyncio.create_task(semaphore.with_permits(1, lambda: forever(working)))
        await working.wait()
        await eye.client_pause(2500)
        begun = time.monotonic()
        await asyncio.wait([taking], timeout=60)
        assert time.monotonic() - begun > 0.5
        assert isinstance(taking.exception(), LockLost)
        assert "confirmed" in str(taking.exception())
        await eye.client_unpause()
        await semaphore.aclose()


async def test_a_backing_that_fails_is_asked_again_and_then_told() -> None:
    asked = 0

    def policy() -> list[float]:
        nonlocal asked
        asked += 1
        return [0.0, 0.0]

    with ExitStack() as stack:
        url = stack.enter_context(a_redis())
        async with redis.asyncio.Redis.from_url(url, retry=RedisRetry(NoBackoff(), 0)) as client:
            backing = RedisBacking(client)
            semaphore = DistributedSemaphore(
                "pool", backing, refresh_interval=0.05, backing_failure_retry_policy=policy
            )
            begun = asyncio.Event()
            working = asyncio.create_task(semaphore.with_permits(1, lambda: forever(begun)))
            await begun.wait()
            stack.close()
            await asyncio.wait([working])
            loss = working.exception()
            assert isinstance(loss, LockLost)
            assert isinstance(loss.__cause__, BackingError)
            assert loss.__cause__.operation == "refresh"
            before = asked
            with pytest.raises(BackingError, match="backing of 'pool' failed"):
                await semaphore.with_permits(1, done)
            assert asked > before
            with pytest.raises(BackingError, match="get_count"):
                await semaphore.current_count()
            await semaphore.aclose()


async def test_permits_are_handed_over_by_their_identifier(connected: Connecting) -> None:
    async with connected() as here, connected() as there:
        semaphore = DistributedSemaphore("pool", RedisBacking(there), limit=2)
        backing = RedisBacking(here)
        assert await backing.try_acquire("pool", "job 7", 30.0, 2, 2)
        async with semaphore.take(2, identifier="job 7", acquired_externally=True) as held:
            assert is_held(held)
            assert await semaphore.current_count() == 2
        assert await semaphore.current_count() == 0
        with pytest.raises(LockNotAcquired, match="taken over"):
            await semaphore.with_permits(1, done, identifier="job 8", acquired_externally=True)
        async with semaphore.try_take(1, identifier="job 8", acquired_externally=True) as none:
            assert none is None


async def test_without_push_polling_finds_the_permits(connected: Connecting) -> None:
    async with connected() as here, connected() as there:
        one = DistributedSemaphore("pool", RedisBacking(here, push=False))
        two = DistributedSemaphore("pool", RedisBacking(there, push=False))
        async with one.take(1):
            waiting = asyncio.create_task(two.with_permits(1, done))
            await asyncio.sleep(0)
        assert await asyncio.wait_for(waiting, 20) == "done"


async def test_a_waiter_listens_again_when_its_connection_was_cut(connected: Connecting) -> None:
    async with connected() as here, connected() as there, connected() as eye:
        one = DistributedSemaphore("pool", RedisBacking(here))
        two = DistributedSemaphore("pool", RedisBacking(there), acquire_retry_policy=SELDOM)

        async def listeners(number: int) -> None:
            channel = "semaphore:pool:released"
            while True:  # nobody is told of it
                if (await eye.pubsub_numsub(channel))[0][1] == number:
                    return
                await asyncio.sleep(0.005)

        async with one.take(1):
            waiting = asyncio.create_task(two.with_permits(1, done))
            await listeners(1)
            await eye.client_kill_filter(_type="pubsub")
            await listeners(1)
        assert await asyncio.wait_for(waiting, 20) == "done"


async def done() -> str:
    return "done"


async def failing() -> str:
    raise KeyError("failed")


async def forever(begun: asyncio.Event | None = None) -> str:
    if begun is not None:
        begun.set()
    await asyncio.Event().wait()
    raise AssertionError("it waits for ever")
