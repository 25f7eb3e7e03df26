"""The budget of an iteration: how much of it a connection gets, and in which order."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from tenure.server.budget import ITERATION, QUANTUM, STRANGERS, LoopBudget, Share

LOGGER = logging.getLogger("tests.server.budget")


class Clock:
    """Time that passes only when work is done."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


class Worker:
    """A connection with so many units of work left."""

    def __init__(
        self,
        floor: Floor,
        source: str,
        units: int,
        cost: float = QUANTUM / 4,
        *,
        stranger: bool = False,
    ) -> None:
        self.units = units
        self.share = Share(floor.budget, source, self.work, stranger=stranger)
        self._floor = floor
        self._cost = cost

    def work(self) -> None:
        while self.units:
            self.units -= 1
            self._floor.clock.seconds += self._cost
            self._floor.done.append(self)
            if self.share.used_up:
                break
        if self.units:
            self.share.queue()

    def arrives(self, size: int = 100) -> bool:
        """So many bytes arrive; returns whether they were handled at once."""
        if not self.share.begin(size):
            self.share.queue()
            return False
        self.work()
        self.share.end()
        return True


class Floor:
    """A budget, and what was done with it, in order."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.budget = LoopBudget(self.clock.now, LOGGER)
        self.done: list[Worker] = []

    def crowd(self, sources: int = 1, each: int = 50) -> list[Worker]:
        """Heavy connections that have much to do."""
        heavy = [Worker(self, f"heavy{n % sources}", 1000) for n in range(sources * each)]
        for worker in heavy:
            worker.share.queue()
        return heavy

    async def iteration(self) -> list[Worker]:
        """The next iteration of the loop; what was done in it."""
        before = len(self.done)
        await asyncio.sleep(0)
        return self.done[before:]


async def test_what_arrives_is_handled_at_once_while_there_is_little_to_do() -> None:
    floor = Floor()
    for _ in range(1000):
        assert Worker(floor, "a", 1).arrives()
        await asyncio.sleep(0)
    assert floor.budget.waiting == 0


async def test_a_connection_gets_its_quantum_and_goes_on_later() -> None:
    floor = Floor()
    worker = Worker(floor, "a", 1000)
    begun = floor.clock.seconds
    assert worker.arrives()
    assert floor.clock.seconds - begun <= 1.5 * QUANTUM
    assert worker.share.queued
    while worker.units:
        begun = floor.clock.seconds
        assert await floor.iteration()
        assert floor.clock.seconds - begun <= 1.5 * QUANTUM
    assert not worker.share.queued


async def test_all_connections_together_get_no_more_than_the_iteration() -> None:
    floor = Floor()
    floor.crowd(each=500)
    for _ in range(20):
        begun = floor.clock.seconds
        assert await floor.iteration()
        assert floor.clock.seconds - begun <= ITERATION + 1.5 * QUANTUM


async def test_what_arrives_at_many_connections_in_one_iteration_is_not_all_handled_in_it() -> None:
    floor = Floor()
    begun = floor.clock.seconds
    handled = [Worker(floor, "a", 4).arrives() for _ in range(500)]
    assert not all(handled)
    assert floor.clock.seconds - begun <= 3 * ITERATION


async def test_long_reads_of_one_unit_are_never_handled_for_nothing() -> None:
    floor = Floor()
    begun = floor.clock.seconds
    handled = [Worker(floor, "a", 1).arrives(256_000) for _ in range(500)]
    assert not all(handled)
    assert floor.clock.seconds - begun <= 3 * ITERATION


async def test_one_read_after_the_other_gets_no_more_than_the_quantum_of_an_iteration() -> None:
    floor = Floor()
    worker = Worker(floor, "a", 0)
    at_once = 0
    while not worker.share.queued:
        worker.units = 1
        at_once += worker.arrives(256_000)
    assert at_once == 4, "as many as fit into a quantum, though the iteration has room for more"
    assert len(await floor.iteration()) == 1
    worker.units = 1
    assert worker.arrives(256_000), "another iteration has another quantum"


async def test_a_connection_that_did_little_is_served_before_heavy_ones() -> None:
    floor = Floor()
    heavy = floor.crowd()
    light = Worker(floor, "heavy0", 0)
    light.share.greeted()
    for _ in range(20):
        done = await floor.iteration()
        assert done[0] in (light, *heavy)
        light.units = 1
        floor.clock.seconds += 2 * ITERATION  # the iteration has no room left
        light.share.queue()
        done = await floor.iteration()
        assert done[0] is light


async def test_a_connection_that_does_much_loses_its_priority() -> None:
    floor = Floor()
    floor.crowd()
    busy = Worker(floor, "heavy0", 10_000)
    busy.share.greeted()
    busy.share.queue()
    first = [(await floor.iteration())[0] is busy for _ in range(20)]
    assert first[0]
    assert not any(first[10:])


async def test_a_connection_has_no_priority_before_its_greeting() -> None:
    floor = Floor()
    floor.crowd()
    stranger = Worker(floor, "heavy0", 1)
    floor.clock.seconds += 100.0
    assert not stranger.share.light
    stranger.share.greeted()
    assert stranger.share.light


async def test_strangers_together_get_a_small_part_of_an_iteration() -> None:
    floor = Floor()
    strangers = [
        Worker(floor, f"a{n % 7}", 1000, STRANGERS / 10, stranger=True) for n in range(500)
    ]
    for each in strangers:
        assert not each.arrives(), "not even the first of them is handled on arrival"
    for _ in range(20):
        begun = floor.clock.seconds
        assert await floor.iteration()
        assert floor.clock.seconds - begun <= 1.5 * STRANGERS


async def test_strangers_take_no_turn_of_others_and_get_theirs() -> None:
    floor = Floor()
    heavy = floor.crowd()
    strangers = [Worker(floor, "heavy0", 1000, stranger=True) for _ in range(500)]
    for each in strangers:
        each.share.queue()
    for _ in range(20):
        done = await floor.iteration()
        assert len([each for each in done if each in heavy]) >= ITERATION / QUANTUM
        assert any(each in strangers for each in done)


async def test_a_stranger_is_served_as_others_after_its_greeting() -> None:
    floor = Floor()
    stranger = Worker(floor, "a", 1, stranger=True)
    assert not stranger.arrives()
    await floor.iteration()
    stranger.share.greeted()
    stranger.units = 1
    assert stranger.arrives()


async def test_sources_take_turns_however_many_connections_each_has() -> None:
    floor = Floor()
    floor.crowd(each=500)
    other = Worker(floor, "other", 1000)
    other.share.queue()
    turns = 0
    for _ in range(100):
        turns += other in await floor.iteration()
    assert turns >= 40, "every second turn is the other source's, and an iteration has five"


async def test_a_closed_connection_is_not_served() -> None:
    floor = Floor()
    worker = Worker(floor, "a", 10)
    worker.share.queue()
    worker.share.close()
    worker.share.queue()
    assert await floor.iteration() == []
    assert floor.budget.waiting == 0


async def test_a_defect_of_one_connection_does_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    floor = Floor()

    def fail() -> None:
        raise RuntimeError("a defect")

    broken = Share(floor.budget, "a", fail)
    worker = Worker(floor, "a", 1)
    broken.queue()
    worker.share.queue()
    assert await floor.iteration() == [worker]
    assert "a defect" in caplog.text


async def test_work_counts_with_the_time_that_it_causes() -> None:
    floor = Floor()
    started: list[int] = []
    for number in range(10):
        Share(floor.budget, number, partial(started.append, number), ITERATION / 2).queue()
    for iteration in range(1, 6):
        await floor.iteration()
        assert started == list(range(2 * iteration))
