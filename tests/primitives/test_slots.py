"""Slots: each holder of a semaphore has a number of its own, the lowest that is free."""

from __future__ import annotations

import asyncio
import random

import pytest

from tenure._client.client import Client
from tenure._client.semaphore import Semaphore
from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import EngineError, EngineUnavailable, InvalidArgument, LeaseLost, LeaseReleased
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def pool_of(client: Client, limit: int = 3) -> Semaphore:
    pool = client.semaphore("gpu")
    await pool.create(limit, exist_ok=True)
    return pool


async def test_a_lease_has_the_lowest_free_slot_and_keeps_it(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool, others = await pool_of(client), await pool_of(other)
        first, second, third = await pool.acquire(), await others.acquire(), await pool.acquire()
        assert [await each.slot() for each in (first, second, third)] == [0, 1, 2]
        assert await second.slot() == 1
        await second.release()
        again = await pool.acquire()
        assert await again.slot() == 1
        assert [await each.slot() for each in (first, third)] == [0, 2]


async def test_a_lease_of_several_has_as_many_slots(world: World) -> None:
    async with world.client() as client:
        pool = await pool_of(client, 4)
        one = await pool.acquire()
        assert await one.slot() == 0
        lease = await pool.acquire(3)
        assert await lease.slots() == (1, 2, 3)
        with pytest.raises(InvalidArgument, match=r"has 3 slots: use slots\(\)"):
            await lease.slot()


async def test_leases_keep_their_slots_when_the_limit_is_lowered(world: World) -> None:
    async with world.client() as client:
        pool = await pool_of(client, 3)
        leases = [await pool.acquire() for _ in range(3)]
        assert await leases[2].slot() == 0
        await pool.resize(1)
        assert {await each.slot() for each in leases} == {0, 1, 2}
        await leases[2].release()
        await leases[0].release()
        assert await pool.try_acquire() is None
        await leases[1].release()
        async with pool.acquire() as lease:
            assert await lease.slot() == 0


async def test_two_tasks_that_ask_at_once_get_the_same_slot(world: World) -> None:
    client, _ = world.slow(3)
    async with client:
        lease = await (await pool_of(client)).acquire()
        assert set(await asyncio.gather(lease.slot(), lease.slot(), lease.slot())) == {0}
        assert await world.queue("gpu/slot/1") == []


@pytest.mark.parametrize("how", ["released", "the block", "evicted", "session"])
async def test_a_slot_ends_with_its_lease(world: World, how: str) -> None:
    async with world.client() as client, client.session(description="mine") as session:
        pool = session.semaphore("gpu")
        await pool.create(1)
        if how == "the block":
            async with pool.acquire() as lease:
                assert await lease.slot() == 0
        else:
            lease = await pool.acquire()
            assert await lease.slot() == 0
            if how == "released":
                await lease.release()
            elif how == "evicted":
                await client.evict("/default", "gpu", lease.fencing_token)
            else:
                await session.aclose()
        await turns()
        assert await world.queue("gpu/slot/0") == []
        with pytest.raises(LeaseLost if how in {"evicted", "session"} else LeaseReleased):
            await lease.slot()


async def test_a_slot_that_is_still_held_is_waited_for(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = await pool_of(client, 2)
        busy = [await other.mutex(f"gpu/slot/{number}").lock() for number in range(2)]
        lease = await pool.acquire()
        asking = asyncio.create_task(lease.slot())
        await turns()
        assert not asking.done()
        await busy[1].release()
        assert await asking == 1
        await turns()
        assert [each.session_id for each in await world.queue("gpu/slot/0")] != []
        assert len(await world.queue("gpu/slot/0")) == 1


async def test_waiting_for_a_slot_ends_with_the_lease_and_leaves_no_request(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = await pool_of(client, 1)
        async with other.mutex("gpu/slot/0").lock():
            lease = await pool.acquire()
            asking = asyncio.create_task(lease.slot())
            await turns()
            await client.evict("/default", "gpu", lease.fencing_token)
            with pytest.raises(LeaseLost):
                await asking
            await turns()
            assert len(await world.queue("gpu/slot/0")) == 1


@pytest.mark.parametrize("after", range(1, 40, 3))
async def test_cancelled_at_any_moment_nothing_is_left(world: World, after: int) -> None:
    client, _ = world.slow(2)
    async with client, world.client() as other:
        pool = await pool_of(client, 2)
        async with other.mutex("gpu/slot/0").lock(), other.mutex("gpu/slot/1").lock():
            lease = await pool.acquire()
            asking = asyncio.create_task(lease.slot())
            await turns(after)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await turns()
            assert len(await world.queue("gpu/slot/0")) == len(await world.queue("gpu/slot/1")) == 1
        assert await lease.slot() == 0
        await lease.release()
        await turns()
        assert await world.queue("gpu/slot/0") == []


async def test_a_lease_that_is_lost_while_its_slot_is_granted_keeps_none(world: World) -> None:
    client, _engine = world.slow()
    async with client, world.client() as other:
        pool = await pool_of(client, 1)
        lease = await pool.acquire()
        await lease.slot()
        lease._request.slots = None  # as before the first call
        for slot in await world.queue("gpu/slot/0"):
            await other.evict("/default", "gpu/slot/0", slot.order_id)
        asking = asyncio.create_task(lease.slot())
        await turns(3)  # the slot is asked for
        await other.evict("/default", "gpu", lease.fencing_token)
        with pytest.raises(LeaseLost):
            await asking
        await turns()
        assert await world.queue("gpu/slot/0") == []


async def test_a_release_that_the_store_refuses_is_sent_again(world: World) -> None:
    client, engine = world.slow()
    async with client:
        pool = await pool_of(client, 1)
        lease = await pool.acquire()
        assert await lease.slot() == 0
        engine.fail("withdraw", EngineError("disk full"))
        await lease.release()
        await asyncio.sleep(1)
        assert await world.queue("gpu/slot/0") == []


@pytest.mark.parametrize("limit", [1025, 2**64 - 1])
async def test_a_semaphore_without_a_small_limit_has_no_slots(world: World, limit: int) -> None:
    async with world.client() as client:
        lease = await (await pool_of(client, limit)).acquire()
        with pytest.raises(InvalidArgument, match="a limit of at most 1,024"):
            await lease.slot()
        member = await client.semaphore("members", ephemeral=True).acquire()
        with pytest.raises(InvalidArgument, match="lasting semaphore"):
            await member.slot()


@pytest.mark.parametrize("seed", range(10))
async def test_no_two_holders_ever_have_the_same_slot(world: World, seed: int) -> None:
    chance = random.Random(seed)
    taken: set[int] = set()

    async def work(client: Client) -> None:
        pool = client.semaphore("gpu")
        for _ in range(10):
            count = chance.randint(1, 3)
            async with pool.acquire(count) as lease:
                slots = await lease.slots()
                assert len(slots) == count
                assert taken.isdisjoint(slots)
                assert max(slots) < 4
                taken.update(slots)
                await asyncio.sleep(chance.random())
                taken.difference_update(slots)

    clients = [world.slow(chance.randint(0, 3))[0] for _ in range(3)]
    await pool_of(clients[0], 4)
    async with asyncio.TaskGroup() as group:
        for client in clients * 2:
            group.create_task(work(client))
    for client in clients:
        await client.aclose()


async def test_a_lease_that_shrinks_keeps_its_lowest_slots_and_frees_the_others(
    world: World,
) -> None:
    async with world.client() as client, world.client() as other:
        lease = await (await pool_of(client, 3)).acquire(3)
        assert await lease.slots() == (0, 1, 2)
        await lease.update(count=1)
        others = await (await pool_of(other, 3)).acquire(2)
        assert await others.slots() == (1, 2)
        assert await lease.slots() == (0,)


async def test_a_lease_that_shrinks_while_it_waits_for_a_slot_keeps_no_more_than_its_count(
    world: World,
) -> None:
    async with world.client() as client, world.client() as other:
        lease = await (await pool_of(client, 2)).acquire(2)
        busy = await other.mutex("gpu/slot/1").lock()
        asking = asyncio.create_task(lease.slots())
        await turns()
        await lease.update(count=1)
        await busy.release()
        assert await asking == (0,)
        assert await world.queue("gpu/slot/1") == []


async def test_a_request_for_a_slot_that_was_evicted_is_made_again(world: World) -> None:
    async with world.client() as client, world.client() as other:
        busy = await other.mutex("gpu/slot/0").lock()
        lease = await (await pool_of(client, 1)).acquire()
        asking = asyncio.create_task(lease.slot())
        await turns()
        _, waiter = await world.queue("gpu/slot/0")
        assert waiter.order_id is not None
        await other.evict("/default", "gpu/slot/0", waiter.order_id)
        await turns()
        await busy.release()
        assert await asking == 0


async def test_a_slot_whose_release_fails_does_not_keep_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = world.slow()
    async with client:
        lease = await (await pool_of(client, 2)).acquire(2)
        assert await lease.slots() == (0, 1)
        session = engine.sessions[0]
        withdraw, failures = session.withdraw, [OSError(24, "Too many open files")]

        def fail_once(hold: int) -> Answer[Withdrawn]:
            if failures:
                raise failures.pop()
            return withdraw(hold)

        monkeypatch.setattr(session, "withdraw", fail_once)
        await lease.release()
        assert await world.queue("gpu") == []
        await asyncio.sleep(1)
        assert await world.queue("gpu/slot/0") == await world.queue("gpu/slot/1") == []


async def test_during_an_outage_the_question_for_a_slot_ends_and_names_it(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        lease = await (await pool_of(client)).acquire()
        engine.cut()
        began = clock.now()
        with pytest.raises(EngineUnavailable, match="limit of semaphore 'gpu' on /default: not"):
            await lease.slot()
        assert clock.now() - began == pytest.approx(5)
        engine.mend()
        assert await lease.slot() == 0
