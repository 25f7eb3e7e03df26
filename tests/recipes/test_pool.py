# ruff: noqa: PT012  what raises here is a block, with its body
"""The pool: one holder for each resource, in order, and no unit without its resource."""

from __future__ import annotations

import asyncio
from collections import Counter as Multiset

import pytest

import tenure
from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    SelfDeadlock,
    SemaphoreNotFound,
)
from tenure.recipes import Pool, PoolItem
from tenure.testing.clock import VirtualClock
from tests.cancelling import cancellers
from tests.primitives.helpers import World, for_ever, is_held, turns
from tests.recipes.conftest import program

PAIR = {"a": b"data of a", "b": b"data of b"}


async def assert_all_free(world: World, name: str = "p") -> None:
    await turns()
    assert await world.queue(name) == []
    for each in PAIR:
        assert await world.queue(f"{name}/{each}") == []


async def test_each_resource_has_one_holder_at_a_time(url: str) -> None:
    held: Multiset[str] = Multiset()
    tokens: dict[str, int] = {}
    async with tenure.connect(url) as client, tenure.connect(url) as other:

        async def use(pool: Pool) -> None:
            async with pool.acquire(timeout=60) as item:
                held[item.name] += 1
                assert held[item.name] == 1
                assert item.data == PAIR[item.name]
                assert item.fencing_token > tokens.get(item.name, 0)
                tokens[item.name] = item.fencing_token
                await asyncio.sleep(0)
                held[item.name] -= 1

        pools = [Pool(each, "p", PAIR) for each in (client, other)]
        await asyncio.gather(*(use(each) for each in pools * 10))
        assert tokens.keys() == PAIR.keys()
        for each in pools:
            one, two = await each.try_acquire(), await each.try_acquire()
            assert one is not None
            assert two is not None
            assert [one.name, two.name] == ["a", "b"]
            assert await each.try_acquire() is None
            await one.release()
            await two.release()


