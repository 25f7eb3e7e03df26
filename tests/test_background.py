"""Background steps survive unexpected errors, and their timers are armed again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import pytest

from tenure import background
from tenure.background import (
    ATTEMPTS,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    BackgroundQueue,
    BackgroundThread,
    BackgroundTimer,
    Ending,
    Failures,
    persist,
    supervise,
)
from tenure.errors import EngineError
from tenure.testing.clock import VirtualClock

ERRORS = (OSError(24, "too many open files"), MemoryError(), RuntimeError("no more threads"))
LOG = logging.getLogger("tenure.test")


@pytest.fixture(autouse=True)
def virtual_time(loop_factory: object) -> None:
    """Every coroutine test here runs on the virtual clock."""


class Step:
    """A step that raises the errors that it was given, one after the other, and then none."""

    def __init__(self, clock: VirtualClock, *errors: BaseException) -> None:
        self.clock = clock
        self.start = clock.now()
        self.errors = list(errors)
        self.ran: list[float] = []
        self.done = asyncio.Event()

    def __call__(self) -> None:
        self.ran.append(self.clock.now() - self.start)
        if self.errors:
            raise self.errors.pop(0)
        self.done.set()

    async def awaited(self) -> None:
        self()


def timer_of(step: Step) -> BackgroundTimer:
    loop = asyncio.get_running_loop()
    return BackgroundTimer(loop, step.clock.now, step, Failures("the step", LOG))


def is_armed(timer: BackgroundTimer) -> bool:
    return timer.armed


def fail(error: Exception) -> None:
    raise error


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == LOG.name]


# Timers


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_step_that_fails_is_logged_and_run_again(
    error: Exception, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(clock, error)
    timer_of(step).by(step.start + 5)
    await step.done.wait()
    assert step.ran == pytest.approx([5, 5 + FIRST_PAUSE])
    (message,) = messages(caplog)
    assert message == f"background task failed: task='the step' error={error!r}"


async def test_the_pause_grows_while_steps_fail_and_is_short_again_after_a_success(
    clock: VirtualClock,
) -> None:
    step = Step(clock, *(RuntimeError("again") for _ in range(8)))
    timer = timer_of(step)
    timer.soon()
    await step.done.wait()
    pauses = [after - before for before, after in zip(step.ran, step.ran[1:], strict=False)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)
    step.done.clear()
    step.errors.append(RuntimeError("once more"))
    timer.soon()
    await step.done.wait()
    assert step.ran[-1] - step.ran[-2] == pytest.approx(FIRST_PAUSE)


async def test_the_same_cause_is_logged_once_until_it_was_quiet_for_a_while(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    failures = Failures("the step", LOG)
    for _ in range(100):
        failures.failed(OSError("a"))
        failures.failed(OSError("b"))
        failures.succeeded()
    assert len(messages(caplog)) == 2
    now = background.QUIET
    failures.failed(OSError("a"))
    assert len(messages(caplog)) == 3


async def test_ever_new_causes_take_no_more_memory(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures("the step", LOG)
    for number in range(100):
        failures.report(OSError(number))
    assert len(messages(caplog)) == 100
    failures.report(OSError(99))
    assert len(messages(caplog)) == 100


async def test_an_error_that_explains_itself_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Failures("the step", LOG).contained():
        fail(EngineError("the disk is full; make room"))
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "background task failed: task='the step' error=the disk is full; make room"
    )
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


async def test_a_timer_fires_at_the_earliest_of_the_times_that_it_was_given(
    clock: VirtualClock,
) -> None:
    step = Step(clock)
    timer = timer_of(step)
    timer.by(step.start + 9)
    timer.by(step.start + 3)
    timer.by(step.start + 6)
    assert is_armed(timer)
    await step.done.wait()
    assert step.ran == [3]
    assert not is_armed(timer)
    timer.at(step.start + 20)
    timer.at(step.start + 30)
    timer.soon()
    timer.soon()
    step.done.clear()
    await step.done.wait()
    assert step.ran == [3, 3]


async def test_a_cancelled_timer_runs_nothing_and_neither_does_one_cancelled_in_its_step(
    clock: VirtualClock,
) -> None:
    step = Step(clock)
    timer = timer_of(step)
    timer.by(step.start + 1)
    timer.cancel()
    timer.cancel()

    def cancelled() -> None:
        step()
        another.cancel()
        raise OSError("too late")

    another = BackgroundTimer(
        asyncio.get_running_loop(), clock.now, cancelled, Failures("the step", LOG)
    )
    another.by(step.start + 2)
    await asyncio.sleep(10)
    assert step.ran == [2]


async def test_a_step_that_is_run_at_once_takes_the_place_of_the_next(clock: VirtualClock) -> None:
    step = Step(clock, OSError("first"))
    timer = timer_of(step)
    timer.by(step.start + 0.01)
    timer.run()
    assert step.ran == [0]
    await step.done.wait()
    assert step.ran == pytest.approx([0, FIRST_PAUSE])


@pytest.mark.parametrize("rearmed", [False, True])
def test_an_interrupt_ends_what_it_hit_and_not_the_timer(
    rearmed: bool, clock: VirtualClock
) -> None:
    from tenure.testing.clock import VirtualLoop

    loop = VirtualLoop(clock)
    start = clock.now()
    interrupts = [KeyboardInterrupt()]

    def step() -> None:
        if rearmed and interrupts:
            timer.by(clock.now() + 0.5)
        if interrupts:
            raise interrupts.pop()
        loop.stop()

    timer = BackgroundTimer(loop, clock.now, step, Failures("the step", LOG))
    timer.soon()
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_forever()
    assert clock.now() - start == pytest.approx(0.5 if rearmed else LONGEST_PAUSE)
    loop.close()


# Queues


class Receiver:
    """Handles items, and fails for some of them."""

    def __init__(self, clock: VirtualClock, failing: dict[str, int]) -> None:
        self.failing = failing
        self.handled: list[str] = []
        self.queue: BackgroundQueue[str] = BackgroundQueue(
            asyncio.get_running_loop(), clock.now, self, Failures("delivering", LOG)
        )

    def __call__(self, item: str) -> None:
        if self.failing.get(item, 0):
            self.failing[item] -= 1
            raise MemoryError
        self.handled.append(item)
        if item == "clear":
            self.queue.clear()
        if item == "more":
            self.queue.put(["the next iteration's"])


async def test_items_are_handled_in_order_although_some_fail_at_first(clock: VirtualClock) -> None:
    receiver = Receiver(clock, {"a": 2, "c": 1})
    receiver.queue.put("ab")
    receiver.queue.put("cd")
    receiver.queue.put("")
    assert receiver.queue.items
    await asyncio.sleep(5)
    assert receiver.handled == ["a", "b", "c", "d"]
    assert not receiver.queue.items


async def test_an_item_that_keeps_failing_is_dropped_for_the_others(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(clock, {"bad": 1000})
    receiver.queue.put(["bad", "good"])
    await asyncio.sleep(30)
    assert receiver.handled == ["good"]
    assert receiver.failing["bad"] == 1000 - ATTEMPTS
    assert (
        messages(caplog)[-1]
        == f"item dropped after repeated failures: task='delivering' item='bad' count={ATTEMPTS}"
    )


async def test_what_is_put_while_items_are_handled_is_handled_later(clock: VirtualClock) -> None:
    receiver = Receiver(clock, {})
    receiver.queue.put(["more", "last"])
    await asyncio.sleep(1)
    assert receiver.handled == ["more", "last", "the next iteration's"]


async def test_items_are_handled_at_once_unless_others_wait(clock: VirtualClock) -> None:
    receiver = Receiver(clock, {"c": 1})
    receiver.queue.handle("ab")
    receiver.queue.handle("")
    assert receiver.handled == ["a", "b"]
    receiver.queue.handle("cd")
    receiver.queue.handle("e")
    assert receiver.handled == ["a", "b"]
    await asyncio.sleep(1)
    assert receiver.handled == ["a", "b", "c", "d", "e"]
    assert not receiver.queue.items


async def test_a_queue_that_is_cleared_while_it_handles_items_handles_no_more(
    clock: VirtualClock,
) -> None:
    receiver = Receiver(clock, {})
    receiver.queue.put(["clear", "never"])
    await asyncio.sleep(1)
    assert receiver.handled == ["clear"]
    receiver.queue.put(["again"])
    await asyncio.sleep(1)
    assert receiver.handled == ["clear", "again"]


async def test_items_are_put_from_any_thread_and_the_first_wakes_the_loop(
    clock: VirtualClock,
) -> None:
    receiver = Receiver(clock, {"b": 1})
    for item in "abc":
        receiver.queue.put_threadsafe(item)
    await asyncio.sleep(1)
    assert receiver.handled == ["a", "b", "c"]


async def test_items_that_two_threads_put_at_the_same_time_are_handled(
    clock: VirtualClock,
) -> None:
    handled: list[str] = []
    queue: BackgroundQueue[str] = BackgroundQueue(
        asyncio.get_running_loop(), clock.now, handled.append, Failures("delivering", LOG)
    )

    class Interleaved(deque[str]):
        """Another thread puts an item as soon as the first one has appended its own."""

        def append(self, item: str, /) -> None:
            super().append(item)
            if item == "a":
                queue.put_threadsafe("b")

    queue.items = Interleaved()
    queue.put_threadsafe("a")
    await asyncio.sleep(1)
    assert handled == ["a", "b"]


async def test_an_item_put_in_the_pause_after_a_failure_does_not_shorten_it(
    clock: VirtualClock,
) -> None:
    receiver = Receiver(clock, {"a": 2})
    receiver.queue.put_threadsafe("a")
    await asyncio.sleep(FIRST_PAUSE / 2)
    receiver.queue.put_threadsafe("b")
    await asyncio.sleep(2 * FIRST_PAUSE)
    assert receiver.handled == []
    await asyncio.sleep(FIRST_PAUSE)
    assert receiver.handled == ["a", "b"]


def test_items_for_a_closed_loop_are_handled_no_more(clock: VirtualClock) -> None:
    loop = asyncio.new_event_loop()
    handled: list[str] = []
    queue: BackgroundQueue[str] = BackgroundQueue(
        loop, clock.now, handled.append, Failures("delivering", LOG)
    )
    loop.close()
    queue.put_threadsafe("a")
    assert handled == []


# Tasks


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_task_that_fails_is_logged_and_run_again(
    error: Exception, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(clock, error)
    await supervise(step.awaited, Failures("the step", LOG))
    assert step.ran == pytest.approx([0, FIRST_PAUSE])
    assert len(messages(caplog)) == 1


async def test_cancelling_a_supervised_task_ends_it(clock: VirtualClock) -> None:
    for errors in ([], [OSError("in the pause")]):
        step = Step(clock, *errors)

        async def wait(step: Step = step) -> None:
            step()
            await asyncio.Event().wait()

        task = asyncio.create_task(supervise(wait, Failures("the step", LOG)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(step.ran) == 1


# Endings, in loops that cancel all tasks when they end


class Closing:
    """A step that notes its calls, and ends when it may."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.called = asyncio.Event()
        self.may_end = asyncio.Event()

    async def step(self) -> None:
        self.begun.append(len(self.begun))
        self.called.set()
        await self.may_end.wait()


