"""An event of a request counts, although the answer to the request comes after it.

The answer is held back where the engine handles it. (On SQLite it is the committing thread that is
late: `sqlite/test_turns.py`; on simulated engines it is the way: `tests/testing/test_faults.py`.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Place, Removal, Withdrawn
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.program import Program, ProgramRequest, RequestStanding
from tenure.testing.stage import Stage
from tests.engines.stores import stores

PLACES: dict[str, Callable[[Any], Any]] = {
    "redis": lambda session: session,
    "redis-resp2": lambda session: session,
    "postgresql": lambda session: session,
    "tenure": lambda session: session._operations,
}
"""What handles an answer, in its method `placed`, by variant."""


@pytest.fixture(params=PLACES)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def waiting_behind(
    variant: str,
) -> AsyncIterator[tuple[Stage, Program, ProgramRequest, Program]]:
    """An owner with its request, and a program that has none yet."""
    kind = stores(variant)
    with kind.empty() as url:
        async with Stage(kind, url, SystemClock()) as stage:
            owner, waiter = await stage.programs(2)
            yield stage, owner, await owner.lock("m"), waiter


@contextmanager
def held_back(variant: str, program: Program) -> Iterator[None]:
    """Hold the answer to a request back until the end of the block."""
    place = PLACES[variant](program.session)
    answers: list[tuple[Any, ...]] = []
    usual, place.placed = place.placed, lambda *answer: answers.append(answer)
    try:
        yield
    finally:
        place.placed = usual
    (answer,) = answers
    usual(*answer)


async def joins(stage: Stage, program: Program) -> ProgramRequest:
    """Send a request, and return when it waits in the store."""
    request = program.send("m", EPHEMERAL_LIMIT, ephemeral=True)

    async def has_joined() -> bool:
        return (await stage.queue("m"))[1] == [program.id]

    await stage.until(has_joined, "the request waits in the store")
    assert request.standing is RequestStanding.SENT
    return request


async def test_a_grant_before_the_answer_counts(variant: str) -> None:
    async with waiting_behind(variant) as (stage, owner, held, waiter):
        with held_back(variant, waiter):
            waiting = await joins(stage, waiter)
            await owner.withdraw(held)
            token = await waiting.granted()
        assert (await waiting.answered()).place is Place.WAITING
        assert waiting.order_id == token
        assert (await owner.lock("m", timeout=0)).place is Place.REFUSED
        waiter.session.renew()
        assert await waiter.withdraw(waiting) is Withdrawn.LEFT
        assert (await owner.lock("m", timeout=0)).place is Place.GRANTED


async def test_a_lease_that_is_released_before_the_answer_stays_released(variant: str) -> None:
    async with waiting_behind(variant) as (stage, owner, held, waiter):
        with held_back(variant, waiter):
            waiting = await joins(stage, waiter)
            await owner.withdraw(held)
            await waiting.granted()
            assert await waiter.withdraw(waiting) is Withdrawn.LEFT
        await waiting.answered()
        assert (await owner.lock("m", timeout=0)).place is Place.GRANTED
        assert not waiter.recorder.removals


async def test_a_removal_before_the_answer_counts(variant: str) -> None:
    async with waiting_behind(variant) as (stage, owner, held, waiter):
        with held_back(variant, waiter):
            waiting = await joins(stage, waiter)
            (place,) = (await owner.describe("m")).waiters
            assert await stage.eye.evict(owner.node, "m", place.order_id)
            assert await waiting.removed() == Removal.EVICTED
        await waiting.answered()
        await owner.withdraw(held)
        assert not waiter.recorder.grants
        assert await stage.queue("m") == ([], [])