async def test_waiters_are_served_in_order(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pools = [Pool(each, "p", PAIR) for each in (client, other)]
        items = [await pools[0].acquire() for _ in PAIR]
        served: list[int] = []

        async def wait(number: int) -> None:
            async with pools[number % 2].acquire():
                served.append(number)
                await turns()

        waiting = []
        for number in range(6):
            waiting.append(asyncio.create_task(wait(number)))
            await turns()
        assert await pools[1].try_acquire() is None
        for item in items:
            await item.release()
        await asyncio.gather(*waiting)
        assert served == sorted(served)
        await assert_all_free(world)


async def test_the_first_free_resource_in_the_callers_order_is_taken(world: World) -> None:
    async with world.client() as client:
        backwards = Pool(client, "p", dict(reversed(PAIR.items())))
        async with backwards.acquire() as item:
            assert item.name == "b"
            async with Pool(client, "p", PAIR).acquire() as another:
                assert another.name == "a"
        assert repr(backwards) == "<Pool 'p' of 2 resources>"
        await assert_all_free(world)


async def test_out_of_time_nothing_is_held(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        pool = Pool(client, "p", PAIR)
        items = [await Pool(other, "p", PAIR).acquire() for _ in PAIR]
        for timeout in (5, 3):
            begun = clock.now()
            match = rf"pool 'p' on /default: not acquired within {timeout} s; held by"
            with pytest.raises(AcquireTimeout, match=match):
                await pool.acquire(timeout=timeout)
            assert clock.now() - begun == pytest.approx(timeout, abs=0.3)
        with pytest.raises(AcquireTimeout, match="at once"):
            await pool.acquire(timeout=0)
        for item in items:
            await item.release()
        await assert_all_free(world)


async def test_a_resource_that_is_locked_outside_is_not_given(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = Pool(client, "p", PAIR)
        lock = await other.mutex("p/a").lock()
        item = await pool.acquire()
        assert item.name == "b"
        assert await pool.try_acquire() is None
        with pytest.raises(AcquireTimeout, match="no resource was free at once; the mutexes"):
            await pool.acquire(timeout=0)
        with pytest.raises(AcquireTimeout, match="no resource was free within 5 s; the mutexes"):
            await pool.acquire(timeout=5)
        waiting = asyncio.create_task(pool.acquire())
        await turns()
        assert not waiting.done()
        await lock.release()
        given = await waiting
        assert given.name == "a"
        await given.release()
        await item.release()
        await assert_all_free(world)


async def test_a_pool_of_other_resources_is_refused(world: World) -> None:
    async with world.client() as client:
        async with Pool(client, "p", PAIR).acquire():
            for names, match in (
                (["a"], "has 2 resources, not 1. All programs"),
                (["a", "c"], 'has other resources: \\["a", "b"\\]. All programs'),
            ):
                with pytest.raises(InvalidArgument, match=match):
                    await Pool(client, "p", dict.fromkeys(names, b"")).acquire()
                with pytest.raises(InvalidArgument, match=match):
                    await Pool(client, "p", dict.fromkeys(names, b"")).try_acquire()
        await client.semaphore("s").create(2)
        with pytest.raises(InvalidArgument, match="has other resources: none"):
            await Pool(client, "s", PAIR).acquire()
        async with client.mutex("m").lock():
            with pytest.raises(InvalidArgument):
                await Pool(client, "m", PAIR).acquire()
        await assert_all_free(world)


async def test_a_pool_that_was_deleted_is_created_again_with_another_list(world: World) -> None:
    async with world.client() as client:
        pool = Pool(client, "p", PAIR)
        await (await pool.acquire()).release()
        await client.semaphore("p").delete()
        with pytest.raises(SemaphoreNotFound):
            await pool.acquire()
        async with pool.acquire():
            pass
        await client.semaphore("p").delete()
        async with Pool(client, "p", {"c": b""}).acquire() as item:
            assert item.name == "c"


@pytest.mark.parametrize("names", [[], [""], ["x" * 1023], [str(each) for each in range(1025)]])
async def test_invalid_resources_are_refused(world: World, names: list[str]) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument):
            Pool(client, "p", dict.fromkeys(names, b""))


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_at_any_step_nothing_is_held(world: World, taken: int, late: bool) -> None:
    """With all resources free, one, or none until the cancellation."""
    client, _ = world.slow()
    async with client, world.client() as other:
        for canceller in cancellers(late=late):
            items = [await Pool(other, "p", PAIR).acquire() for _ in range(taken)]

            async def return_items(items: list[PoolItem] = items) -> None:
                await turns(20)
                for item in items:
                    await item.release()

            returning = asyncio.create_task(return_items())
            await canceller.run(Pool(client, "p", PAIR).acquire())
            await returning
            await assert_all_free(world)


@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_while_it_waits_for_a_resource_nothing_is_held(
    world: World, late: bool
) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        for canceller in cancellers(late=late):
            locks = [await other.mutex(f"p/{each}").lock() for each in PAIR]

            async def unlock(locks: list[tenure.Lease] = locks) -> None:
                await turns(30)
                for lock in locks:
                    await lock.release()

            unlocking = asyncio.create_task(unlock())
            await canceller.run(Pool(client, "p", PAIR).acquire())
            await unlocking
            await assert_all_free(world)


@pytest.mark.parametrize("late", [False, True])
async def test_a_cancelled_release_takes_effect(world: World, late: bool) -> None:
    client, _ = world.slow()
    async with client:
        for canceller in cancellers(late=late):
            item = await Pool(client, "p", PAIR).acquire()
            await canceller.run(item.release())
            assert not is_held(item)
            await assert_all_free(world)


async def test_a_released_resource_is_free_at_once(world: World) -> None:
    client, _ = world.slow(3)
    async with client, world.client() as other:
        pool, theirs = Pool(client, "p", {"a": b""}), Pool(other, "p", {"a": b""})
        for _ in range(3):
            async with pool.acquire():
                assert await theirs.try_acquire() is None
            item = await theirs.try_acquire()
            assert item is not None
            await item.release()
            await item.release()
            with pytest.raises(LeaseReleased):
                item.check()


async def test_a_unit_is_free_only_after_its_resource(world: World) -> None:
    """So its next owner finds a free resource, even if the store answers releases late."""
    client, engine = world.slow()
    async with client:
        item = await Pool(client, "p", PAIR).acquire()
        engine.back.flowing = False
        releasing = asyncio.create_task(item.release())
        await turns()
        assert await world.queue("p/a") == []
        assert len(await world.queue("p")) == 1
        engine.back.flowing = True
        await releasing
        await assert_all_free(world)


async def test_the_end_of_a_session_returns_its_resources(world: World) -> None:
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        with pytest.raises(LeaseLost):
            async with Pool(session, "p", PAIR).acquire():
                item = await Pool(session, "p", PAIR).acquire()
                waiting = asyncio.create_task(Pool(client, "p", PAIR).acquire())
                await turns()
                assert not waiting.done()
                await world.end_sessions("doomed")
                await for_ever()
        assert item.loss is not None
        async with await waiting, Pool(client, "p", PAIR).acquire():
            pass
        await assert_all_free(world)


@pytest.mark.parametrize("which", ["p", "p/a"])
async def test_one_lost_request_ends_the_other_one(world: World, which: str) -> None:
    async with world.client() as client, world.client() as other:
        with pytest.raises(LeaseLost, match="evicted"):
            async with Pool(client, "p", PAIR).acquire() as item:
                assert item.name == "a"
                [request] = await world.queue(which)
                await other.evict("/default", which, request.order_id)
                await for_ever()
        await assert_all_free(world)


@pytest.mark.parametrize("which", ["p", "p/a"])
async def test_a_loss_that_the_release_shows_is_raised(world: World, which: str) -> None:
    client, engine = world.slow()
    async with client, world.client() as other:
        item = await Pool(client, "p", PAIR).acquire()
        [request] = await world.queue(which)
        engine.back.flowing = False  # the notification is on its way
        await other.evict("/default", which, request.order_id)
        releasing = asyncio.create_task(item.release())
        await turns()
        engine.back.flowing = True
        with pytest.raises(LeaseLost):
            await releasing
        await assert_all_free(world)


async def test_a_pool_that_is_deleted_by_force_loses_its_items(world: World) -> None:
    async with world.client() as client, world.client() as other:
        item = await Pool(client, "p", PAIR).acquire()
        await other.semaphore("p").delete(force=True)
        loss = await item.wait_lost()
        assert "its unit of the pool was lost" in str(loss)
        await assert_all_free(world)


async def test_the_callers_policy_handles_a_loss_once(world: World) -> None:
    lost: list[LeaseLost] = []
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        item = await Pool(session, "p", PAIR).acquire(on_loss=lost.append)
        await world.end_sessions("doomed")
        await item.wait_lost()
        assert len(lost) == 1
        item = await Pool(client, "p", PAIR).acquire(on_loss=lost.append)
        await other.semaphore("p").delete(force=True)
        await item.wait_lost()
        assert len(lost) == 2
        with pytest.raises(InvalidArgument):
            Pool(client, "p", PAIR).acquire(on_loss="panic")  # type: ignore[arg-type]


async def test_a_task_that_waits_for_itself_gets_an_error(world: World) -> None:
    async with world.client() as client:
        pool = Pool(client, "p", PAIR)
        async with pool.acquire(), pool.acquire():
            with pytest.raises(SelfDeadlock):
                await pool.acquire()
        await assert_all_free(world)


async def test_an_item_that_is_dropped_is_returned(world: World) -> None:
    async with world.client() as client:
        with pytest.warns(ResourceWarning, match="resource 'p/a' on /default was dropped"):
            await Pool(client, "p", PAIR).acquire()
        await assert_all_free(world)


async def test_an_outage_is_reported(world: World) -> None:
    client, engine = world.slow()
    async with client:
        pool = Pool(client, "p", PAIR)
        await (await pool.acquire()).release()
        outage = EngineUnavailable("no route to host")
        engine.trouble_told = outage
        engine.cut()
        for use in (pool.acquire(timeout=5), Pool(client, "p", PAIR).acquire(timeout=5)):
            with pytest.raises(AcquireTimeout, match="no route to host") as raised:
                await use
            assert raised.value.__cause__ is outage
        engine.mend()
        engine.trouble_told = None
        await assert_all_free(world)


async def test_another_timeout_is_not_taken_for_its_own(world: World) -> None:
    async with world.client() as client:
        lock = await client.mutex("p/a").lock()
        with pytest.raises(TimeoutError) as raised:
            async with asyncio.timeout(1):
                await Pool(client, "p", {"a": b""}).acquire(timeout=5)
        assert not isinstance(raised.value, AcquireTimeout)
        await lock.release()
        await assert_all_free(world)


HOLDER = """
import asyncio, sys, tenure
from tenure.recipes import Pool
async def main():
    async with tenure.connect(sys.argv[1]) as client:
        async with Pool(client, "p", {"a": b""}).acquire():
            print("inside", flush=True)
            await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.timeout(60)
async def test_the_resource_of_a_program_that_dies_returns(sqlite_url: str) -> None:
    async with tenure.connect(sqlite_url) as client, program(HOLDER, sqlite_url) as other:
        waiting = asyncio.create_task(Pool(client, "p", {"a": b""}).acquire())
        other.kill()
        async with await waiting as item:
            assert item.name == "a"


# Resumed sessions


async def test_a_resumed_session_has_its_resources_again(world: World) -> None:
    async with world.client() as first, world.client() as second, world.client() as other:
        session = await first.session(resumable=True)
        pool = Pool(session, "p", PAIR)
        items = [await pool.acquire() for _ in PAIR]
        waiting = asyncio.create_task(pool.acquire())
        await turns()
        resumed = await second.session(resume=session.resume_token)
        with pytest.raises(tenure.SessionExpired):
            await waiting
        again = Pool(resumed, "p", PAIR)
        found = [await again.recover(), await again.recover()]
        assert [(each.name, each.data, each.fencing_token) for each in found if each] == [
            (each.name, each.data, each.fencing_token) for each in items
        ]
        assert len(await world.queue("p")) == 3
        assert await again.recover() is None  # the place in the queue is left
        assert len(await world.queue("p")) == 2
        assert await Pool(other, "p", PAIR).try_acquire() is None
        one, two = found
        assert one is not None
        assert two is not None
        async with one:
            assert one.held
        await two.release()
        await assert_all_free(world)
        await resumed.aclose()


async def test_what_is_recovered_ends_as_a_whole(world: World) -> None:
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        _held = await Pool(session, "p", PAIR).acquire()
        resumed = await second.session(resume=session.resume_token)
        item = await Pool(resumed, "p", PAIR).recover()
        assert item is not None
        [unit] = await world.queue("p")
        await second.evict("/default", "p", unit.order_id)
        with pytest.raises(LeaseLost):
            async with item:
                await for_ever()
        await assert_all_free(world)
        await resumed.aclose()


@pytest.mark.parametrize("left", ["p", "p/a"])
async def test_half_of_an_item_is_not_recovered_and_not_kept(world: World, left: str) -> None:
    """As after an eviction, or a death between the two steps."""
    async with world.client() as first, world.client() as second:
        session = await first.session(resumable=True)
        _held = await Pool(session, "p", PAIR).acquire()
        resumed = await second.session(resume=session.resume_token)
        [gone] = await world.queue("p/a" if left == "p" else "p")
        await second.evict("/default", "p/a" if left == "p" else "p", gone.order_id)
        await turns()
        assert [each.name for each in resumed.recovered] == [left]
        assert await Pool(resumed, "p", PAIR).recover() is None
        await assert_all_free(world)
        await resumed.aclose()


async def test_a_new_session_has_nothing_to_recover(world: World) -> None:
    async with world.client() as client:
        pool = Pool(client, "p", PAIR)
        assert await pool.recover() is None
        async with pool.acquire():
            assert await pool.recover() is None
        await assert_all_free(world)