async def call_again(closing: Closing) -> None:
    """Wait until the step is called once more."""
    closing.called.clear()
    await closing.called.wait()


async def test_a_cancelled_caller_does_not_stop_an_ending() -> None:
    closing = Closing()
    ending = Ending(closing.step)
    caller, other = asyncio.ensure_future(ending.wait()), asyncio.ensure_future(ending.wait())
    await closing.called.wait()
    caller.cancel()
    await asyncio.wait([caller])
    closing.may_end.set()
    await other
    await ending.wait()
    assert closing.begun == [0]


async def test_an_ending_that_is_cancelled_is_begun_again() -> None:
    closing = Closing()
    ending = Ending(closing.step)
    await closing.called.wait()
    ending.task.cancel()
    await call_again(closing)
    closing.may_end.set()
    await ending.wait()
    assert closing.begun == [0, 1]


async def test_an_ending_that_is_cancelled_before_it_runs_is_begun_by_one_of_its_callers() -> None:
    closing = Closing()
    started: list[asyncio.Task[None]] = []

    def start(step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        started.append(asyncio.create_task(step))
        return started[-1]

    ending = Ending(closing.step, start)
    ending.task.cancel()
    callers = [asyncio.ensure_future(ending.wait()) for _ in range(3)]
    closing.may_end.set()
    await asyncio.gather(*callers)
    assert closing.begun == [0]
    assert len(started) == 2


async def test_an_ending_that_is_cancelled_twice_is_over() -> None:
    closing = Closing()
    ending = Ending(closing.step)
    await closing.called.wait()
    ending.task.cancel()
    await call_again(closing)
    ending.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending.wait()
    with pytest.raises(asyncio.CancelledError):
        await ending.wait()
    assert closing.begun == [0, 1]


@pytest.mark.parametrize("iterations", range(2))
def test_an_ending_that_begins_as_the_loop_ends_is_carried_out(iterations: int) -> None:
    done: list[str] = []

    async def step() -> None:
        await asyncio.sleep(0)
        done.append("carried out")

    async def end(stop: asyncio.Event) -> None:
        await stop.wait()
        for _ in range(iterations):
            await asyncio.sleep(0)
        await Ending(step).wait()

    async def main() -> None:
        stop = asyncio.Event()
        tasks.append(asyncio.create_task(end(stop)))
        asyncio.get_running_loop().call_soon(stop.set)
        await stop.wait()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert done == ["carried out"]


async def test_each_caller_of_an_ending_gets_its_failure() -> None:
    async def fail() -> None:
        raise EngineError("the disk is full")

    ending = Ending(fail)
    for _ in range(2):
        with pytest.raises(EngineError, match="the disk is full"):
            await ending.wait()


async def test_what_persists_is_ended_by_a_second_cancellation() -> None:
    again = asyncio.Event()
    calls = 0

    async def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            again.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(persist(step))
    await asyncio.sleep(0)
    task.cancel()
    await again.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Threads


def test_a_thread_that_could_not_be_started_is_started_by_the_next_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = threading.Event()
    thread = BackgroundThread("tenure-test", ran.wait)
    thread.join()
    with monkeypatch.context() as patch:

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            thread.start()
    thread.start()
    thread.start()
    assert thread.alive
    assert not thread.join(0.001)
    ran.set()
    assert thread.join()
    thread.start()
    assert thread.join()
