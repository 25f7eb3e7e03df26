"""Mutexes: one holder at a time, no set-up, and everyone can see who."""

from __future__ import annotations

import asyncio

import pytest

from tenure.errors import AcquireTimeout, InvalidArgument, LeaseLost
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def test_one_task_at_a_time_is_inside(world: World) -> None:
    inside = 0
    async with world.client() as client, world.client() as other:

        async def work(number: int) -> None:
            nonlocal inside
            async with (client if number % 2 else other).mutex("m").lock():
                inside += 1
                assert inside == 1
                await turns(2)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(work(number))


async def test_a_ticket_keeps_a_place_in_its_queue(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = client.mutex("m")
        held = await other.mutex("m").lock()
        async with mutex.enqueue(data=b"me") as first, mutex.enqueue() as second:
            assert [await first.position(), await second.position()] == [1, 2]
            with pytest.raises(AcquireTimeout, match="the place in its queue is kept"):
                await first.wait(1)
            await held.release()
            lease = await first.wait()
            holder = await other.mutex("m").inspect()
            assert holder is not None
            assert holder.data == b"me"
            assert [await first.position(), await second.position()] == [0, 1]
            assert held.fencing_token < lease.fencing_token < (second.fencing_token or 0)
            assert not second.granted
            await first.withdraw()
            assert (await second.wait()).held
        assert await world.queue("m") == []


async def test_who_does_not_want_to_wait_for_long_says_so(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, world.client() as other, other.mutex("m").lock():
        started = clock.now()
        with pytest.raises(AcquireTimeout, match="mutex 'm'"):
            await client.mutex("m").lock(timeout=2)
        assert clock.now() - started == 2.0


async def test_nothing_is_given_up_early_unless_a_stop_time_is_asked_for(world: World) -> None:
    async with world.client() as client, client.session(recovery_window=4.0) as session:
        span = session.deadline - client.clock.now()
        async with session.mutex("m").lock(), session.election("e").campaign():
            plain = await session.mutex("n").try_lock()
            assert plain is not None
            assert session.deadline - client.clock.now() == pytest.approx(span)
        async with session.mutex("m").lock(stop_time=1.0):
            assert session.deadline - client.clock.now() < span


async def test_what_a_lease_is_given_for_its_loss_is_that_lease_s(world: World) -> None:
    async with world.client() as client:
        told: list[LeaseLost] = []
        locked = await client.mutex("m").lock(on_loss=told.append)
        tried = await client.mutex("n").try_lock(on_loss=told.append)
        assert locked.held
        assert tried is not None
        await world.end_sessions()
        await turns()
        assert [loss.name for loss in told] == ["m", "n"]


async def test_it_exists_only_while_somebody_wants_it(world: World) -> None:
    async with world.client() as client:
        async with client.mutex("m").lock():
            assert [each.name for each in await client.list_semaphores()] == ["m"]
        assert await client.list_semaphores() == []


async def test_it_tells_who_holds_it(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        mutex = client.mutex("m")
        assert repr(mutex) == "<Mutex 'm'>"
        assert await mutex.inspect() is None
        async with mutex.lock(data=b"host-1") as lease:
            waiting = asyncio.create_task(other.mutex("m").lock())
            await asyncio.sleep(2)
            holder = await mutex.inspect()
            assert holder is not None
            assert holder.data == b"host-1"
            assert holder.is_me
            assert holder.fencing_token == lease.fencing_token
            assert holder.since == 2.0
            assert holder.remaining is not None
            assert holder.remaining > 20
            assert holder.waiting == 1
            theirs = await other.mutex("m").inspect()
            assert theirs is not None
            assert not theirs.is_me
        await (await waiting).release()


async def test_in_the_instant_between_two_holders_nobody_holds_it(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session, session.mutex("m").lock():
        (slow,) = engine.sessions
        store = slow.inner
        assert store is not None
        describe = store.describe_semaphore

        async def with_no_owner(name: str, *, owners: bool, waiters: bool) -> object:
            return await describe(name, owners=False, waiters=waiters)

        store.describe_semaphore = with_no_owner  # type: ignore[method-assign, assignment]
        assert await session.mutex("m").inspect() is None


async def test_a_counting_semaphore_of_that_name_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(1)
        with pytest.raises(InvalidArgument, match=r"lasting semaphore.*ephemeral"):
            await client.mutex("s").inspect()
        with pytest.raises(InvalidArgument, match=r"lasting semaphore.*ephemeral"):
            await client.mutex("s").try_lock()


async def test_a_stop_time_that_is_no_time_is_refused(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="a stop time is seconds or a timedelta"):
            await client.mutex("m").lock(stop_time=b"")  # type: ignore[arg-type]


async def test_a_try_gives_a_lease_or_none(world: World) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").try_lock(data=b"mine")
        assert lease is not None
        assert await client.mutex("m").try_lock() is None
        async with lease:
            holder = await client.mutex("m").inspect()
            assert holder is not None
            assert holder.data == b"mine"


async def test_its_state_shows_the_holder_and_the_waiters(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = client.mutex("m")
        free = await mutex.describe(owners=True, waiters=True)
        assert (free.held, free.owners, free.waiters, free.ephemeral) == (0, (), (), True)
        assert not await mutex.locked()
        async with other.mutex("m").lock(data=b"theirs"):
            assert await mutex.locked()
            waiting = asyncio.create_task(mutex.lock(data=b"ours"))
            await turns()
            taken = await mutex.describe(owners=True, waiters=True)
            assert [owner.data for owner in taken.owners] == [b"theirs"]
            assert [waiter.data for waiter in taken.waiters] == [b"ours"]
            assert (await mutex.describe()).owners == ()
        await (await waiting).release()
        assert not await mutex.locked()


async def test_the_state_of_a_mutex_is_not_that_of_a_lasting_semaphore(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(1)
        for call in (client.mutex("s").describe(), client.mutex("s").locked()):
            with pytest.raises(InvalidArgument, match="'s'"):
                await call
