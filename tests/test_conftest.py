"""What runs the coroutine tests notices what a test leaves behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from urllib.request import proxy_bypass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import LeftBehind, LoopFactory, run


class MarkedLoop(asyncio.SelectorEventLoop):
    """A loop that a test can recognise."""


@pytest.fixture
def loop_factory() -> LoopFactory:
    return MarkedLoop


async def test_a_coroutine_is_run_in_debug_mode() -> None:
    assert asyncio.get_running_loop().get_debug()


@pytest.mark.no_debug
async def test_the_mark_turns_debug_mode_off() -> None:
    assert not asyncio.get_running_loop().get_debug()


async def test_a_fixture_makes_the_loop(loop_factory: LoopFactory) -> None:
    assert isinstance(asyncio.get_running_loop(), MarkedLoop)


@given(number=st.integers())
async def test_hypothesis_runs_a_coroutine_for_each_example(number: int) -> None:
    assert asyncio.get_running_loop().get_debug()
    await asyncio.sleep(0)
    assert number == int(str(number))


def test_a_failure_is_the_tests_own() -> None:
    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fails())


def test_a_task_left_running_fails_the_test() -> None:
    async def leaves_a_task() -> None:
        asyncio.create_task(asyncio.sleep(3600), name="forgotten")  # noqa: RUF006  forgotten it is

    with pytest.raises(LeftBehind, match=r"still running.*forgotten"):
        run(leaves_a_task())


def test_a_task_that_is_done_may_be_left() -> None:
    async def leaves_nothing() -> None:
        task = asyncio.create_task(asyncio.sleep(0))
        await task

    run(leaves_nothing())


def _task_that_fails() -> None:
    async def fails() -> None:
        raise KeyError("unheard")

    asyncio.create_task(fails())  # noqa: RUF006  that nobody keeps it is the point


def _task_that_fails_in_a_cycle() -> None:
    async def fails() -> None:
        cycle: list[object] = [asyncio.current_task()]
        cycle.append(cycle)
        raise KeyError("unheard")

    asyncio.create_task(fails())  # noqa: RUF006  that nobody keeps it is the point


def _callback_that_fails() -> None:
    def fails() -> None:
        raise KeyError("unheard")

    asyncio.get_running_loop().call_soon(fails)


@pytest.mark.parametrize(
    "start", [_task_that_fails, _task_that_fails_in_a_cycle, _callback_that_fails]
)
def test_an_error_that_nobody_hears_of_fails_the_test(start: Callable[[], None]) -> None:
    async def hears_nothing() -> None:
        start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with pytest.raises(LeftBehind, match="unheard"):
        run(hears_nothing())


def test_the_persons_settings_are_out_of_sight() -> None:
    assert not [name for name in os.environ if name.startswith("TENURE_")]
    assert "state" in os.environ["XDG_STATE_HOME"]
    assert proxy_bypass("127.0.0.1")
    assert proxy_bypass("localhost")
