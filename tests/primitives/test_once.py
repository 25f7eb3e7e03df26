"""A call that acquires something may be awaited, entered, or made a task: once."""

from __future__ import annotations

import asyncio
import gc
import types
import warnings
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType

import pytest

from tenure._client.once import Once
from tenure.errors import Misuse


class Thing:
    def __init__(self) -> None:
        self.history: list[str] = []

    def _enter(self) -> None:
        self.history.append("entered")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.history.append(f"left with {error!r}")
        self.left = (kind, error, trace)


async def make(thing: Thing) -> Thing:
    thing.history.append("made")
    await asyncio.sleep(0)
    return thing


async def test_awaited_it_gives_the_object_and_enters_nothing() -> None:
    thing = Thing()
    assert await Once("the call", make, thing) is thing
    assert thing.history == ["made"]


async def test_entered_it_gives_the_object_and_enters_that() -> None:
    async with Once("the call", make, Thing()) as thing:
        assert thing.history == ["made", "entered"]
    assert thing.history[2:] == ["left with None"]


async def test_the_body_s_error_reaches_the_object() -> None:
    thing = Thing()
    with pytest.raises(KeyError) as raised:
        async with Once("the call", make, thing):
            raise KeyError("x")
    assert thing.history[2:] == ["left with KeyError('x')"]
    kind, error, trace = thing.left
    assert (kind, error) == (KeyError, raised.value)
    assert trace is not None


def test_what_its_driver_sends_reaches_the_function() -> None:
    @types.coroutine
    def asks() -> Generator[str, Thing, Thing]:
        return (yield "which?")

    async def answered() -> Thing:
        return await asks()

    once, thing = Once("the call", answered), Thing()
    assert once.send(None) == "which?"
    with pytest.raises(StopIteration) as done:
        once.send(thing)
    assert done.value.value is thing


async def test_it_can_be_a_task() -> None:
    thing = Thing()
    call = Once("the call", make, thing)
    assert asyncio.iscoroutine(call)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(call)
        assert "Once" in repr(task)
    assert task.result() is thing


@pytest.mark.parametrize("how", [asyncio.gather, lambda call: asyncio.wait_for(call, 5)])
async def test_it_can_be_given_to_what_takes_coroutines(how: object) -> None:
    assert callable(how)
    result = await how(Once("the call", make, Thing()))
    assert result


async def test_a_task_of_it_that_is_cancelled_before_it_began_has_done_nothing() -> None:
    thing = Thing()
    task: asyncio.Task[Thing] = asyncio.create_task(Once("the call", make, thing))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thing.history == []


async def test_a_task_of_it_can_be_cancelled_midway() -> None:
    task: asyncio.Task[Thing] = asyncio.create_task(Once("the call", make, Thing()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("again", ["await", "enter", "task"])
async def test_a_second_use_is_an_error(again: str) -> None:
    call = Once("the call", make, Thing())
    await call

    async def enter() -> None:
        async with call:
            pytest.fail("entered twice")

    uses: dict[str, Callable[[], Awaitable[object]]] = {
        "await": lambda: call,
        "enter": enter,
        "task": lambda: asyncio.create_task(call),
    }
    with pytest.raises(Misuse, match="the call has been awaited or entered already"):
        await uses[again]()


def test_dropped_unused_it_warns() -> None:
    call = Once("the call", make, Thing())
    with pytest.warns(RuntimeWarning, match="the call was never awaited or entered") as warned:
        del call
    assert isinstance(warned[0].source, Once)


def test_the_warning_is_about_the_line_that_dropped_it() -> None:
    call = Once("the call", make, Thing())
    with pytest.warns(RuntimeWarning) as warned:
        del call
    assert warned[0].filename == __file__


async def test_used_or_closed_it_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        await Once("the call", make, Thing())
        Once("the call", make, Thing()).close()
        running = Once("the call", make, Thing())
        running.send(None)
        running.close()
        gc.collect()
    assert warned == []


def test_a_constructor_that_raises_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(TypeError):
            Once()  # type: ignore[call-arg]
        gc.collect()
    assert warned == []


async def test_it_tells_what_it_is() -> None:
    call = Once("the call", make, Thing())
    assert repr(call) == "<the call, to be awaited or entered>"
    await call
    assert repr(call) == "<the call>"
