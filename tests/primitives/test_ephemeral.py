"""Ephemeral semaphores: they come with their first request and go with their last."""

from __future__ import annotations

import asyncio

import pytest

from tenure.errors import AcquireTimeout, InvalidArgument, SemaphoreNotFound
from tenure.model import EPHEMERAL_LIMIT
from tests.primitives.helpers import World, for_ever, turns

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 1, 3])


@ENGINES
async def test_it_needs_no_set_up_and_leaves_nothing(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        services = session.semaphore("services", ephemeral=True)
        assert (services.name, services.node, services.ephemeral) == ("services", "/default", True)
        assert repr(services) == "<Semaphore 'services' (ephemeral)>"
        async with services.acquire(data=b"a") as lease, services.enqueue(data=b"b") as ticket:
            assert lease.held
            assert ticket.granted
            assert (await services.describe()).limit == EPHEMERAL_LIMIT
            third = await services.try_acquire(data=b"c")
            assert third is not None
            described = await services.describe(owners=True)
            assert [owner.data for owner in described.owners] == [b"a", b"b", b"c"]
            await third.release()
        assert await world.queue("services") == []
        with pytest.raises(SemaphoreNotFound):
            await session.semaphore("services").describe()


async def test_the_implicit_session_serves_as_well(world: World) -> None:
    async with world.client() as client:
        async with client.semaphore("services", ephemeral=True).acquire():
            assert len(await world.queue("services")) == 1
        assert await world.queue("services") == []


async def test_while_it_is_away_it_is_empty(world: World) -> None:
    async with world.client() as client:
        services = client.semaphore("services", ephemeral=True)
        described = await services.describe(owners=True, waiters=True)
        assert (described.name, described.data, described.held) == ("services", b"", 0)
        assert (described.owners, described.waiters, described.waiting) == ((), (), 0)
        assert described.ephemeral
        assert described.limit == EPHEMERAL_LIMIT
        assert await services.count() == 0


async def test_who_wants_all_of_it_is_alone(world: World) -> None:
    async with world.client() as client:
        door = client.semaphore("door", ephemeral=True)
        async with door.acquire(EPHEMERAL_LIMIT):
            assert await door.try_acquire() is None
            with pytest.raises(AcquireTimeout):
                await door.acquire(timeout=1)
        async with door.acquire(), door.acquire():
            assert await door.try_acquire(EPHEMERAL_LIMIT) is None


@ENGINES
async def test_a_watch_goes_on_while_it_is_away(world: World, engine_turns: int | None) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        services = session.semaphore("services", ephemeral=True)
        async with services.watch(owners=True) as states:
            assert (await anext(states)).owners == ()
            for data in (b"first", b"second"):
                async with services.acquire(data=data) as lease:
                    assert [owner.data for owner in (await anext(states)).owners] == [data]
                    await lease.update(b"changed")
                    assert [owner.data for owner in (await anext(states)).owners] == [b"changed"]
                assert (await anext(states)).owners == ()


async def test_one_that_came_and_went_unseen_is_not_told(world: World) -> None:
    async with world.client() as client:
        services = client.semaphore("services", ephemeral=True)
        async with services.watch(data=True, owners=True) as states:
            await anext(states)
            next_one = asyncio.ensure_future(anext(states))
            async with services.acquire():
                pass
            await turns()
            assert not next_one.done()
            await states.aclose()
            with pytest.raises(StopAsyncIteration):
                await next_one


async def test_its_deletion_by_force_is_not_the_end_of_a_watch(world: World) -> None:
    async with world.client() as client, world.client() as other:
        services = client.semaphore("services", ephemeral=True)
        async with services.watch(owners=True) as states:
            await anext(states)
            lease = await other.semaphore("services", ephemeral=True).acquire()
            assert len((await anext(states)).owners) == 1
            await services.delete(force=True)
            assert (await anext(states)).owners == ()
            await turns()
            assert lease.loss is not None
        with pytest.raises(SemaphoreNotFound):
            await services.delete()


async def test_it_has_neither_a_creation_nor_data_of_its_own(world: World) -> None:
    async with world.client() as client:
        services = client.semaphore("services", ephemeral=True)
        with pytest.raises(InvalidArgument, match=r"'services' on /default.*needs no creation"):
            await services.create(4)
        with pytest.raises(InvalidArgument, match=r"'services' on /default.*no data of its own"):
            await services.update(b"x")


async def test_a_lasting_one_of_that_name_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(4)
        asked = client.semaphore("s", ephemeral=True)
        states = asked.watch(owners=True)
        for act in (asked.describe, asked.count, asked.acquire, asked.try_acquire, asked.enqueue):
            with pytest.raises(InvalidArgument, match="'s' on /default is a lasting semaphore"):
                await act()
        with pytest.raises(InvalidArgument, match="'s' on /default is a lasting semaphore"):
            await anext(states)
        with pytest.raises(StopAsyncIteration):
            await anext(states)


async def test_one_that_becomes_lasting_ends_its_watch(world: World) -> None:
    async with world.client() as client:
        states = client.semaphore("s", ephemeral=True).watch(owners=True)
        await anext(states)
        await client.semaphore("s").create(4)
        async with client.semaphore("s").acquire():
            with pytest.raises(InvalidArgument, match="is a lasting semaphore"):
                await anext(states)


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2])
async def test_who_is_cancelled_in_it_leaves_nothing(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        services = session.semaphore("services", ephemeral=True)

        async def serve() -> None:
            async with services.acquire(data=b"me"):
                await for_ever()

        for step in range(10):
            serving = asyncio.create_task(serve())
            await turns(step)
            serving.cancel()
            await asyncio.wait([serving])
            await turns()
            assert await world.queue("services") == []
