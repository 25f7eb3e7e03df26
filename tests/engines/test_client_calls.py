"""Calls that only combine operations of the contract, on real stores."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts

import pytest

import tenure
from tenure.model import FULL_STORES
from tenure.recipes import (
    Barrier,
    BrokenBarrier,
    CountDownLatch,
    Counter,
    DoubleBarrier,
    Pool,
    ReentrantMutex,
    run_once,
)
from tenure.testing.conformance import Stores
from tests.engines.stores import VARIANTS, at_once

ON_EVERY_ENGINE = pytest.mark.parametrize("stores", at_once().values(), ids=at_once())
ON_EVERY_VARIANT = pytest.mark.parametrize(
    "stores",
    [pytest.param(each.slow_stores, id=each.name, marks=each.marks) for each in VARIANTS],
)


@ON_EVERY_ENGINE
async def test_errors_name_the_stores_that_can(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client:
            can = client.capabilities
            full = can.fencing and can.waiter_order and can.data and can.lasting and can.resume
            assert full == (f"{url.partition(':')[0].partition('+')[0]}://" in FULL_STORES)


@ON_EVERY_ENGINE
async def test_a_ticket_keeps_a_place_for_a_mutex(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            held = await other.mutex("m").lock()
            async with client.mutex("m").enqueue() as first, client.mutex("m").enqueue() as second:
                with pytest.raises(tenure.AcquireTimeout, match="is kept"):
                    await first.wait(0.01)
                await held.release()
                assert (await first.wait(30)).held
                assert not second.granted
                await first.withdraw()
                assert (await second.wait(30)).held
            assert not await other.mutex("m").locked()


@ON_EVERY_ENGINE
async def test_several_locks_are_taken_as_one(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:

            async def work(each: tenure.Client, names: str) -> None:
                for _ in range(3):
                    async with each.all_of(*map(each.mutex, names), timeout=60) as leases:
                        leases.check()
                        assert [lease.name for lease in leases] == list(names)

            await asyncio.gather(*(work(client, "ab"), work(other, "ba"), work(other, "cab")))
            held = [await other.mutex(name).lock() for name in "ab"]
            for timeout in (0, 0.01):
                with pytest.raises(tenure.AcquireTimeout, match="none of 'a', 'b'"):
                    await client.any_of(client.mutex("a"), client.mutex("b"), timeout=timeout)
            await (await client.any_of(*map(client.mutex, "abc"), timeout=0)).release()
            async with client.all_of(*map(client.mutex, "cd"), timeout=0) as leases:
                leases.check()
            waiting = asyncio.ensure_future(client.any_of(client.mutex("a"), client.mutex("b")))
            await held[1].release()
            lease = await waiting
            assert lease.name == "b"
            await held[0].release()
            async with other.mutex("a").lock(timeout=30):  # nobody waits for it any more
                await lease.release()


@ON_EVERY_ENGINE
async def test_calls_of_decorated_functions_exclude_each_other(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            inside: list[int] = []

            async def work(number: int) -> int:
                assert not inside
                inside.append(number)
                await asyncio.sleep(0)
                inside.remove(number)
                return number

            waits = [each.exclusive("work", wait=30)(work) for each in (client, other)]
            done = await asyncio.gather(*(each(number) for number in range(5) for each in waits))
            assert sorted(done) == sorted([*range(5)] * 2)
            async with other.mutex("work").lock():
                assert await client.exclusive("work", skip=True)(work)(0) is None
                with pytest.raises(tenure.AcquireTimeout):
                    await client.exclusive("work", wait=0.01)(work)(0)


@ON_EVERY_ENGINE
async def test_calls_of_decorated_functions_keep_to_a_limit(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            if not client.capabilities.lasting:
                with pytest.raises(tenure.Unsupported):
                    await client.limited("gpu", 2)(asyncio.sleep)(0)
                return
            inside: list[int] = []

            async def work(number: int) -> int:
                inside.append(number)
                assert len(inside) <= 2
                await asyncio.sleep(0)
                inside.remove(number)
                return number

            waits = [each.limited("gpu", 2, wait=30)(work) for each in (client, other)]
            await asyncio.gather(*(each(number) for number in range(5) for each in waits))
            async with other.semaphore("gpu").acquire(2):
                assert await client.limited("gpu", 2, skip=True)(work)(0) is None


@ON_EVERY_ENGINE
async def test_each_key_has_a_limit_beneath_that_of_all(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            both = [each.semaphore("jobs", limit=3, per_key=2) for each in (client, other)]
            if not client.capabilities.lasting:
                with pytest.raises(tenure.Unsupported):
                    await both[0].acquire(key="a")
                return
            inside: Counts[str] = Counts()

            async def work(jobs: tenure.Semaphore, key: str) -> None:
                for _ in range(3):
                    async with jobs.acquire(key=key, timeout=60):
                        inside[key] += 1
                        assert inside[key] <= 2
                        assert inside.total() <= 3
                        await asyncio.sleep(0)
                        inside[key] -= 1

            await asyncio.gather(*(work(each, key) for each in both for key in "aab"))
            async with both[1].acquire(2, key="a"):
                assert await both[0].try_acquire(key="a") is None
                lease = await both[0].try_acquire(key="b")
                assert lease is not None
                await lease.release()


@ON_EVERY_ENGINE
async def test_calls_of_decorated_functions_run_once_in_a_period(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            ran: list[int] = []

            async def job(number: int) -> bool:
                ran.append(number)
                return True

            jobs = [each.once_per("job {number}", hours=1)(job) for each in (client, other)]
            if not (client.capabilities.data and client.capabilities.lasting):
                with pytest.raises(tenure.Unsupported):
                    await jobs[0](1)
                return
            assert [await each(1) for each in jobs * 2] == [True, None, None, None]
            assert await jobs[1](2)
            assert ran == [1, 2]


@ON_EVERY_ENGINE
async def test_a_counter_loses_no_change_and_a_latch_opens_once(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            if not (client.capabilities.data and client.capabilities.lasting):
                with pytest.raises(tenure.Unsupported):
                    await Counter(client, "hits").add()
                return
            counters = [Counter(each, "hits") for each in (client, other)]
            sums = await asyncio.gather(*(each.add(timeout=30) for each in counters * 3))
            assert sorted(sums) == [1, 2, 3, 4, 5, 6]
            latches = [CountDownLatch(each, "ready", 2) for each in (client, other)]
            waiting = [asyncio.create_task(each.wait(30)) for each in latches]
            assert await latches[0].count_down() == 1
            assert not any(each.done() for each in waiting)
            assert await latches[1].count_down() == 0
            await asyncio.gather(*waiting)


@ON_EVERY_VARIANT
async def test_a_pool_gives_each_resource_to_one_holder_at_a_time(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            resources = {"a": b"data of a", "b": b"data of b"}
            pools = [Pool(each, "p", resources) for each in (client, other)]
            if not (client.capabilities.data and client.capabilities.lasting):
                for use in (pools[0].acquire(), pools[0].try_acquire()):
                    with pytest.raises(tenure.Unsupported):
                        await use
                return
            tokens: dict[str, list[int]] = {"a": [], "b": []}
            held: set[str] = set()

            async def use_one(pool: Pool) -> None:
                async with pool.acquire(timeout=60) as item:
                    assert item.name not in held
                    held.add(item.name)
                    assert item.data == resources[item.name]
                    tokens[item.name].append(item.fencing_token)
                    await asyncio.sleep(0)
                    held.remove(item.name)

            await asyncio.gather(*(use_one(each) for each in pools * 5))
            assert sum(map(len, tokens.values())) == 10
            assert all(each == sorted(set(each)) for each in tokens.values())
            session = await other.session()
            doomed = await Pool(session, "p", resources).acquire(timeout=60)
            last = await pools[0].acquire(timeout=60)
            assert {doomed.name, last.name} == {"a", "b"}
            assert await pools[1].try_acquire() is None
            waiting = asyncio.create_task(_acquired(pools[0]))
            await session.aclose()
            assert (await waiting).name == doomed.name
            await last.release()
            await (await waiting).release()


async def _acquired(pool: Pool) -> tenure.Lease:
    return await pool.acquire(timeout=60)


@ON_EVERY_ENGINE
async def test_the_resource_of_an_ended_session_returns_to_the_pool(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            doomed = await Pool(other, "p", {"a": b""}).acquire(timeout=60)
            waiting = asyncio.create_task(_acquired(Pool(client, "p", {"a": b""})))
            await client.end_session("/default", doomed.session.id)
            lease = await waiting
            assert lease.name == "a"
            assert lease.fencing_token > doomed.fencing_token
            await doomed.wait_lost()
            await lease.release()


@ON_EVERY_VARIANT
async def test_a_barrier_is_broken_and_can_be_used_again(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            here, there = Barrier(client, "b", 2), Barrier(other, "b", 2)
            if not (client.capabilities.data and client.capabilities.lasting):
                for use in (here.wait(), here.abort(), here.reset()):
                    with pytest.raises(tenure.Unsupported):
                        await use
                return
            for number, break_it in enumerate((here.abort, there.reset)):
                waiting = asyncio.create_task(there.wait(60))
                async with client.semaphore("b", limit=2).watch(owners=True) as states:
                    while not (await anext(states)).owners:
                        pass
                await break_it(timeout=60)
                with pytest.raises(BrokenBarrier):
                    await waiting
                assert await there.broken() is (number == 0)
                await here.reset()
                assert sorted(await asyncio.gather(here.wait(60), there.wait(60))) == [0, 1]


@ON_EVERY_VARIANT
async def test_parties_enter_and_leave_a_double_barrier_together(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            if not (client.capabilities.data and client.capabilities.lasting):
                with pytest.raises(tenure.Unsupported):
                    await DoubleBarrier(client, "b", 2).enter()
                return
            inside: list[int] = []
            left: list[int] = []

            async def take_part(barrier: DoubleBarrier) -> None:
                for number in range(3):
                    inside.append(number)
                    async with barrier.enter(timeout=60) as party:
                        assert inside.count(number) == 2
                        left.append(number)
                        await party.leave(timeout=60)
                        assert left.count(number) == 2

            await asyncio.gather(
                *(take_part(DoubleBarrier(each, "b", 2)) for each in (client, other))
            )


@ON_EVERY_VARIANT
async def test_a_mutex_is_entered_again_with_its_lease(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            mutex = ReentrantMutex(client, "m")
            async with mutex.lock(timeout=60) as outer:
                async with mutex.lock(holding=outer) as inner:
                    assert inner.held
                assert await other.mutex("m").try_lock() is None
            async with other.mutex("m").lock(timeout=60):
                with pytest.raises(tenure.LeaseReleased):
                    await mutex.lock(holding=outer)


@ON_EVERY_VARIANT
async def test_a_function_runs_once_for_all_callers(stores: Stores) -> None:
    with stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            runs: list[int] = []

            async def work(lease: tenure.Lease) -> dict[str, int]:
                runs.append(lease.fencing_token)
                return {"runs": len(runs)}

            async def fail(_: tenure.Lease) -> None:
                raise ValueError("no such table")

            if not (client.capabilities.data and client.capabilities.lasting):
                with pytest.raises(tenure.Unsupported):
                    await run_once(client, "w", work, keep=60)
                return
            callers = [client, other] * 2
            calls = [run_once(each, "w", work, keep=60, timeout=60) for each in callers]
            assert await asyncio.gather(*calls) == [{"runs": 1}] * 4
            calls = [run_once(each, "f", fail, keep=60, timeout=60) for each in callers]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert sorted(type(each).__name__ for each in failed) == [
                *["RunFailed"] * 3,
                "ValueError",
            ]
