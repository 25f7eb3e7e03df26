"""Time that is not the machine's: the clock that stands still, and the loop that moves it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from tenure.clock import Clock
from tenure.testing.clock import Deadlock, VirtualClock, VirtualLoop, run

A_DAY = 24 * 3600.0


def loop_time() -> float:
    return asyncio.get_running_loop().time()


# The clock


def test_the_clock_is_a_clock() -> None:
    clock: Clock = VirtualClock(now=5.0, wall=1000.0)
    assert clock.virtual
    assert (clock.now(), clock.wall()) == (5.0, 1000.0)


def test_the_clock_stands_still() -> None:
    clock = VirtualClock()
    first = (clock.now(), clock.wall())
    time.sleep(0.001)
    assert (clock.now(), clock.wall()) == first


def test_time_passes_on_both_readings() -> None:
    clock = VirtualClock(now=5.0, wall=1000.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (7.5, 1002.5)
    clock.advance_to(10.0)
    assert (clock.now(), clock.wall()) == (10.0, 1005.0)


@pytest.mark.parametrize("wall", [500.0, 5000.0])
def test_the_wall_clock_jumps_while_no_time_passes(wall: float) -> None:
    clock = VirtualClock(now=5.0, wall=1000.0)
    clock.set_wall(wall)
    assert (clock.now(), clock.wall()) == (5.0, wall)
    clock.advance(1)
    assert (clock.now(), clock.wall()) == (6.0, wall + 1)


@pytest.mark.parametrize("seconds", [-0.001, float("nan")])
def test_time_does_not_run_backwards(seconds: float) -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(seconds)


def test_the_clock_tells_its_readings() -> None:
    assert repr(VirtualClock(now=5.0, wall=1000.5)) == "<VirtualClock now=5 wall=1000.500000>"


# The loop


def test_a_sleep_takes_no_time_and_moves_the_clock() -> None:
    clock = VirtualClock()
    began, really = clock.now(), time.monotonic()
    run(asyncio.sleep(3 * A_DAY), clock)
    assert clock.now() - began == pytest.approx(3 * A_DAY)
    assert time.monotonic() - really < 60


def test_run_returns_what_the_coroutine_returns_and_brings_a_clock() -> None:
    async def answer() -> float:
        return loop_time()

    assert run(answer()) == VirtualClock().now()


def test_what_the_coroutine_raises_comes_through() -> None:
    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fails())


def test_timers_come_in_the_order_of_their_times_and_none_is_late() -> None:
    async def scenario() -> list[tuple[float, str]]:
        began, seen = loop_time(), []

        async def at(when: float, what: str) -> None:
            await asyncio.sleep(when)
            seen.append((round(loop_time() - began, 6), what))

        async with asyncio.TaskGroup() as group:
            for when, what in [(3.0, "c"), (1.0, "a"), (0.0, "now"), (2.0, "b"), (A_DAY, "d")]:
                group.create_task(at(when, what))
        return seen

    assert run(scenario()) == [(0, "now"), (1, "a"), (2, "b"), (3, "c"), (A_DAY, "d")]


def test_time_passes_only_when_nothing_is_ready() -> None:
    async def scenario() -> float:
        began = loop_time()
        sleeper = asyncio.create_task(asyncio.sleep(0.001))
        for _ in range(1000):
            await asyncio.sleep(0)
        passed = loop_time() - began
        await sleeper
        return passed

    assert run(scenario()) == 0


def test_a_timeout_is_virtual() -> None:
    async def scenario() -> float:
        began = loop_time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        return loop_time() - began

    assert run(scenario()) == pytest.approx(120)


def test_a_clock_that_is_moved_makes_timers_due() -> None:
    async def scenario(clock: VirtualClock) -> float:
        sleeper = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        clock.advance(3600)  # as if the machine had been suspended
        await sleeper
        return clock.now()

    clock = VirtualClock(now=0)
    assert run(scenario(clock), clock) == 3600


def test_a_history_repeats_itself() -> None:
    async def scenario() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def worker(number: int) -> None:
            for step in range(5):
                await asyncio.sleep((number * 7 + step * 3) % 5 / 10)
                seen.append((loop_time(), number))

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(worker(number))
        return seen

    assert run(scenario()) == run(scenario())


def test_sockets_answered_on_the_loop_itself_need_no_patience() -> None:
    async def scenario() -> bytes:
        here, there = socket.socketpair()
        reader, here_writer = await asyncio.open_connection(sock=here)
        _, writer = await asyncio.open_connection(sock=there)
        async with asyncio.timeout(3600):
            asyncio.get_running_loop().call_later(60, writer.write, b"hello\n")
            answer = await reader.readline()
        for end in (here_writer, writer):
            end.close()
            await end.wait_closed()
        return answer

    assert run(scenario()) == b"hello\n"


def test_debug_mode_is_passed_on() -> None:
    async def debug() -> bool:
        return asyncio.get_running_loop().get_debug()

    assert run(debug(), debug=True)
    assert not run(debug(), debug=False)


# When nothing can happen any more


async def wait_for_what_never_comes() -> None:
    await asyncio.Event().wait()


def test_a_deadlock_is_an_error_that_names_the_tasks_and_their_lines() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_what_never_comes(), name="the writer")
            group.create_task(wait_for_what_never_comes(), name="the reader")

    with pytest.raises(Deadlock) as caught:
        run(scenario())
    message = str(caught.value)
    for part in ["no timer", "the writer", "the reader", "await asyncio.Event().wait()"]:
        assert part in message
    assert "test_clock.py" in message
    assert "locks.py" not in message


def test_the_stuck_tasks_are_cancelled_and_may_clean_up() -> None:
    cleaned = []

    async def scenario() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append(True)

    with pytest.raises(Deadlock):
        run(scenario())
    assert cleaned


def test_a_future_that_no_task_waits_for_is_a_deadlock_too() -> None:
    loop = VirtualLoop(VirtualClock())
    try:
        with pytest.raises(Deadlock, match="no task is left"):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()


def test_what_ticks_for_ever_does_not_hide_a_deadlock() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.call_later(1, tick)

        tick()
        await wait_for_what_never_comes()

    with pytest.raises(Deadlock, match=r"(?s)beyond the horizon.*Event"):
        run(scenario(), horizon=100)


def test_a_task_that_has_not_begun_has_a_name_all_the_same() -> None:
    class Silent:
        def __await__(self) -> Any:
            return asyncio.get_running_loop().create_future().__await__()

    async def scenario() -> None:
        await Silent()

    with pytest.raises(Deadlock, match=r"scenario.*await Silent\(\)"):
        run(scenario())


# Threads


def test_a_thread_is_refused_where_nobody_would_wait_for_it() -> None:
    async def scenario() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="real_wait"):
        run(scenario())


def test_with_patience_a_thread_is_waited_for() -> None:
    assert run(asyncio.to_thread(lambda: 42), real_wait=30) == 42


def test_with_patience_what_a_thread_calls_arrives_before_time_jumps() -> None:
    async def scenario() -> float:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(news.set))
        began = loop.time()
        async with asyncio.timeout(3600):
            thread.start()
            await news.wait()
        thread.join()
        return loop.time() - began

    assert run(scenario(), real_wait=30) == 0
