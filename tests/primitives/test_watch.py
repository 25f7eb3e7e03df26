"""Watching: the state now, a newer one after every change, and never a stale one at the end."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tenure import fork
from tenure._client.session import Session
from tenure.engines.memory import MemoryEngine
from tenure.errors import (
    EngineError,
    InvalidArgument,
    Misuse,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)
from tests.primitives.helpers import World, turns

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 1, 3])


def watches(session: Session) -> int:
    """How many watches the store knows of."""
    engine = session._core.client.engine
    assert isinstance(engine, MemoryEngine)
    (state,) = [each.state for each in engine.sessions if each.id == session.id]
    return len(state.watches)


@ENGINES
async def test_it_starts_with_the_state_now_and_tells_every_change(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2, b"1")
        async with pool.watch(data=True, owners=True) as states:
            first = await anext(states)
            assert (first.data, first.owners) == (b"1", ())
            await pool.update(b"2")
            assert (await anext(states)).data == b"2"
            async with pool.acquire(data=b"me") as lease:
                assert [owner.data for owner in (await anext(states)).owners] == [b"me"]
                await lease.update(data=b"you")
                assert [owner.data for owner in (await anext(states)).owners] == [b"you"]
            assert (await anext(states)).owners == ()


async def test_only_what_is_watched_is_told(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        async with pool.watch(data=True) as states:
            await anext(states)
            next_one = asyncio.ensure_future(anext(states))
            async with pool.acquire():
                await turns()
            assert not next_one.done()
            await pool.update(b"x")
            assert (await next_one).data == b"x"


async def test_one_must_watch_something(world: World) -> None:
    with pytest.raises(InvalidArgument, match="watch data, owners, or both"):
        world.client().semaphore("s").watch()
    gc.collect()


@ENGINES
async def test_changes_may_be_merged_but_the_last_state_told_is_the_true_one(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        told: list[int] = []

        async def watch() -> None:
            async with pool.watch(data=True) as states:
                async for state in states:
                    told.append(int(state.data or b"-1"))  # noqa: PERF401  seen while it runs

        watching = asyncio.create_task(watch())
        for number in range(30):
            await pool.update(b"%d" % number)
            await turns(number % 4)
        await turns()
        assert told[-1] == 29
        assert told == sorted(set(told))
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_change_while_the_state_is_read_is_not_missed(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session, world.client() as other:
        pool = session.semaphore("s")
        await pool.create(2, b"old")
        async with pool.watch(data=True) as states:
            engine.back.flowing = False
            reading = asyncio.ensure_future(anext(states))
            await turns()
            await other.semaphore("s").update(b"new")
            engine.back.flowing = True
            assert (await reading).data == b"old"
            assert (await anext(states)).data == b"new"


async def test_equal_states_are_told_once(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        async with pool.watch(data=True, owners=True) as states:
            await anext(states)
            next_one = asyncio.ensure_future(anext(states))
            await turns()
            await pool.update(b"x")
            await pool.update(b"")  # back again, before anybody has looked
            await turns()
            assert not next_one.done()
            await states.aclose()
            with pytest.raises(StopAsyncIteration):
                await next_one


@ENGINES
async def test_deletion_ends_it(world: World, engine_turns: int | None) -> None:
    async with world.connect(engine_turns) as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        states = pool.watch(data=True)
        await anext(states)
        await pool.delete()
        with pytest.raises(SemaphoreNotFound):
            await anext(states)
        with pytest.raises(StopAsyncIteration):
            await anext(states)


async def test_what_does_not_exist_cannot_be_watched(world: World) -> None:
    async with world.client() as client, client.session() as session:
        with pytest.raises(SemaphoreNotFound):
            await anext(session.semaphore("none").watch(owners=True))
        await turns()
        assert watches(session) == 0


@ENGINES
async def test_the_end_of_the_session_ends_it(world: World, engine_turns: int | None) -> None:
    async with world.connect(engine_turns) as client, world.client() as other:
        await other.semaphore("s").create(2)
        session = await client.session(description="mine")
        states = session.semaphore("s").watch(data=True)
        await anext(states)
        next_one = asyncio.ensure_future(anext(states))
        await turns()
        await world.end_sessions("mine")
        with pytest.raises(SessionExpired):
            await next_one
        session = await client.session()
        states = session.semaphore("s").watch(data=True)
        await anext(states)
        await session.aclose()
        with pytest.raises(SessionClosed):
            await anext(states)
        with pytest.raises(SessionClosed):
            await anext(session.semaphore("s").watch(data=True))


async def test_a_misuse_is_not_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        async with pool.watch(data=True) as states:
            await anext(states)
            await pool.update(b"x")
            with monkeypatch.context() as patch:
                patch.setattr(fork, "generation", fork.generation + 1)
                with pytest.raises(Misuse):
                    await anext(states)
            assert (await anext(states)).data == b"x"


async def test_a_session_that_the_store_has_ended_is_no_ground_to_watch_from(
    world: World,
) -> None:
    async with world.client() as client:
        session = await client.session()
        await world.end_sessions()  # and the news is still on its way
        with pytest.raises(SessionExpired):
            await anext(session.semaphore("s").watch(data=True))
        assert session.state == "expired"


async def test_who_reads_while_the_store_is_silent_learns_of_the_deadline(world: World) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=10)
        await session.semaphore("s").create(1)
        engine.cut()
        with pytest.raises(SessionExpired):
            await anext(session.semaphore("s").watch(data=True))
        engine.mend()


async def test_a_break_leaks_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        async with pool.watch(data=True) as states:
            async for _ in states:
                break
        await turns(2)
        assert watches(session) == 0
        async for _ in pool.watch(data=True):
            assert watches(session) == 1
            break
        gc.collect()
        await turns(2)
        assert watches(session) == 0
        assert session._core.watchers == {}


async def test_one_that_is_dropped_in_another_thread_ends_too(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        dropped = [pool.watch(data=True)]
        await anext(dropped[0])
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join()
        await turns(2)
        assert watches(session) == 0


async def test_one_that_was_never_read_watched_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        async with session.semaphore("s").watch(data=True) as states:
            assert watches(session) == 0
        with pytest.raises(StopAsyncIteration):
            await anext(states)


async def test_closed_while_it_begins_or_reads_it_ends(world: World) -> None:
    client, engine = world.slow(2)
    async with client, client.session() as session:
        election = session.election("e")
        for count in range(1, 16):
            states = election.observe()
            reading = asyncio.ensure_future(anext(states))
            await turns(count)
            await states.aclose()
            outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
            assert outcome is None or isinstance(outcome, StopAsyncIteration)
            await states.aclose()
        assert session._core.watchers == {}
        assert "describe" in engine.calls


async def test_two_readers_of_one_watch_share_it(world: World) -> None:
    client, _ = world.slow(1)
    async with client, client.session() as session:
        states = session.election("e").observe()
        first, second = (asyncio.ensure_future(anext(states)) for _ in range(2))
        await turns()
        assert len(session._core.watchers) == 1
        async with session.election("e").campaign():
            await asyncio.wait([first, second])
        await states.aclose()
        await turns()


async def test_a_reading_that_was_cancelled_or_failed_is_made_up_for(world: World) -> None:
    client, engine = world.slow(2)
    async with client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(2)
        states = pool.watch(data=True)
        reading = asyncio.ensure_future(anext(states))
        await turns(2)
        reading.cancel()
        await asyncio.wait([reading])
        assert (await anext(states)).data == b""
        engine.fail("describe", EngineError("a fault"))
        await pool.update(b"x")
        with pytest.raises(EngineError):
            await anext(states)
        with pytest.raises(StopAsyncIteration):  # it does not go on with a gap
            await anext(states)


async def test_a_state_whose_reader_was_interrupted_is_given_again(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("s").create(1, b"one")
        async with client.semaphore("s").watch(data=True) as states:
            state = await anext(states)
            states._put_back(state)
            assert await anext(states) == state
