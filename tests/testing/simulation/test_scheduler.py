"""Simulated processes: each a loop and a clock of its own, on one true time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from tenure.testing.simulation.scheduler import LocalClock, OutOfTime, ProcessLoop, Scheduler


class Machine:
    """Some processes, and what is said in them."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.said: list[tuple[float, str]] = []

    def process(self, rate: float = 1.0, offset: float = 0.0) -> ProcessLoop:
        return self.scheduler.new_loop(LocalClock(self.scheduler, rate, offset, 1.7e9))

    def say(self, what: str) -> None:
        self.said.append((round(self.scheduler.now, 6), what))

    def run(self, loop: ProcessLoop, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in a process, to its end."""
        task = loop.create_task(main)
        task.add_done_callback(lambda _: self.scheduler.stop())
        self.scheduler.run(1e6)
        return task.result()


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_process_has_all_of_asyncio_that_needs_no_machine(machine: Machine) -> None:
    async def main() -> str:
        async with asyncio.TaskGroup() as group:
            one = group.create_task(asyncio.sleep(2, "one"))
            two = group.create_task(asyncio.sleep(1, "two"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        done, waiting = await asyncio.wait([asyncio.create_task(asyncio.sleep(9))], timeout=1)
        assert not done
        for task in waiting:
            task.cancel()
        return one.result() + two.result()

    loop = machine.process()
    assert machine.run(loop, main()) == "onetwo"
    assert machine.scheduler.now == 6
    assert not loop.failures


@pytest.mark.parametrize("seed", range(50))
def test_no_timer_fires_before_its_time(seed: int) -> None:
    random = Random(seed)
    machine = Machine()
    loop = machine.process(random.uniform(0.9, 1.1), random.uniform(0, 20))
    machine.scheduler.now = random.uniform(0, 100)
    when = loop.time() + random.choice([1e-14, 0.3, 3.0])
    loop.call_at(when, machine.scheduler.stop)
    machine.scheduler.run(1e6)
    assert when <= loop.time() <= when + 1e-6


def test_each_process_has_its_own_time(machine: Machine) -> None:
    async def tick(name: str) -> None:
        await asyncio.sleep(10)
        machine.say(name)

    fast, slow = machine.process(rate=1.25, offset=50), machine.process(rate=0.5, offset=7)
    fast.create_task(tick("fast"))
    machine.run(slow, tick("slow"))
    assert machine.said == [(8, "fast"), (20, "slow")]
    assert (fast.time(), slow.time()) == (75, 17)
    assert slow.clock.true(slow.time()) == 20
    slow.clock.jump_wall(-3600)
    assert slow.clock.wall() == 1.7e9 + 10 - 3600


def test_a_paused_process_takes_up_late_what_came_meanwhile(machine: Machine) -> None:
    async def main() -> None:
        machine.say("begins")
        await asyncio.sleep(1)
        machine.say("wakes")

    loop = machine.process()
    machine.scheduler.call_at(0.5, loop.pause)
    machine.scheduler.call_at(0.75, loop.pause)
    machine.scheduler.call_at(2, loop.resume)
    machine.scheduler.call_at(5, loop.resume)
    machine.run(loop, main())
    assert machine.said == [(0, "begins"), (5, "wakes")]


def test_a_process_can_be_stopped_between_two_callbacks(machine: Machine) -> None:
    loop = machine.process()
    for number in range(4):
        loop.call_soon(machine.say, str(number))

    def stop() -> None:
        loop.pause()
        machine.scheduler.call_at(3, loop.resume)

    loop.interrupt_after(2, stop)
    machine.scheduler.call_at(4, machine.scheduler.stop)
    machine.scheduler.run(10)
    assert machine.said == [(0, "0"), (0, "1"), (3, "2"), (3, "3")]


def test_of_a_killed_process_nothing_runs(machine: Machine) -> None:
    async def main() -> None:
        try:
            machine.say("begins")
            await asyncio.sleep(1)
        finally:
            machine.say("ends")

    loop = machine.process()
    task = loop.create_task(main())
    machine.scheduler.call_at(0.5, loop.kill)
    machine.scheduler.call_at(2, machine.scheduler.stop)
    machine.scheduler.run(10)
    loop.call_soon(machine.say, "late")
    machine.scheduler.call_at(3, machine.scheduler.stop)
    machine.scheduler.run(10)
    assert machine.said == [(0, "begins")]
    assert not task.done()


def test_what_no_task_catches_is_kept(machine: Machine) -> None:
    async def fail() -> None:
        raise ValueError("unheard")

    async def main() -> None:
        asyncio.create_task(fail())  # noqa: RUF006  nobody keeps it, and nobody hears of it
        await asyncio.sleep(1)

    loop = machine.process()
    machine.run(loop, main())
    assert [str(each["exception"]) for each in loop.failures] == ["unheard"]


def test_a_cancelled_timer_does_not_run(machine: Machine) -> None:
    loop = machine.process()
    loop.call_later(1, machine.say, "cancelled").cancel()
    loop.call_later(2, machine.scheduler.stop)
    machine.scheduler.run(10)
    assert machine.said == []


def test_what_never_comes_is_told(machine: Machine) -> None:
    with pytest.raises(OutOfTime, match="nothing will ever happen"):
        machine.scheduler.run(10)
    machine.process().call_later(11, machine.scheduler.stop)
    with pytest.raises(OutOfTime, match="beyond 10 s"):
        machine.scheduler.run(10)
