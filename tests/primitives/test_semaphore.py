# ruff: noqa: PT012  what raises here is a block, with its body
"""Counting semaphores, and places in their queues."""

from __future__ import annotations

import asyncio

import pytest

from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    Unsupported,
)
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, for_ever, is_held, released_after, turns

# The semaphore


async def test_it_is_created_described_updated_and_deleted(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        assert repr(pool) == "<Semaphore 's'>"
        await pool.create(3, b"old")
        await pool.update(b"new")
        described = await pool.describe()
        assert (described.name, described.limit, described.data) == ("s", 3, b"new")
        assert not described.ephemeral
        await pool.delete()
        with pytest.raises(SemaphoreNotFound):
            await pool.describe()
        with pytest.raises(SemaphoreNotFound):
            await pool.update(b"newer")
        with pytest.raises(SemaphoreNotFound):
            await pool.delete()


async def test_its_limit_is_stored_so_that_peers_agree(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("s")
        await pool.create(3)
        await pool.create(3, exist_ok=True)
        with pytest.raises(SemaphoreExists) as raised:
            await pool.create(4, exist_ok=True)
        assert raised.value.limit == 3
        with pytest.raises(SemaphoreExists):
            await pool.create(3)


async def test_one_in_use_is_deleted_by_force_only(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("s")
        await pool.create(1)
        lease = await pool.acquire()
        with pytest.raises(SemaphoreBusy):
            await pool.delete()
        await pool.delete(force=True)
        await turns()
        assert isinstance(lease.loss, LeaseLost)


async def test_so_many_are_held_at_a_time_and_no_more(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(3)
        most = inside = 0

        async def work() -> None:
            nonlocal most, inside
            async with pool.acquire():
                inside += 1
                most = max(most, inside)
                await turns(1)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(work())
        assert most == 3
        assert await pool.count() == 0


async def test_it_tells_who_owns_and_who_waits(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(3)
        async with pool.acquire(2, data=b"a"), pool.enqueue(3, data=b"b"):
            assert await pool.count() == 2
            described = await pool.describe(owners=True, waiters=True)
            assert [(owner.count, owner.data) for owner in described.owners] == [(2, b"a")]
            assert [(waiter.count, waiter.data) for waiter in described.waiters] == [(3, b"b")]


async def test_a_try_gives_a_lease_or_none(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        lease = await pool.try_acquire(2)
        assert lease is not None
        assert await pool.try_acquire() is None
        await lease.release()


def test_a_name_is_checked_when_it_is_given(world: World) -> None:
    with pytest.raises(InvalidArgument, match="1 to 1024 bytes"):
        world.client().semaphore("")


# Changing its limit


async def test_a_higher_limit_grants_and_a_lower_one_takes_nothing_away(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("s")
        await pool.create(1)
        lease = await pool.acquire()
        async with pool.enqueue() as ticket:
            await pool.resize(2)
            second = await ticket.wait()
            await pool.resize(1)
            assert lease.held
            assert second.held
            assert await pool.count() == 2
            await lease.release()
            assert await pool.try_acquire() is None
        async with pool:
            assert await pool.count() == 1


async def test_a_waiter_for_more_than_the_new_limit_is_told_so(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = client.semaphore("s")
        await pool.create(4)
        async with pool.acquire(2):
            waiting = asyncio.create_task(other.semaphore("s").acquire(4))
            ticket = await other.semaphore("s").enqueue(3)
            behind = await other.semaphore("s").enqueue(2)
            await turns()
            await pool.resize(2)
            with pytest.raises(
                InvalidArgument,
                match=r"limit of semaphore 's' on /default was changed to 2 while .* for 4\. Acq",
            ):
                await waiting
            with pytest.raises(
                InvalidArgument, match="changed to 2 while this request waited for 3"
            ):
                await ticket.wait()
        async with behind:
            await behind.wait()
        with pytest.raises(InvalidArgument, match="from 1 to the limit, which is 2, not 3"):
            await pool.acquire(3)


async def test_a_changed_limit_is_seen_by_a_watch_of_the_data(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("s")
        await pool.create(4)
        async with pool.watch(data=True) as states:
            assert (await anext(states)).limit == 4
            await pool.resize(6)
            assert (await anext(states)).limit == 6


async def test_only_a_semaphore_with_a_limit_has_one_to_change(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(SemaphoreNotFound):
            await client.semaphore("s").resize(2)
        with pytest.raises(SemaphoreNotFound):
            await client.semaphore("s", limit=4).resize(2)
        with pytest.raises(InvalidArgument, match="used here as ephemeral, and so has no limit"):
            await client.semaphore("s", ephemeral=True).resize(2)
        await client.semaphore("vast").create(EPHEMERAL_LIMIT)
        with pytest.raises(InvalidArgument, match="is unbounded"):
            await client.semaphore("vast").resize(2)
        for limit in (0, 2**53, 1.5):
            with pytest.raises(InvalidArgument, match="a limit is changed to"):
                await client.semaphore("vast").resize(limit)  # type: ignore[arg-type]
        async with client.mutex("m").lock():
            with pytest.raises(InvalidArgument, match="ephemeral semaphore in use"):
                await client.semaphore("m").resize(2)


async def test_the_object_that_changes_a_limit_goes_on_with_it(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(2)
        pool = client.semaphore("s", limit=4)
        with pytest.raises(SemaphoreExists, match=r"resize\(4\) or 'tenure sem resize s 4'"):
            await pool.acquire()
        await pool.resize(4)
        async with pool.acquire(4):
            await pool.resize(5)
            async with pool:
                assert await pool.count() == 5


async def test_where_a_limit_cannot_be_changed_another_way_is_named(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("vast").create(EPHEMERAL_LIMIT)
        with pytest.raises(SemaphoreExists, match=r"Use the same limit everywhere, or delete\(\)"):
            await client.semaphore("vast", limit=4).acquire()
        await client.create_node("/a-b")
        async with client.session("/a-b") as session:
            await session.semaphore("my pool").create(2)
            command = r"'tenure sem resize 'my pool' 4 --node /a-b'"
            with pytest.raises(SemaphoreExists, match=command):
                await session.semaphore("my pool", limit=4).acquire()


# Places in its queue

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 2])


@ENGINES
async def test_a_ticket_takes_a_place_now_and_waits_later(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        held = await pool.acquire()
        async with pool.enqueue(data=b"me") as ticket:
            assert "waiting" in repr(ticket)
            assert not is_held(ticket._lease)
            assert len(await world.queue("s")) == 2
            async with released_after(1, held):
                lease = await ticket.wait()
            assert lease.held
            assert ticket.granted
            assert await ticket.wait() is lease
            assert await ticket.wait(timeout=0) is lease
        assert not is_held(lease)
        assert await world.queue("s") == []


async def test_a_ticket_may_be_awaited_instead_of_entered(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        ticket = await pool.enqueue()
        assert len(await world.queue("s")) == 1
        await ticket.withdraw()
        assert not ticket.granted
        await ticket.withdraw()
        with pytest.raises(LeaseReleased):
            await ticket.wait()


async def test_a_wait_that_ends_without_a_grant_keeps_the_place(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        held = await pool.acquire()
        async with pool.enqueue() as ticket:
            for timeout in (0, 1):
                with pytest.raises(AcquireTimeout, match="the place in its queue is kept"):
                    await ticket.wait(timeout)
            waiting = asyncio.create_task(ticket.wait())
            await turns()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert len(await world.queue("s")) == 2
            await held.release()
            assert (await ticket.wait(1)).held


async def test_a_ticket_tells_its_place_and_its_token(world: World) -> None:
    client, engine = world.slow()
    async with client, world.client() as eye:
        pool = client.semaphore("pool")
        await pool.create(limit=1)
        lease = await pool.acquire()
        first, second = await pool.enqueue(), await pool.enqueue()
        assert [await first.position(), await second.position()] == [1, 2]
        assert first.fencing_token is not None
        assert lease.fencing_token < first.fencing_token < (second.fencing_token or 0)
        await lease.release()
        await turns()
        assert [await first.position(), await second.position()] == [0, 1]
        assert (await first.wait()).fencing_token == first.fencing_token
        # The store has granted it, and its word is still on the way.
        engine.back.flowing = False
        withdrawing = asyncio.create_task(first.withdraw())
        await turns(1)
        asking = asyncio.create_task(second.position())
        await turns()
        engine.back.flowing = True
        assert await asking == 0
        await withdrawing
        await second.withdraw()
        with pytest.raises(LeaseReleased):
            await second.position()
        assert await eye.semaphore("pool").count() == 0


async def test_a_place_that_the_store_does_not_tell_is_unsupported(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool")
        await pool.create(limit=1)
        async with pool.acquire(), pool.enqueue() as ticket:
            known, ticket._lease._request.order_id = ticket._lease._request.order_id, None
            assert ticket.fencing_token is None
            with pytest.raises(Unsupported, match="does not report a waiter's position"):
                await ticket.position()
            ticket._lease._request.order_id = known


async def test_during_an_outage_the_question_for_a_place_ends_and_names_it(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        pool = client.semaphore("pool")
        await pool.create(limit=1)
        async with pool.acquire(), pool.enqueue() as ticket:
            engine.cut()
            began = clock.now()
            with pytest.raises(EngineUnavailable, match="queue of 'pool' on /default: not read"):
                await ticket.position()
            assert clock.now() - began == pytest.approx(5)
            engine.mend()
            assert await ticket.position() == 1


async def test_a_request_that_has_left_while_it_asked_has_no_place(world: World) -> None:
    client, _engine = world.slow()
    async with client, world.client() as other:
        pool = client.semaphore("pool")
        await pool.create(limit=1)
        async with other.semaphore("pool").acquire():
            ticket = await pool.enqueue()
            assert ticket.fencing_token is not None
            await other.evict("/default", "pool", ticket.fencing_token)
            with pytest.raises(SemaphoreNotFound, match="has left its queue"):
                await ticket.position()


async def test_several_tasks_may_wait_with_one_ticket(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with released_after(1, await pool.acquire()):
            ticket = await pool.enqueue()
            leases = await asyncio.gather(ticket.wait(), ticket.wait(5), ticket.wait())
            assert len(set(leases)) == 1
            await ticket.withdraw()


async def test_a_lease_entered_inside_of_its_ticket_s_block_is_released_once(
    world: World,
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with pool.enqueue() as ticket:
            async with await ticket.wait() as lease:
                assert lease.held
            assert not ticket.granted
        assert engine.calls.count("withdraw") == 1


async def test_a_ticket_is_entered_once(world: World) -> None:
    async with world.client() as client, client.session() as session:
        await session.semaphore("s").create(1)
        async with session.semaphore("s").enqueue() as ticket:
            with pytest.raises(Misuse, match="entered already"):
                await ticket.__aenter__()


async def test_a_loss_inside_of_a_ticket_s_block_is_raised_at_its_end(world: World) -> None:
    async with world.client() as client, client.session() as session:
        await session.semaphore("s").create(1)
        with pytest.raises(LeaseLost):
            async with session.semaphore("s").enqueue() as ticket:
                lease = await ticket.wait()
                assert await client.evict("/default", "s", lease.fencing_token)
                await turns()  # not entered, it cancels nobody
        with pytest.raises(LeaseLost):
            await ticket.wait()
        with pytest.raises(LeaseLost):
            await ticket.withdraw()
        with pytest.raises(KeyError):
            async with session.semaphore("s").enqueue() as ticket:
                lease = await ticket.wait()
                assert await client.evict("/default", "s", lease.fencing_token)
                await turns()
                raise KeyError("the body's")


async def test_who_waits_with_a_ticket_learns_of_the_session_s_end(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await other.semaphore("s").create(1)
        async with other.semaphore("s").acquire():
            session = await client.session(description="mine")
            async with session.semaphore("s").enqueue() as ticket:
                await world.end_sessions("mine")
                with pytest.raises(SessionExpired):
                    await ticket.wait()
            session = await client.session()
            async with session.semaphore("s").enqueue() as ticket:
                await session.aclose()
                with pytest.raises(SessionClosed):
                    await ticket.wait()


@pytest.mark.parametrize("gap", [0, 1, 2])
async def test_a_place_that_is_lost_while_it_is_taken_is_an_error(world: World, gap: int) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session()
        await session.semaphore("s").create(1)
        taking: asyncio.Task[object] = asyncio.create_task(session.semaphore("s").enqueue())
        engine.back.flowing = False
        await turns(3)
        engine.back.flowing = True  # it is granted ...
        await turns(gap)
        session._core.ended(SessionExpired("... and lost"))
        if gap < 2:
            with pytest.raises((SessionExpired, LeaseLost), match="and lost"):
                await taking
        else:
            await taking


async def test_a_timeout_of_somebody_else_s_passes(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with pool.acquire(), pool.enqueue() as ticket:
            engine.fail("describe", TimeoutError("the network's"), TimeoutError("the network's"))
            with pytest.raises(TimeoutError, match="the network's"):
                await ticket.wait()
            with pytest.raises(TimeoutError, match="the network's"):
                await pool.acquire()


async def test_a_cancelled_wait_leaves_the_caller_s_own_cancellation_alone(world: World) -> None:
    async with world.client() as client, client.session() as session:
        await session.semaphore("s").create(1)
        async with session.semaphore("s").acquire():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), session.semaphore("s").enqueue() as ticket:
                    await ticket.wait(timeout=60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), session.semaphore("s").acquire(timeout=60):
                    await for_ever()


async def test_a_ticket_that_was_awaited_may_be_entered_later(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool")
        await pool.create(1)
        ticket = await pool.enqueue()
        async with ticket:
            assert ticket.granted
        assert await pool.count() == 0
