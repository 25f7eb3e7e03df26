"""A request that was given up leaves its queue, however often that has to be tried."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest

from tenure.errors import EngineError, LeaseLost, SessionExpired
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def test_a_failed_withdrawal_is_tried_again_with_longer_and_longer_pauses(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", *[EngineError(f"fault {number}") for number in range(12)])
        started = clock.now()
        with caplog.at_level(logging.WARNING, logger="tenure"), pytest.raises(EngineError):
            await lease.release()
        (again,) = session._core.release_retries._tasks
        await asyncio.wait([again])
        assert clock.now() - started == pytest.approx(0.05 * (2**7 - 1) + 5 * 5)
        assert caplog.messages == [
            f"release failed, retrying: node=/default name='m' error=fault {number}"
            for number in range(1, 12)
        ]
        assert await world.queue("m") == []
        assert session._core.release_retries._tasks == set()


async def test_it_takes_out_that_request_and_no_other(world: World) -> None:
    async with world.client() as client, client.session() as session:
        released, kept = await session.mutex("m").lock(), await session.mutex("n").lock()
        await released.release()
        assert await world.queue("m") == []
        assert [each.order_id for each in await world.queue("n")] == [kept.fencing_token]


async def test_nobody_needs_to_wait_for_it(world: World) -> None:
    client, engine = world.slow(2)
    async with client, client.session() as session, world.client() as other:
        held = await other.mutex("m").lock()
        engine.fail("withdraw", EngineError("a fault"))
        waiting = asyncio.create_task(session.mutex("m").lock())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(1)
        assert [request.order_id for request in await world.queue("m")] == [held.fencing_token]


async def test_an_engine_that_answers_at_once_may_fail_at_once(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        engine = session._core.engine
        withdraw = engine.withdraw

        def fail(_hold: int) -> NoReturn:
            engine.withdraw = withdraw  # type: ignore[method-assign]
            raise EngineError("a fault")

        engine.withdraw = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineError):
            await lease.release()
        await asyncio.sleep(1)
        assert await world.queue("m") == []


@pytest.mark.parametrize("engine_turns", [0, 2])
async def test_the_end_of_the_session_settles_it(world: World, engine_turns: int) -> None:
    client, engine = world.slow(engine_turns)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", *[EngineError("a fault")] * 3)
        with pytest.raises(EngineError):
            await lease.release()
        await session.aclose()
        assert session._core.release_retries._tasks == set()
        assert await world.queue("m") == []


async def test_a_store_that_says_the_session_is_over_ends_it_and_the_release_is_late(
    world: World,
) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", SessionExpired("over"))
        with pytest.raises(LeaseLost) as caught:
            await lease.release()
        assert isinstance(caught.value.__cause__, SessionExpired)
        assert session.state == "expired"
        session = await client.session()
        lease = await session.mutex("n").lock()
        engine.fail("withdraw", EngineError("a fault"), SessionExpired("over"))
        with pytest.raises(EngineError):
            await lease.release()
        await asyncio.sleep(1)
        assert session.state == "expired"


async def test_an_engine_may_say_so_in_the_call(world: World) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()

        def over(_hold: int) -> None:
            raise SessionExpired("over")

        (slow,) = engine.sessions
        slow.withdraw = over  # type: ignore[assignment, method-assign]
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await lease.release()
            assert session.state == "expired"


async def test_an_answer_that_comes_after_the_end_changes_nothing(world: World) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", EngineError("a fault"))
        engine.back.flowing = False
        releasing = asyncio.create_task(lease.release())
        await turns()
        closing = asyncio.create_task(session.aclose())
        await turns()
        engine.back.flowing = True
        await asyncio.wait([releasing, closing])
        await releasing
        assert session._core.release_retries._tasks == set()
