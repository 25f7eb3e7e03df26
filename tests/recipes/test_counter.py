"""The counter: no change is lost. The latch: nobody passes before it has been counted down."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenure
from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.recipes import CountDownLatch, Counter
from tenure.recipes.counter import LARGEST
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns
from tests.recipes.conftest import program

_numbers = itertools.count(1)


async def test_no_change_of_many_tasks_and_programs_is_lost(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        counters = [Counter(each, "hits") for each in (client, other)]
        sums = await asyncio.gather(*(each.add() for each in counters * 10))
        assert sorted(sums) == list(range(1, 21))
        assert [await each.get() for each in counters] == [20, 20]


@given(st.lists(st.tuples(st.sampled_from(["add", "set", "swap"]), st.integers(-3, 3))))
@settings(max_examples=50, deadline=None)
def test_a_counter_counts_as_a_number_does(changes: list[tuple[str, int]]) -> None:
    async def compare() -> None:
        async with tenure.connect(f"memory://counting-{next(_numbers)}") as client:
            counter, number = Counter(client, "n", initial=1), 1
            for kind, value in changes:
                if kind == "add":
                    number += value
                    assert await counter.add(value) == number
                elif kind == "set":
                    number = value
                    await counter.set(value)
                else:
                    assert await counter.compare_and_set(value, -value) is (number == value)
                    number = -value if number == value else number
                assert await counter.get() == number

    asyncio.run(compare())


async def test_a_counter_begins_at_its_initial_number(world: World) -> None:
    async with world.client() as client:
        counter = Counter(client, "n", initial=-7)
        assert await counter.get() == -7
        assert await client.list_semaphores() == []
        assert await counter.add(0) == -7
        assert await counter.add(-1) == -8
        assert "n" in repr(counter)


async def test_watchers_see_each_number(world: World) -> None:
    async with world.client() as client, world.client() as other:
        counter = Counter(client, "n")
        async with Counter(other, "n").watch() as numbers:
            assert await anext(numbers) == 0
            await counter.add(5)
            assert await anext(numbers) == 5
            await counter.add(0)
            await counter.set(6)
            assert await anext(numbers) == 6


async def test_a_number_that_is_too_large_changes_nothing(world: World) -> None:
    async with world.client() as client:
        counter = Counter(client, "n", initial=LARGEST)
        for change in (counter.add(1), counter.add(LARGEST + 1), counter.set(-LARGEST - 2)):
            with pytest.raises(InvalidArgument, match="2\\^63"):
                await change
        with pytest.raises(InvalidArgument, match="whole numbers"):
            await counter.set(1.5)  # type: ignore[arg-type]
        assert await counter.get() == LARGEST
        assert not await client.mutex("n.counting").locked()


async def test_a_change_waits_for_another_one_as_long_as_it_may(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, world.client() as other:
        counter = Counter(client, "n")
        async with other.mutex("n.counting").lock():
            begun = clock.now()
            with pytest.raises(AcquireTimeout):
                await counter.add(timeout=2)
            assert clock.now() - begun == pytest.approx(2, abs=0.1)
        assert await counter.get() == 0


async def test_a_cancelled_change_is_made_or_not_and_the_next_one_follows(world: World) -> None:
    for number in range(40):
        client, _ = world.slow()
        async with client:
            counter = Counter(client, f"n{number}")
            changing = asyncio.create_task(counter.add())
            await turns(number)
            changing.cancel()
            await asyncio.wait([changing])
            before = await counter.get()
            assert before in (0, 1)
            assert changing.cancelled() or before == 1
            assert await counter.add(timeout=5) == before + 1


async def test_a_cancelled_change_keeps_the_mutex_until_its_write_is_answered(world: World) -> None:
    client, engine = world.slow()
    async with client, world.client() as eye:
        counter = Counter(client, "n")
        await counter.add()
        changing = asyncio.create_task(counter.add())
        for _ in range(1000):
            if engine.calls.count("update") == 2:
                break
            await turns(1)
        engine.cut()
        for _ in range(2):
            changing.cancel()
            await turns()
        assert not changing.done()
        assert await eye.mutex("n.counting").locked()
        engine.mend()
        await asyncio.wait([changing])
        assert changing.cancelled()
        await turns()
        assert not await eye.mutex("n.counting").locked()
        assert await counter.get() == 2


async def test_a_change_is_not_written_through_a_later_session(world: World) -> None:
    async with world.client() as client:
        counter = Counter(client, "n")
        await counter.add()

        def lose_the_session(old: int) -> int:
            session = client._implicit.current()
            assert session is not None
            session.ended(SessionExpired("it has expired"))
            return old + 1

        with pytest.raises((LeaseLost, SessionExpired)):
            await counter._number.change(lose_the_session, None)
        assert await counter.get() == 1
        assert await counter.add() == 2


@pytest.mark.timeout(60)
async def test_a_program_that_dies_in_a_change_does_not_keep_the_others_out(
    sqlite_url: str,
) -> None:
    text = """
