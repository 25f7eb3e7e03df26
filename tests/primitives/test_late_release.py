"""Releases of leases that were lost before, without the program having been told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure import events
from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.session import Session
from tenure.errors import EngineError, LeaseLost, LeaseReleased, SessionExpired
from tests.primitives.helpers import World, turns

DIRECT, SLOW = None, 1
"""Engines that answer at once, and later."""

both = pytest.mark.parametrize("way", [DIRECT, SLOW], ids=["at once", "later"])


class _WithoutRemovals:
    """The events of a session, but for those that say what was taken from it."""

    def __init__(self, told: Any) -> None:
        self._latest = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._latest, name)

    def removed(self, *_: object) -> None:
        """The push is still on its way."""

    def ended(self, *_: object) -> None:
        """And so is this one."""


@asynccontextmanager
async def a_session(
    world: World, way: int | None, *, on_loss: OnLoss = "cancel"
) -> AsyncIterator[tuple[Client, Session]]:
    """A session that hears of no removal."""
    if way is None:
        client = world.client()
    else:
        client, engine = world.slow(way)
    async with client:
        session = await client.session(on_loss=on_loss)
        attached: Any = session._core.engine if way is None else engine.sessions[0].inner
        attached.events = _WithoutRemovals(attached.events)
        yield client, session


async def evict(world: World, lease: Lease) -> None:
    assert await world._eye.evict("/default", lease.name, lease.fencing_token)


@both
async def test_a_release_after_an_eviction_raises_each_time(world: World, way: int | None) -> None:
    async with a_session(world, way) as (_, session):
        lease = await session.mutex("m").lock()
        await evict(world, lease)
        for _ in range(2):
            with pytest.raises(LeaseLost, match="'m' on /default was lost before its release") as e:
                await lease.release()
            assert e.value.fencing_token == lease.fencing_token
            assert e.value.__cause__ is None
        assert (lease.held, isinstance(lease.loss, LeaseLost)) == (False, True)
        with pytest.raises(LeaseLost):
            lease.check()
        assert await lease.wait_lost() is lease.loss
        assert session.state == "attached"


@both
async def test_the_end_of_a_block_raises_too(world: World, way: int | None) -> None:
    async with a_session(world, way) as (_, session):
        ended: list[int] = []

        async def work() -> None:
            async with session.mutex("m").lock() as lease:
                await evict(world, lease)
                ended.append(lease.fencing_token)

        with pytest.raises(LeaseLost) as caught:
            await work()
        assert [caught.value.fencing_token] == ended
        async with session.mutex("m").lock(timeout=0):
            pass  # and it is free


@both
async def test_the_bodys_own_error_stays_and_the_loss_is_noted_on_it(
    world: World, way: int | None
) -> None:
    async with a_session(world, way) as (_, session):

        async def fail() -> None:
            async with session.mutex("m").lock() as lease:
                await evict(world, lease)
                raise ZeroDivisionError

        async def release_inside() -> None:
            async with session.mutex("n").lock() as lease:
                await evict(world, lease)
                await lease.release()

        with pytest.raises(ZeroDivisionError) as caught:
            await fail()
        (note,) = caught.value.__notes__
        assert "was lost before its release" in note
        with pytest.raises(LeaseLost) as lost:
            await release_inside()
        assert not hasattr(lost.value, "__notes__")


@both
async def test_a_cancelled_body_stays_cancelled_and_does_not_wait(
    world: World, way: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_session(world, way) as (_, session):
        inside = asyncio.Event()

        async def work() -> None:
            async with session.mutex("m").lock() as lease:
                await evict(world, lease)
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with caplog.at_level(logging.WARNING, logger="tenure"):
            await turns()
        logged = [each.getMessage() for each in caplog.records]
        assert [("was lost before its release" in each) for each in logged] == [True] * (way or 0)


async def test_a_release_that_is_cancelled_has_the_loss_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_session(world, SLOW) as (_, session):
        lease = await session.mutex("m").lock()
        await evict(world, lease)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await releasing
        await turns()
        assert lease.loss is not None
        assert [each.getMessage() for each in caplog.records] == [
            f"lease lost: node=/default name='m' error={lease.loss}"
        ]


@both
async def test_listeners_hear_of_the_loss_after_the_release(world: World, way: int | None) -> None:
    async with a_session(world, way) as (client, session), client.events() as stream:
        lease = await session.mutex("m").lock()
        await evict(world, lease)
        with pytest.raises(LeaseLost):
            await lease.release()
        kinds = [type(await anext(stream)) for _ in range(4)]
        assert kinds == [events.Requested, events.Acquired, events.Released, events.Lost]


@both
async def test_no_policy_is_carried_out_for_work_that_has_ended(
    world: World, way: int | None
) -> None:
    losses: list[LeaseLost] = []
    async with a_session(world, way, on_loss=losses.append) as (_, session):
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock() as lease:
                await evict(world, lease)
        with pytest.raises(LeaseLost):  # or else this process would have ended
            async with session.mutex("m").lock(on_loss="exit") as lease:
                await evict(world, lease)
        assert losses == []


@both
async def test_a_deletion_by_force_is_noticed_by_tickets_too(world: World, way: int | None) -> None:
    async with a_session(world, way) as (_, session), world.client() as other:
        pool = other.semaphore("pool")

        await pool.create(limit=1)
        ticket = await session.semaphore("pool").enqueue()
        await ticket.wait()
        await pool.delete(force=True)
        with pytest.raises(LeaseLost):
            await ticket.withdraw()

        async def work(error: Exception | None) -> None:
            await pool.create(limit=1)
            async with session.semaphore("pool").enqueue() as ticket:
                await ticket.wait()
                await pool.delete(force=True)
                if error is not None:
                    raise error

        with pytest.raises(LeaseLost):
            await work(None)
        with pytest.raises(ZeroDivisionError) as caught:
            await work(ZeroDivisionError())
        assert "was lost before its release" in caught.value.__notes__[0]


@both
async def test_a_waiter_that_had_left_its_queue_withdraws_without_an_error(
    world: World, way: int | None
) -> None:
    async with a_session(world, way) as (_, session), world.client() as other:
        async with other.mutex("m").lock():
            ticket = await session.semaphore("m", ephemeral=True).enqueue()
            _, waiter = await world.queue("m")
            assert await world._eye.evict("/default", "m", waiter.order_id)
            await ticket.withdraw()
            async with session.semaphore("m", ephemeral=True).enqueue() as ticket:
                _, waiter = await world.queue("m")
                assert await world._eye.evict("/default", "m", waiter.order_id)
        assert await world.queue("m") == []


@both
async def test_an_ended_session_is_the_cause_and_is_over_from_then_on(
    world: World, way: int | None
) -> None:
    async with a_session(world, way) as (_, session):
        lease = await session.mutex("m").lock()
        entered = await session.mutex("n").lock()
        await world._eye.end_session("/default", session.id)
        with pytest.raises(LeaseLost) as caught:
            await lease.release()
        assert isinstance(caught.value.__cause__, SessionExpired)
        assert session.state == "expired"
        with pytest.raises(LeaseLost) as other:
            await entered.release()
        assert isinstance(other.value.__cause__, SessionExpired)


@both
async def test_a_release_shows_an_expiry_after_which_a_new_session_is_tried(
    world: World, way: int | None
) -> None:
    tried = 0
    client = world.connect(way)
    async with client:
        async for attempt in client.sessions():
            async with attempt as session:
                tried += 1
                async with session.mutex("m").lock():
                    if tried == 1:
                        attached: Any = session._core.engine
                        attached = getattr(attached, "inner", attached)
                        attached.events = _WithoutRemovals(attached.events)
                        await world._eye.end_session("/default", session.id)
    assert tried == 2


async def test_a_release_in_flight_when_the_store_ends_the_session_waits_for_its_answer(
    world: World,
) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session()
        early, late = [await session.mutex(name).lock() for name in ("early", "late")]
        engine.back.flowing = False
        first = asyncio.create_task(early.release())
        await turns()  # the store has done it, and its answer is on its way
        await world._eye.end_session("/default", session.id)
        engine.there.flowing = False
        second = asyncio.create_task(late.release())
        await turns()
        session._core.ended(SessionExpired("over"))
        await turns()
        assert not first.done()
        engine.mend()
        await first
        with pytest.raises(LeaseLost) as caught:
            await second
        assert isinstance(caught.value.__cause__, SessionExpired)
        with pytest.raises(LeaseReleased):
            early.check()


async def test_a_release_in_flight_when_the_program_closes_the_session_is_no_loss(
    world: World,
) -> None:
    client, engine = world.slow(1)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", SessionExpired("over"))
        engine.back.flowing = False
        releasing = asyncio.create_task(lease.release())
        await turns()
        closing = asyncio.create_task(session.aclose())
        await releasing
        engine.mend()
        await closing
        assert lease.loss is None


async def test_a_release_that_is_retried_may_find_that_it_was_too_late(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_session(world, SLOW) as (client, session), client.events() as stream:
        lease = await session.mutex("m").lock()
        engine: Any = client._core.engine
        engine.fail("withdraw", EngineError("the disk is full"))
        with pytest.raises(EngineError):
            await lease.release()
        await evict(world, lease)
        await asyncio.sleep(1)
        kinds = [type(await anext(stream)) for _ in range(4)]
        assert kinds == [events.Requested, events.Acquired, events.Released, events.Lost]
        assert any(str(lease.loss) in each.getMessage() for each in caplog.records)


async def test_a_grant_that_its_caller_never_saw_is_given_back_without_an_error(
    world: World,
) -> None:
    async with a_session(world, SLOW) as (client, session):
        engine: Any = client._core.engine
        engine.back.flowing = False
        locking = asyncio.create_task(session.mutex("m").lock())
        await turns()  # the store has granted it, and its answer is on its way
        (owner,) = await world.queue("m")
        assert await world._eye.evict("/default", "m", owner.order_id)
        locking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await locking
        engine.mend()
        await turns()
        assert await world.queue("m") == []


async def test_an_outage_after_the_end_of_the_session_does_not_hold_up_a_release(
    world: World,
) -> None:
    client, engine = world.slow(1)
    async with client, client.session() as other:
        session = await client.session(description="mine")
        lease = await session.mutex("m").lock()
        engine.there.flowing = False
        releasing = asyncio.create_task(lease.release())
        await turns()
        await world.end_sessions("mine")
        await turns()
        engine.cut()  # the end has been heard of, and the answer will not be
        async with asyncio.timeout(10):
            await releasing
        engine.mend()
        assert other.state == "attached"
