"""Calls that only combine operations of the contract, on real stores."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts

import pytest

import tenure
from tenure.recipes import CountDownLatch, Counter
from tenure.testing.conformance import Stores
from tests.engines.stores import at_once

ON_EVERY_ENGINE = pytest.mark.parametrize("stores", at_once().values(), ids=at_once())


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
