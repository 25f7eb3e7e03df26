"""What time a member is given: on a virtual clock, on which a loop stands still when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tenure.engines.etcd.cluster import give_time
from tenure.testing import VirtualClock

pytestmark = pytest.mark.usefixtures("loop_factory")

GIVEN = 1.0


async def spent_after(
    clock: VirtualClock,
    meanwhile: Callable[[], Awaitable[None]],
    *,
    settled: Callable[[], bool] = lambda: False,
) -> float | None:
    """Seconds after which the time was over; ``None`` when it never was."""
    begun, over = clock.now(), list[float]()
    give_time(GIVEN, settled, lambda: over.append(clock.now() - begun))
    await meanwhile()
    await asyncio.sleep(10 * GIVEN)
    return over[0] if over else None


async def nothing() -> None:
    pass


async def test_who_does_not_answer_has_the_time_that_was_given(clock: VirtualClock) -> None:
    assert await spent_after(clock, nothing) == pytest.approx(GIVEN)


async def test_an_answer_in_time_settles_it(clock: VirtualClock) -> None:
    answered_at = clock.now() + 0.9 * GIVEN
    assert await spent_after(clock, nothing, settled=lambda: clock.now() >= answered_at) is None


@pytest.mark.no_debug  # which tells of a loop that stands still
async def test_a_program_that_stood_still_reads_the_answer_before_it_judges(
    clock: VirtualClock,
) -> None:
    answered = False

    async def stand_still() -> None:
        nonlocal answered
        await asyncio.sleep(0.1 * GIVEN)
        clock.advance(3 * GIVEN)  # the answer has come, and nobody could read it
        asyncio.get_running_loop().call_later(0.01 * GIVEN, read)

    def read() -> None:
        nonlocal answered
        answered = True

    assert await spent_after(clock, stand_still, settled=lambda: answered) is None


@pytest.mark.no_debug
async def test_the_time_in_which_a_program_stood_still_is_not_counted(clock: VirtualClock) -> None:
    async def stand_still() -> None:
        await asyncio.sleep(0.1 * GIVEN)
        clock.advance(3 * GIVEN)

    after = await spent_after(clock, stand_still)
    assert after == pytest.approx(4.1 * GIVEN, abs=0.26 * GIVEN)


@pytest.mark.no_debug
async def test_a_program_that_is_always_late_judges_all_the_same(clock: VirtualClock) -> None:
    async def be_late() -> None:
        for _ in range(100):
            clock.advance(0.2 * GIVEN)
            await asyncio.sleep(0.2 * GIVEN)

    after = await spent_after(clock, be_late)
    assert after is not None
    assert GIVEN < after <= 3.5 * GIVEN
