"""Answers that are heard of in the instant in which they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tenure.engines.contract import Prompt, when_answered


def answers_of(answer: asyncio.Future[Any]) -> list[asyncio.Future[Any]]:
    """What is heard of an answer, as it is heard."""
    heard: list[asyncio.Future[Any]] = []
    when_answered(answer, heard.append)
    return heard


async def test_a_result_is_heard_of_while_it_is_set() -> None:
    answer: Prompt[int] = Prompt(asyncio.get_running_loop())
    first, second = answers_of(answer), answers_of(answer)
    answer.set_result(1)
    assert first == second == [answer]
    assert await answer == 1
    assert first == second == [answer], "and once only"


async def test_a_failure_is_heard_of_at_a_later_turn() -> None:
    answer: Prompt[int] = Prompt(asyncio.get_running_loop())
    heard = answers_of(answer)
    answer.set_exception(LookupError("none"))
    assert heard == []
    with pytest.raises(LookupError):
        await answer
    await asyncio.sleep(0)
    assert heard == [answer]


async def test_a_cancellation_is_heard_of_at_a_later_turn_and_once() -> None:
    answer: Prompt[int] = Prompt(asyncio.get_running_loop())
    heard = answers_of(answer)
    assert answer.cancel("nobody wants it")
    assert not answer.cancel()
    assert heard == []
    await asyncio.sleep(0)
    assert heard == [answer]


async def test_what_is_there_already_is_heard_of_at_the_next_turn() -> None:
    answer: Prompt[int] = Prompt(asyncio.get_running_loop())
    answer.set_result(1)
    heard = answers_of(answer)
    assert heard == []
    await asyncio.sleep(0)
    assert heard == [answer]


async def test_any_other_future_is_heard_of_too() -> None:
    answer = asyncio.get_running_loop().create_future()
    heard = answers_of(answer)
    answer.set_result(1)
    await asyncio.sleep(0)
    assert heard == [answer]