import asyncio, sys, tenure
async def main():
    async with tenure.connect(sys.argv[1]) as client:
        async with client.mutex("n.counting").lock():
            print("inside", flush=True)
            await asyncio.Event().wait()
asyncio.run(main())
"""
    async with tenure.connect(sqlite_url) as client, program(text, sqlite_url) as other:
        adding = asyncio.create_task(Counter(client, "n").add())
        other.kill()
        assert await adding == 1


def _counter(client: tenure.Client) -> Coroutine[Any, Any, object]:
    return Counter(client, "x").add()


def _latch(client: tenure.Client) -> Coroutine[Any, Any, object]:
    return CountDownLatch(client, "x", 2).count_down()


def _reading(client: tenure.Client) -> Coroutine[Any, Any, object]:
    return CountDownLatch(client, "x", 2).left()


def _waiting(client: tenure.Client) -> Coroutine[Any, Any, object]:
    return CountDownLatch(client, "x", 2).wait(5)


@pytest.mark.parametrize("use", [_counter, _latch, _reading, _waiting])
async def test_what_is_something_else_is_refused(
    world: World, use: Callable[[tenure.Client], Coroutine[Any, Any, object]]
) -> None:
    async with world.client() as client:
        pool = client.semaphore("x")
        await pool.create(4)
        with pytest.raises(InvalidArgument, match="a semaphore of limit 4, and is used here as a"):
            await use(client)
        await pool.delete()
        async with client.mutex("x").lock():
            with pytest.raises(InvalidArgument):
                await use(client)
        await pool.create(1, b"text")
        with pytest.raises(InvalidArgument, match="other data, and is used here as a"):
            await use(client)
        assert not await client.mutex("x.counting").locked()


async def test_a_latch_opens_for_all_waiters(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        latches = [CountDownLatch(each, "ready", 3) for each in (client, other)]
        waiting = [asyncio.create_task(each.wait()) for each in latches * 2]
        left = [await each.count_down() for each in (latches[0], latches[1])]
        assert left == [2, 1]
        assert not any(each.done() for each in waiting)
        assert await latches[0].count_down() == 0
        await asyncio.gather(*waiting)
        await latches[1].wait(timeout=0.5)
        assert await latches[1].count_down() == 0
        assert await latches[0].left() == 0


async def test_a_latch_that_is_reset_is_closed(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        latch = CountDownLatch(client, "ready", 1)
        assert await latch.left() == 1
        await latch.count_down()
        await latch.wait()
        await latch.reset()
        assert await latch.left() == 1
        begun = clock.now()
        with pytest.raises(AcquireTimeout, match="within 3 s: 1 of 1 calls were still to come"):
            await latch.wait(3)
        assert clock.now() - begun == pytest.approx(3, abs=0.1)


async def test_an_outage_is_reported_by_a_wait_for_a_latch(world: World) -> None:
    client, engine = world.slow()
    async with client:
        latch = CountDownLatch(client, "ready", 1)
        waiting = asyncio.create_task(latch.wait(5))
        await turns()
        outage = EngineUnavailable("no route to host")
        engine.trouble_told = outage
        with pytest.raises(AcquireTimeout, match=r"because .*no route to host") as raised:
            await waiting
        assert raised.value.__cause__ is outage


async def test_a_latch_of_another_count_is_refused(world: World) -> None:
    async with world.client() as client:
        await CountDownLatch(client, "ready", 3).count_down()
        other = CountDownLatch(client, "ready", 2)
        for use in (other.count_down(), other.left(), other.wait(1), other.reset()):
            with pytest.raises(InvalidArgument, match="for 3 calls, and was given 2"):
                await use
        assert await CountDownLatch(client, "ready", 3).left() == 2


async def test_a_latch_that_is_deleted_ends_its_waits(world: World) -> None:
    async with world.client() as client:
        latch = CountDownLatch(client, "ready", 1)
        waiting = asyncio.create_task(latch.wait())
        await turns()
        await client.semaphore("ready").delete()
        with pytest.raises(SemaphoreNotFound):
            await waiting


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
async def test_a_count_is_a_positive_number(world: World, count: Any) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="whole number of calls"):
            CountDownLatch(client, "ready", count)
