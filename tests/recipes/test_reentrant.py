# ruff: noqa: PT012  what raises here is a block, with its body
"""The re-entrant mutex: a lease that is passed on opens inner blocks, and nothing else does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tenure
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SelfDeadlock,
)
from tenure.recipes import InnerLease, ReentrantMutex, RWLock
from tests.cancelling import cancellers
from tests.primitives.helpers import World, for_ever, is_held, turns


async def test_only_the_outermost_block_releases(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        mutex, theirs = ReentrantMutex(client, "m"), other.mutex("m")
        assert repr(mutex) == "<ReentrantMutex 'm'>"
        async with mutex.lock() as outer:
            async with mutex.lock(holding=outer) as inner:
                assert isinstance(inner, InnerLease)
                assert inner.fencing_token == outer.fencing_token
                async with ReentrantMutex(client, "m").lock(holding=inner) as innermost:
                    assert innermost.held
                    await innermost.release()
                    assert await theirs.try_lock() is None
                assert inner.held
            assert is_held(outer)
            assert await theirs.try_lock() is None
        assert not is_held(outer)
        async with theirs.lock(timeout=30):
            pass


async def test_a_callee_works_with_and_without_a_lease(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        depths: list[int] = []

        async def book(depth: int, holding: tenure.Lease | None = None) -> None:
            async with mutex.lock(holding=holding, timeout=5, data=b"book") as lease:
                depths.append(depth)
                if depth:
                    await book(depth - 1, lease)

        await asyncio.gather(book(3), book(3))
        assert depths == [3, 2, 1, 0] * 2
        await turns()
        assert await world.queue("m") == []


async def test_a_lease_of_the_plain_mutex_can_be_passed_on(world: World) -> None:
    async with world.client() as client:
        async with client.mutex("m") as lease, ReentrantMutex(client, "m").lock(holding=lease):
            pass
        async with (
            client.session() as session,
            session.mutex("m").lock() as lease,
            ReentrantMutex(client, "m").lock(holding=lease) as inner,
        ):
            assert inner.held


async def test_nothing_is_implicit(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        async with mutex.lock():
            with pytest.raises(SelfDeadlock):
                await mutex.lock()
            with pytest.raises(AcquireTimeout):
                await mutex.lock(timeout=1)


async def test_a_foreign_lease_is_refused(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await client.create_node("/n")
        mutex = ReentrantMutex(client, "m")
        async with client.session("/n") as session:
            pool = client.semaphore("pool", limit=1)
            leases: list[Any] = [
                await client.mutex("another").lock(),
                await session.mutex("m").lock(),
                await pool.acquire(),
                True,
                7,
            ]
            read = await RWLock(client, "m").read()
            for each in [*leases, read]:
                with pytest.raises(
                    InvalidArgument, match="entered again with a held lease of this"
                ):
                    await mutex.lock(holding=each)
            await read.release()
            theirs = await other.mutex("m").lock()
            with pytest.raises(InvalidArgument, match="of the same client"):
                await mutex.lock(holding=theirs)
            for lease in [*leases[:3], theirs]:
                await lease.release()


async def test_a_stale_lease_is_refused(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = ReentrantMutex(client, "m")
        lease = await mutex.lock()
        inner = await mutex.lock(holding=lease)
        await lease.release()
        for stale in (lease, inner):
            with pytest.raises(LeaseReleased):
                await mutex.lock(holding=stale)
        with pytest.raises(LeaseReleased):
            async with inner:
                pass
        lease = await mutex.lock()
        await other.evict("/default", "m", lease.fencing_token)
        await lease.wait_lost()
        with pytest.raises(LeaseLost):
            await mutex.lock(holding=lease)


async def test_an_inner_block_is_entered_once(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        async with mutex.lock() as lease:
            inner = await mutex.lock(holding=lease)
            async with inner:
                with pytest.raises(Misuse, match="entered already"):
                    await inner.__aenter__()
            assert lease.held


@pytest.mark.parametrize("nested", [False, True])
async def test_a_loss_cancels_all_blocks(world: World, nested: bool) -> None:
    """The inner ones are in the same task, or in another one."""
    async with world.client() as client, world.client() as other:
        mutex = ReentrantMutex(client, "m")

        async def callee(lease: tenure.Lease) -> None:
            async with mutex.lock(holding=lease) as inner, mutex.lock(holding=inner):
                await other.evict("/default", "m", lease.fencing_token)
                await for_ever()

        if nested:
            with pytest.raises(LeaseLost):
                async with mutex.lock() as lease:
                    await callee(lease)
        else:
            lease = await mutex.lock()
            with pytest.raises(LeaseLost):
                await asyncio.create_task(callee(lease))
        await turns()
        assert await world.queue("m") == []


async def test_the_end_of_the_session_ends_inner_blocks(world: World) -> None:
    async with world.client() as client:
        session = await client.session(description="doomed")
        mutex = ReentrantMutex(session, "m")
        with pytest.raises(LeaseLost):
            async with mutex.lock() as lease, mutex.lock(holding=lease):
                await world.end_sessions("doomed")
                await for_ever()


async def test_the_end_of_the_outermost_block_cancels_inner_ones(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        entered = asyncio.Event()

        async def callee(lease: tenure.Lease) -> None:
            async with mutex.lock(holding=lease):
                entered.set()
                await for_ever()

        async with mutex.lock() as lease:
            running = asyncio.create_task(callee(lease))
            await entered.wait()
        with pytest.raises(LeaseReleased):
            await running


async def test_a_body_that_ends_after_the_loss_gets_the_error(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = ReentrantMutex(client, "m")
        lease = await mutex.lock()
        with pytest.raises(LeaseLost):
            async with mutex.lock(holding=lease):
                await other.evict("/default", "m", lease.fencing_token)
                lease._request.taken("it was evicted")
        with pytest.raises(ZeroDivisionError) as raised:
            async with mutex.lock() as lease, mutex.lock(holding=lease):
                lease._request.taken("it was evicted")
                _ = 1 // 0
        assert any("meanwhile" in note for note in raised.value.__notes__)


async def test_a_cancellation_from_outside_stays_one(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")

        async def work() -> None:
            async with mutex.lock() as lease, mutex.lock(holding=lease):
                await for_ever()

        working = asyncio.create_task(work())
        await turns()
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        await turns()
        assert await world.queue("m") == []


@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_at_any_step_nothing_is_held(world: World, late: bool) -> None:
    client, _ = world.slow()
    async with client:
        mutex = ReentrantMutex(client, "m")

        async def work() -> None:
            async with (
                mutex.lock() as lease,
                mutex.lock(holding=lease) as inner,
                mutex.lock(holding=inner),
            ):
                await turns(3)

        for canceller in cancellers(late=late):
            await canceller.run(work())
            await turns()
            assert await world.queue("m") == []
            assert client._implicit.current() is None or not client._implicit.current().requests  # type: ignore[union-attr]


async def test_an_inner_lease_that_is_dropped_releases_nothing(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        async with mutex.lock() as lease:
            await mutex.lock(holding=lease)
            await turns()
            assert is_held(lease)


async def test_inner_blocks_leave_nothing_behind_in_the_outer_one(world: World) -> None:
    async with world.client() as client:
        mutex = ReentrantMutex(client, "m")
        async with mutex.lock() as lease:
            for _ in range(10):
                async with mutex.lock(holding=lease):
                    await turns(3)
            assert len(lease._request._waiters) <= 1
