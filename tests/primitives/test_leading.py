"""Supervised leadership: what is retried, what is raised, and what is resigned."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from tenure._client.election import Leadership
from tenure._client.leading import FIRST_PAUSE, LONGEST_PAUSE, Retry, Supervision
from tenure.errors import (
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    NodeNotFound,
    SessionClosed,
    SessionExpired,
)
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, for_ever, turns


async def test_the_work_runs_while_leading_and_its_result_is_returned(world: World) -> None:
    async def work(leadership: Leadership) -> str:
        assert leadership.held
        (leader,) = await world.queue("scheduler")
        assert leader.data == b"10.0.0.7:80"
        assert leader.order_id == leadership.fencing_token
        return "done"

    async with world.client() as client:
        assert await client.lead("scheduler", work, data=b"10.0.0.7:80") == "done"
        assert await world.queue("scheduler") == []


async def test_an_error_of_the_work_is_logged_and_the_next_campaign_follows(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    began: list[float] = []

    async def work(_: Leadership) -> None:
        began.append(clock.now())
        if len(began) < 4:
            raise ValueError(f"failure {len(began)}")

    async with world.client() as client:
        await client.lead("scheduler", work)
    logged = [record for record in caplog.records if "leader's work failed" in record.message]
    assert len(logged) == 3
    assert all(record.levelno == logging.ERROR and record.exc_info for record in logged)
    assert "name='scheduler'" in logged[0].message
    assert "ValueError('failure 1')" in logged[0].message
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert 0.5 * FIRST_PAUSE <= pauses[0] <= FIRST_PAUSE
    assert 2 * FIRST_PAUSE <= pauses[2] <= 4 * FIRST_PAUSE


async def test_another_candidate_leads_during_the_pause(world: World) -> None:
    order: list[str] = []

    async def fails_once(_: Leadership) -> None:
        order.append("first")
        if len(order) == 1:
            raise ValueError("failure")

    async def other(_: Leadership) -> None:
        order.append("other")

    async with world.client() as client, asyncio.TaskGroup() as group:
        group.create_task(client.lead("scheduler", fails_once))
        await turns()
        group.create_task(client.lead("scheduler", other))
    assert order == ["first", "other", "first"]


@pytest.mark.parametrize("how", ["session", "lease", "group"])
async def test_a_loss_cancels_the_work_and_the_next_campaign_follows(
    world: World, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    ended: list[str] = []
    leading = asyncio.Event()

    async def work(leadership: Leadership) -> None:
        if ended:
            return
        leading.set()
        try:
            if how == "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(check_for_ever(leadership))
            await for_ever()
        finally:
            ended.append("first")

    async def check_for_ever(leadership: Leadership) -> None:
        await leadership.wait_lost()
        leadership.check()

    async with world.client() as client, asyncio.TaskGroup() as group:
        group.create_task(client.lead("scheduler", work, description="mine"))
        await leading.wait()
        if how == "session":
            await world.end_sessions("mine")
        else:
            (leader,) = await world.queue("scheduler")
            await client.evict("/default", "scheduler", leader.order_id)
    assert ended == ["first"]
    (record,) = (record for record in caplog.records if "next campaign after" in record.message)
    assert record.levelno == logging.WARNING
    assert "node=/default name='scheduler'" in record.message


@pytest.mark.parametrize("retry", [False, lambda error: not isinstance(error, KeyError)])
async def test_an_error_that_is_not_to_be_retried_is_raised_and_the_leader_resigns(
    world: World, retry: Retry
) -> None:
    async def work(_: Leadership) -> None:
        raise KeyError("no such job")

    async with world.client() as client:
        with pytest.raises(KeyError):
            await client.lead("scheduler", work, retry=retry)
        assert await world.queue("scheduler") == []


async def test_an_unreachable_store_is_campaigned_at_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow()
    async with client:
        engine.fail("attach", *[EngineUnavailable("the store is down") for _ in range(2)])

        async def work(_: Leadership) -> str:
            return "led"

        assert await client.lead("scheduler", work) == "led"
    failures = [record for record in caplog.records if "campaign failed" in record.message]
    assert len(failures) == 2
    assert "the store is down" in failures[0].message


async def test_a_campaign_that_cannot_succeed_is_raised_at_once(world: World) -> None:
    async def work(_: Leadership) -> None:
        raise AssertionError("leads")

    async with world.client() as client:
        with pytest.raises(NodeNotFound):
            await client.lead("scheduler", work, path="/nowhere")
        await client.semaphore("pool").create(limit=4)
        with pytest.raises(InvalidArgument):
            await client.lead("pool", work)


async def test_a_cancelled_call_resigns(world: World) -> None:
    async with world.client() as client:
        leading = asyncio.create_task(client.lead("scheduler", lambda _: for_ever()))
        while not await world.queue("scheduler"):
            await turns(1)
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading
        await turns()
        assert await world.queue("scheduler") == []


async def test_closing_the_client_ends_a_pause(world: World) -> None:
    async def work(_: Leadership) -> None:
        raise ValueError("failure")

    client = world.client()
    leading = asyncio.create_task(client.lead("scheduler", work))
    await turns()
    await client.aclose()
    with pytest.raises(SessionClosed):
        await leading


async def test_the_loss_of_another_lease_is_an_error_of_the_work(world: World) -> None:
    async def work(_: Leadership) -> None:
        async with client.mutex("other").lock() as lease:
            await client.evict("/default", "other", lease.fencing_token)
            await for_ever()

    async with world.client() as client:
        with pytest.raises(LeaseLost, match="'other'"):
            await client.lead("scheduler", work, retry=False)
        assert await world.queue("scheduler") == []


class Led:
    """A leadership, lost or not."""

    def __init__(self, loss: LeaseLost | None = None) -> None:
        self.loss = loss


def supervision(clock: VirtualClock) -> Supervision:
    return Supervision(clock, "/default", "scheduler", retry=True)


def test_pauses_double_until_they_are_long_and_start_anew_after_a_long_leadership(
    clock: VirtualClock,
) -> None:
    watched = supervision(clock)
    pauses = []
    for _ in range(9):
        watched.begin(Led())
        pauses.append(watched.failed(ValueError("failure")))
    assert all(0.5 <= pause / (2**number) <= 1 for number, pause in enumerate(pauses[:6]))
    assert all(LONGEST_PAUSE / 2 <= pause <= LONGEST_PAUSE for pause in pauses[6:])
    watched.begin(Led())
    clock.advance(LONGEST_PAUSE)
    assert watched.failed(ValueError("failure")) <= FIRST_PAUSE


def test_an_error_after_the_work_has_returned_is_raised(clock: VirtualClock) -> None:
    watched = supervision(clock)
    watched.begin(Led())
    watched.end()
    with pytest.raises(LeaseLost):
        watched.failed(LeaseLost("lost at the end of the block"))


def test_a_group_of_losses_is_a_loss_and_a_mixed_group_is_an_error(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    watched = supervision(clock)
    losses = ExceptionGroup("work", [LeaseLost("lost"), SessionExpired("expired")])
    for error in (losses, ExceptionGroup("work", [losses, ValueError("failure")])):
        watched.begin(Led(LeaseLost("lost")))
        watched.failed(error)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
