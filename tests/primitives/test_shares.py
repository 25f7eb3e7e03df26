"""A limit for each key beneath that of all: what is held together, and whose turn it is."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tenure._client.client import Client
from tenure._client.semaphore import Semaphore
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    SemaphoreExists,
    SemaphoreNotFound,
)
from tenure.model import DEFAULT_NODE
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


def jobs(client: Client, limit: int = 4, per_key: int = 2) -> Semaphore:
    return client.semaphore("jobs", limit=limit, per_key=per_key)


async def keys(client: Client) -> list[str]:
    """The keys that have a semaphore."""
    found = await client.list_semaphores()
    return [each.name.removeprefix("jobs/key/") for each in found if each.name != "jobs"]


async def test_a_key_has_its_limit_and_all_have_theirs(world: World) -> None:
    async with world.client() as client, world.client() as other:
        here, there = jobs(client), jobs(other)
        async with here.acquire(key="a"), there.acquire(key="a"):
            for each in (here, there):
                with pytest.raises(AcquireTimeout, match=r"'jobs/key/a'.* within 1 s; held by"):
                    await each.acquire(key="a", timeout=1)
                assert await each.try_acquire(key="a") is None
            async with here.acquire(2, key="b"):
                assert await there.count() == 4
                with pytest.raises(AcquireTimeout, match="semaphore 'jobs' "):
                    await there.acquire(key="c", timeout=1)
                assert await here.try_acquire(key="c") is None
                await turns()
                assert await keys(client) == ["a", "b"]
            lease = await there.try_acquire(2, key="c")
            assert lease is not None
            assert (lease.name, lease.count) == ("jobs", 2)
            assert len(await lease.slots()) == 2
            await lease.release()
        await turns()
        assert await keys(client) == []
        assert await here.count() == 0


async def test_a_key_that_floods_does_not_starve_the_others(
    world: World, clock: VirtualClock
) -> None:
    served: list[str] = []
    async with world.client() as client, world.client() as other:

        async def work(each: Client, key: str) -> None:
            async with jobs(each, limit=2, per_key=1).acquire(key=key):
                served.append(key)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(work(client, "flood"))
            await turns()
            for number in range(10):
                group.create_task(work(other, f"small {number % 2}"))
        # While three keys wait, each is served in its turn.
        assert Counter(served[:15]).most_common(1)[0][1] <= 6
        assert served.count("flood") == 50
        assert max(served.index(f"small {each}") for each in range(2)) <= 4


async def test_within_a_key_the_order_is_that_of_the_requests(
    world: World, clock: VirtualClock
) -> None:
    served: list[int] = []
    async with world.client() as client:
        semaphore = jobs(client, limit=2, per_key=1)

        async def work(number: int) -> None:
            async with semaphore.acquire(key="a"):
                served.append(number)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(work(number))
        assert served == list(range(10))


async def test_the_limits_hold_under_random_work(world: World, clock: VirtualClock) -> None:
    inside: Counter[str] = Counter()
    rng = random.Random(7)

    async def work(client: Client, key: str) -> None:
        semaphore = jobs(client, limit=3, per_key=2)
        for _ in range(20):
            count = rng.choice((1, 1, 2))
            try:
                async with semaphore.acquire(count, key=key, timeout=rng.choice((None, 0.5))):
                    inside[key] += count
                    assert inside[key] <= 2
                    assert inside.total() <= 3
                    await asyncio.sleep(rng.random())
                    inside[key] -= count
            except AcquireTimeout:
                continue

    async with world.client() as one, world.client() as two, asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(work((one, two)[number % 2], "abc"[number % 3]))
    assert inside.total() == 0
    async with world.client() as client:
        await turns()
        assert await keys(client) == []


async def test_a_cancelled_request_leaves_both_queues(world: World) -> None:
    async with world.client() as client, world.client() as other:
        semaphore = jobs(client, limit=2, per_key=1)
        held = [await jobs(other, 2, 1).acquire(key=key) for key in "ab"]
        tasks = [asyncio.ensure_future(semaphore.acquire(key=key)) for key in "ac"]
        await turns()
        assert await keys(client) == ["a", "b", "c"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await turns()
        assert await keys(client) == ["a", "b"]
        for lease in held:
            await lease.release()
        await turns()
        assert await keys(client) == []


async def test_the_loss_of_the_lease_releases_the_key(world: World) -> None:
    async with world.client() as client, world.client() as other:
        semaphore = jobs(client)
        lease = await semaphore.acquire(key="a")
        assert await other.evict(DEFAULT_NODE, "jobs", lease.fencing_token)
        with pytest.raises(LeaseLost):
            async with lease:
                await asyncio.sleep(3600)
        await turns()
        assert await keys(client) == []
        session = await other.session()
        lost = await session.semaphore("jobs", limit=4, per_key=1).acquire(key="a")
        await other.end_session(DEFAULT_NODE, session.id)
        async with client.semaphore("jobs", limit=4, per_key=1).acquire(key="a", timeout=1):
            await turns()
            assert not lost.held


async def test_a_resumed_session_recovers_the_lease_and_the_tokens_of_the_key(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        lease = await session.semaphore("jobs", limit=4, per_key=2).acquire(2, key="a")
        resumed = await second.session(resume=session.resume_token)
        tickets = [resumed.semaphore(name).recover() for name in ("jobs", "jobs/key/a")]
        recovered = [await ticket.wait() for ticket in tickets if ticket is not None]
        assert [each.count for each in recovered] == [2, 2]
        assert recovered[0].fencing_token == lease.fencing_token
        assert await jobs(second).try_acquire(key="a") is None
        for each in recovered:
            await each.release()
        async with jobs(second).acquire(2, key="a"):
            assert await jobs(second).count() == 2
        await resumed.aclose()


async def test_a_dropped_lease_releases_the_key(world: World) -> None:
    async with world.client() as client:
        with pytest.warns(ResourceWarning, match="dropped"):
            await jobs(client).acquire(key="a")
        await turns()
        assert await keys(client) == []


async def test_wrong_arguments_are_named(world: World) -> None:
    async with world.client() as client:
        semaphore = jobs(client)
        for call in (semaphore.acquire, semaphore.enqueue):
            with pytest.raises(InvalidArgument, match="needs the key"):
                call()
        with pytest.raises(InvalidArgument, match="needs the key"):
            async with semaphore:
                pass
        for wrong in ("", 7):
            with pytest.raises(InvalidArgument, match="needs the key"):
                semaphore.acquire(key=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="3"):
            semaphore.acquire(3, key="a")
        with pytest.raises(InvalidArgument, match="no limit for each key"):
            client.semaphore("x", limit=1).acquire(key="a")
        with pytest.raises(InvalidArgument):
            client.semaphore("x", limit=1, per_key=0)
        with pytest.raises(InvalidArgument, match="ephemeral"):
            client.semaphore("x", per_key=1, ephemeral=True)
        with pytest.raises(SemaphoreNotFound, match="'x'"):
            await client.semaphore("x", per_key=1).acquire(key="a")
        await turns()
        await client.semaphore("jobs", limit=4).create(4)
        with pytest.raises(SemaphoreExists):
            await jobs(client, limit=5).acquire(key="a")
        await turns()
        assert [each.name for each in await client.list_semaphores()] == ["jobs"]
