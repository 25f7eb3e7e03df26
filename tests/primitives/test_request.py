# ruff: noqa: SIM117  who is inside of what is the matter here
"""Asking for a lease: granted, refused, given up in time, and never left in a queue."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import pytest

from tenure import events
from tenure._client.lease import Lease
from tenure._client.request import Request
from tenure.engines.contract import Removal
from tenure.errors import (
    AcquireTimeout,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    SelfDeadlock,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, released_after, turns

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 1, 3])


# Memory


def _requests() -> int:
    return sum(isinstance(each, Request) for each in gc.get_objects())


@pytest.mark.parametrize("contended", [False, True])
async def test_a_request_that_has_left_its_queue_does_not_wait_for_the_garbage_collector(
    world: World, contended: bool
) -> None:
    client, _ = world.slow()
    async with client, client.session() as session, world.client() as other:
        async with session.mutex("m").lock():
            pass
        before = _requests()
        gc.disable()
        try:
            for _ in range(3):
                if contended:
                    async with released_after(1, await other.mutex("m").lock()):
                        async with session.mutex("m").lock():
                            pass
                else:
                    async with session.mutex("m").lock():
                        pass
            assert _requests() - before < 3
        finally:
            gc.enable()


# In time


@ENGINES
async def test_a_timeout_runs_on_the_local_clock(
    world: World, clock: VirtualClock, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, world.client() as other:
        async with other.mutex("m").lock():
            started = clock.now()
            with pytest.raises(AcquireTimeout, match="'m' on /default: not acquired wi") as late:
                await client.mutex("m").lock(timeout=timedelta(seconds=2))
            assert clock.now() == pytest.approx(started + 2)
            assert (late.value.node, late.value.name) == ("/default", "m")
            assert late.value.__cause__ is late.value.__context__ is None
            await turns()
            assert len(await world.queue("m")) == 1


async def test_a_timeout_is_kept_when_the_store_is_silent(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.cut()
        started = clock.now()
        with pytest.raises(AcquireTimeout):
            await session.mutex("m").lock(timeout=3)
        assert clock.now() == pytest.approx(started + 3)
        engine.mend()
        await turns()
        assert await world.queue("m") == []


async def test_a_timeout_covers_the_attaching_of_the_implicit_session(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        engine.cut()
        started = clock.now()
        with pytest.raises(AcquireTimeout):
            await client.mutex("m").lock(timeout=3)
        assert clock.now() == pytest.approx(started + 3)
        engine.mend()
        async with client.mutex("m").lock(timeout=3):
            assert len(client._core.sessions) == 1


async def test_a_timeout_that_the_store_keeps_first_is_the_same(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        async with other.mutex("m").lock():
            waiting = asyncio.create_task(session.mutex("m").lock(timeout=30))
            await turns()
            session._core.removed(session._core._last_request_id, Removal.TIMED_OUT)
            with pytest.raises(AcquireTimeout, match="within 30 s"):
                await waiting
            assert engine.calls.count("withdraw") == 0


async def test_a_grant_within_the_time_is_a_grant(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with released_after(4, await other.mutex("m").lock()):
            async with client.mutex("m").lock(timeout=5) as lease:
                assert lease.held


async def test_without_a_timeout_it_waits_as_long_as_it_takes(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, world.client() as other:
        held = await other.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(600)
        assert not waiting.done()
        await held.release()
        await (await waiting).release()


@ENGINES
async def test_timeout_zero_is_a_try(world: World, engine_turns: int | None) -> None:
    async with world.connect(engine_turns) as client, world.client() as other:
        async with client.mutex("m").lock(timeout=0) as lease:
            assert lease.held
        async with other.mutex("m").lock():
            with pytest.raises(AcquireTimeout, match="not acquired at once"):
                await client.mutex("m").lock(timeout=0)
            assert await client.mutex("m").try_lock() is None
            assert len(await world.queue("m")) == 1


async def test_a_try_never_passes_one_who_waits(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(3)
        async with pool.acquire(2):
            waiting = asyncio.create_task(pool.acquire(3))
            await turns()
            assert await pool.try_acquire(1) is None
        await (await waiting).release()


async def test_a_try_that_the_store_does_not_answer_ends(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client, client.session(recovery_window=30) as session:
        mutex = session.mutex("m")
        # Renewals are answered, so that the session lives, and the request is not.
        enqueueing = engine.operate
        engine.operate = lambda kind, operation: (  # type: ignore[method-assign]
            asyncio.get_running_loop().create_future()
            if kind == "enqueue"
            else enqueueing(kind, operation)
        )
        started = clock.now()
        for call in (mutex.try_lock(), mutex.lock(timeout=0)):
            with pytest.raises(
                AcquireTimeout,
                match=r"^mutex 'm' on /default: not acquired within 5 s, because memory://\S+ has "
                r"not answered for 5\.0 s\.$",
            ) as late:
                await call
            assert isinstance(late.value.__cause__, EngineUnavailable)
        assert clock.now() == pytest.approx(started + 10)


async def test_what_was_given_up_in_time_is_told(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.events() as stream:
        async with client.session() as session, client.session() as other:
            async with other.mutex("m").lock():
                with pytest.raises(AcquireTimeout):
                    await session.mutex("m").lock(timeout=2)
        told = [event for event in stream._events if isinstance(event, events.TimedOut)]
        assert told == [events.TimedOut("/default", session.id, "m", waited=2.0)]


async def test_the_time_waited_is_told_with_the_grant(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.events() as stream:
        held = await client.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(3)
        await held.release()
        await (await waiting).release()
        waited = [event.waited for event in stream._events if isinstance(event, events.Acquired)]
        assert waited == [0.0, 3.0]


# The end of the session


@ENGINES
async def test_who_waits_learns_of_the_session_s_end(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, world.client() as other:
        async with other.mutex("m").lock():
            session = await client.session(description="mine")
            waiting = asyncio.create_task(session.mutex("m").lock())
            await turns()
            await world.end_sessions("mine")
            with pytest.raises(SessionExpired, match="an administrator ended it"):
                await waiting
            session = await client.session()
            waiting = asyncio.create_task(session.mutex("m").lock())
            await turns()
            await session.aclose()
            with pytest.raises(SessionClosed):
                await waiting


async def test_who_waits_for_a_silent_store_learns_of_the_deadline(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=10)
        engine.cut()
        started = clock.now()
        with pytest.raises(SessionExpired, match="could not be proven alive"):
            await session.mutex("m").lock()
        assert clock.now() - started <= 10
        engine.mend()
        await turns()
        assert await world.queue("m") == []


@pytest.mark.parametrize("engine_turns", [None, 1])
async def test_a_session_that_the_store_has_ended_refuses(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client:
        session = await client.session()
        lost = await session.mutex("other").lock()
        await world.end_sessions()  # and the news is still on its way
        with pytest.raises(SessionExpired) as raised:
            await session.mutex("m").lock()
        assert session.state == "expired"
        assert not lost.held
        assert raised.value.__cause__ is None


async def test_a_granted_request_whose_session_has_ended_is_no_lease(world: World) -> None:
    client, engine = world.slow(2)
    async with client:
        session = await client.session(recovery_window=10)
        acquiring = asyncio.create_task(session.mutex("m").lock())
        await turns(3)
        session._core.begin_end(SessionExpired("the keeper's thread found it so"))
        with pytest.raises((SessionExpired, LeaseLost)):
            await acquiring
        session._core.finish_end()
        assert engine.calls.count("enqueue") == 1


# Refusals


@ENGINES
async def test_what_the_store_refuses_is_raised_and_forgotten(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        with pytest.raises(SemaphoreNotFound, match="Create it first"):
            await session.semaphore("none").acquire()
        with pytest.raises(SemaphoreNotFound):
            await session.semaphore("none").enqueue()
        await session.semaphore("s").create(2)
        with pytest.raises(InvalidArgument, match="1 to the limit, which is 2"):
            await session.semaphore("s").acquire(3)
        with pytest.raises(InvalidArgument, match="data is bytes"):
            await session.semaphore("s").acquire(data="text")  # type: ignore[arg-type]
        assert session._core.requests == {}


@ENGINES
async def test_one_name_is_one_semaphore_whatever_it_is_used_as(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        await session.semaphore("s").create(2)
        with pytest.raises(InvalidArgument, match=r"lasting semaphore.*used here as an ephemeral"):
            await session.mutex("s").lock()
        async with session.mutex("m").lock():
            with pytest.raises(InvalidArgument, match=r"ephemeral semaphore.*used here as a last"):
                await session.semaphore("m").acquire()


@pytest.mark.parametrize("done", [False, True])
async def test_a_request_whose_fate_is_unknown_is_withdrawn(world: World, done: bool) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.fail("enqueue", EngineError("who knows"), done=done)
        with pytest.raises(EngineError, match="who knows"):
            await session.mutex("m").lock()
        await turns()
        assert await world.queue("m") == []
        assert "withdraw" in engine.calls


async def test_an_engine_that_fails_in_the_call_does_so_to_the_caller(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        (slow,) = engine.sessions

        def fail(*_: object, **__: object) -> NoReturn:
            raise EngineError("disk full")

        slow.enqueue = fail  # type: ignore[method-assign]
        withdraw, slow.withdraw = slow.withdraw, fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="disk full") as raised:
            await session.mutex("m").lock()
        assert raised.value.__notes__ == ["and its withdrawal failed: disk full"]
        slow.withdraw = withdraw  # type: ignore[method-assign]


async def test_a_withdrawal_that_fails_is_noted_on_what_caused_it(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        (slow,) = engine.sessions
        async with other.mutex("m").lock():
            withdraw = slow.withdraw

            def fail(_hold: int) -> NoReturn:
                slow.withdraw = withdraw  # type: ignore[method-assign]
                raise EngineError("disk full")

            slow.withdraw = fail  # type: ignore[method-assign, assignment]
            notes: list[str] = []

            async def lock() -> None:
                try:
                    await session.mutex("m").lock()
                except asyncio.CancelledError as error:
                    notes.extend(error.__notes__)
                    raise

            task = asyncio.create_task(lock())
            await turns()
            task.cancel()
            await asyncio.wait([task])
            assert notes == ["and withdrawing the request for 'm' failed: disk full"]
            await asyncio.sleep(1)
            assert len(await world.queue("m")) == 1


async def test_a_grant_may_overtake_the_news_of_the_place(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session, world.client() as other:
        held = await other.mutex("m").lock()
        engine.back.flowing = False
        acquiring = asyncio.create_task(session.mutex("m").lock())
        await turns(2)
        await held.release()
        await turns(2)
        engine.back.flowing = True
        async with await acquiring as lease:
            assert [owner.order_id for owner in await world.queue("m")] == [lease.fencing_token]


async def test_one_given_up_between_the_beginning_and_the_rest_of_the_end_is_gone_with_it(
    world: World,
) -> None:
    client, engine = world.slow(1)
    async with client, world.client() as other:
        held = await other.mutex("m").lock()
        session = await client.session()
        acquiring = asyncio.create_task(session.mutex("m").lock())
        await turns()
        session._core.begin_end(SessionExpired("by the keeper's thread"))
        acquiring.cancel()
        await asyncio.wait([acquiring])
        session._core.finish_end()
        await turns()
        assert "withdraw" not in engine.calls
        assert [request.order_id for request in await world.queue("m")] == [held.fencing_token]


async def test_a_wait_that_is_closed_from_outside_is_withdrawn_soon(world: World) -> None:
    async with world.client() as client, client.session() as session, world.client() as other:
        held = await other.mutex("m").lock()
        waiting = session.mutex("m").lock()
        waiting.send(None)
        assert len(await world.queue("m")) == 2
        waiting.close()
        await turns()
        assert [request.order_id for request in await world.queue("m")] == [held.fencing_token]


# First in, first out


async def test_grants_come_in_the_order_of_the_requests(world: World) -> None:
    order: list[int] = []
    async with world.client() as client, client.session() as session:

        async def work(number: int) -> None:
            async with session.mutex("m").lock():
                order.append(number)
                await turns(1)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(work(number))
    assert order == list(range(10))


async def test_two_tasks_of_one_session_are_two_requests(world: World) -> None:
    async with world.client() as client, client.session() as session:
        mutex = session.mutex("m")
        first = await mutex.lock()
        second = asyncio.create_task(mutex.lock())
        await turns()
        assert not second.done()
        await first.release()
        assert (await second).held
        assert (await second).fencing_token > first.fencing_token
        await (await second).release()


# Deadlocks with oneself


async def test_waiting_for_what_one_is_inside_is_an_error_at_once(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, client.session() as session:
        mutex = session.mutex("m")
        async with mutex.lock() as lease:
            started = clock.now()
            with pytest.raises(SelfDeadlock, match="not re-entrant"):
                await mutex.lock()
            with pytest.raises(SelfDeadlock):
                async with session.mutex("m").lock():
                    pytest.fail("entered")
            assert clock.now() == started
            assert lease.held
            assert len(await world.queue("m")) == 1


async def test_a_try_or_a_timeout_is_no_deadlock(world: World) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")
        async with mutex.lock():
            assert await mutex.try_lock() is None
            with pytest.raises(AcquireTimeout):
                await mutex.lock(timeout=1)


async def test_another_task_s_lease_is_no_deadlock(world: World) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")

        async def wait() -> None:
            async with mutex.lock():
                pass

        async with mutex.lock(), asyncio.timeout(5):
            waiting = asyncio.create_task(wait())
            await turns()
        await waiting


async def test_a_lease_that_was_only_awaited_is_no_deadlock(world: World) -> None:
    async with world.client() as client:
        async with released_after(2, await client.mutex("m").lock()):
            async with client.mutex("m").lock():
                pass


async def test_of_a_counting_semaphore_it_is_one_when_both_do_not_fit(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(5)
        other = await session.semaphore("s").acquire(2)
        async with pool.acquire(2), pool.acquire(1):
            with pytest.raises(SelfDeadlock):
                await pool.acquire(3)  # 2 + 1 + 3 > 5
            async with released_after(2, other):
                async with pool.acquire(2):  # fits beside mine, when the other is gone
                    pass


async def test_through_a_ticket_it_is_one_too_and_the_place_is_kept(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with pool.acquire(), pool.enqueue() as ticket:
            with pytest.raises(SelfDeadlock):
                await ticket.wait()
            assert len(await world.queue("s")) == 2
            with pytest.raises(AcquireTimeout):
                await ticket.wait(timeout=1)


async def test_the_block_of_a_ticket_is_something_to_be_inside_of(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with pool.enqueue(), pool.enqueue() as second:
            with pytest.raises(SelfDeadlock):
                await second.wait()


async def test_what_stands_behind_in_the_queue_is_no_hindrance(world: World) -> None:
    async with world.client() as client, client.session() as session, world.client() as other:
        pool = session.semaphore("s")
        await pool.create(1)
        held = await other.semaphore("s").acquire()
        async with pool.enqueue() as first, pool.enqueue(), released_after(2, held):
            assert (await first.wait()).held


async def test_in_an_election_it_is_one_too(world: World) -> None:
    async with world.client() as client, client.session() as session:
        async with session.election("e").campaign():
            with pytest.raises(SelfDeadlock):
                await session.election("e").campaign()


async def test_through_another_session_of_the_same_store_it_is_one_too(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with client.mutex("m").lock():
            with pytest.raises(SelfDeadlock):
                await other.mutex("m").lock()


async def test_an_equal_name_in_another_store_is_something_else(
    world: World, clock: VirtualClock
) -> None:
    elsewhere = World(clock)
    async with world.client() as client, elsewhere.client() as other, elsewhere.client() as rival:
        held = await rival.mutex("m").lock()
        async with client.mutex("m").lock(), released_after(2, held):
            async with other.mutex("m").lock():
                pass


async def test_an_equal_name_on_another_node_is_something_else(world: World) -> None:
    async with world.client() as client:
        await client.create_node("/n")
        async with client.session("/n") as there:
            held = await there.mutex("m").lock()
            async with client.mutex("m").lock(), released_after(2, held):
                async with there.mutex("m").lock():
                    pass


async def test_a_lease_that_is_over_is_nothing_to_be_inside_of(world: World) -> None:
    async with world.client() as client, client.session() as session:
        async with session.mutex("m").lock() as lease:
            await lease.release()
            async with session.mutex("m").lock():
                pass


async def test_a_grant_that_comes_while_the_store_is_asked_is_taken(world: World) -> None:
    client, engine = world.slow(2)
    async with client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)

        async def release_after(count: int, lease: Lease) -> None:
            await turns(count)
            await lease.release()

        asked: list[bool] = []
        for count in range(12):
            engine.calls.clear()
            async with pool.acquire() as mine, asyncio.TaskGroup() as group:
                group.create_task(release_after(count, mine))
                try:
                    async with pool.acquire() as lease:
                        assert lease.held
                except SelfDeadlock:
                    assert count > 5  # asked before anybody thought of releasing it
                asked.append("describe" in engine.calls)
        assert set(asked) == {True, False}


async def test_one_that_is_evicted_while_the_store_is_asked_is_no_deadlock(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        async with session.mutex("m").lock():

            async def evict() -> None:
                await turns(3)
                second = (await world.queue("m"))[1]
                assert await client.evict("/default", "m", second.order_id)
                engine.there.flowing = True

            operate = engine.operate

            def hold_back(kind: str, operation: Callable[[], object]) -> object:
                if kind == "describe":
                    engine.there.flowing = False
                return operate(kind, operation)

            engine.operate = hold_back  # type: ignore[method-assign, assignment]
            evicting = asyncio.create_task(evict())
            with pytest.raises(LeaseLost, match="evicted"):
                await session.mutex("m").lock()
            await evicting


# Evicted, deleted


async def test_who_is_taken_out_of_the_queue_learns_it(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        async with pool.acquire():
            waiting = asyncio.create_task(pool.acquire())
            await turns()
            second = (await world.queue("s"))[1]
            assert await client.evict("/default", "s", second.order_id)
            with pytest.raises(LeaseLost, match="evicted by an administrator while it waited"):
                await waiting


async def test_who_waits_for_what_is_deleted_learns_it(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        lease = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await turns()
        await pool.delete(force=True)
        with pytest.raises(SemaphoreNotFound, match="deleted while this request waited"):
            await waiting
        assert not lease.held
