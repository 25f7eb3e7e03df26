# ruff: noqa: PT012, SIM117  what raises here is a block, with its body
"""Sessions that come again: the retry loop, and the one that a client has for itself."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from tenure._client.session import Session
from tenure.errors import (
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    NodeNotFound,
    SessionClosed,
    SessionExpired,
)
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, for_ever, this_task, turns

# The retry loop


async def test_a_body_that_ends_is_not_repeated(world: World) -> None:
    count = 0
    async with world.client() as client:
        async for attempt in client.sessions():
            async with attempt as session:
                assert session.state == "attached"
                count += 1
        assert count == 1
        assert await world.sessions() == []


@pytest.mark.parametrize("how", ["the session's block", "a lease", "asking", "waiting", "group"])
async def test_an_expiry_repeats_it_with_a_new_session(world: World, how: str) -> None:
    ids: list[int] = []
    ending: list[asyncio.Task[None]] = []

    async def work(session: Session) -> None:
        async with session.mutex("m").lock():
            if len(ids) < 3:
                await for_ever()

    async with world.client() as client, world.client() as other:
        async for attempt in client.sessions(description="mine"):
            async with attempt as session:
                ids.append(session.id)
                if len(ids) == 3:
                    break
                ending.append(asyncio.create_task(world.end_sessions("mine")))
                if how == "the session's block":
                    await for_ever()
                elif how == "a lease":
                    await work(session)
                elif how == "asking":
                    lease = await session.mutex("m").lock()
                    while True:
                        await turns(1)
                        lease.check()
                elif how == "waiting":
                    _held = await (await other.session()).mutex("m").lock()
                    await session.mutex("m").lock()
                else:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(work(session))
                        group.create_task(_wait_for(session))
        await asyncio.gather(*ending)
    assert len(set(ids)) == 3
    if how != "group" or sys.version_info >= (3, 13):
        # Before 3.13 a group whose child fails leaves a cancellation counted.
        assert this_task().cancelling() == 0


async def _wait_for(session: Session) -> None:
    async with session.mutex("other").lock() as lease:
        raise await lease.wait_lost()


@pytest.mark.parametrize(
    "error",
    [
        KeyError("mine"),
        SessionExpired("another session's"),
        LeaseLost("another session's"),
        ExceptionGroup("mixed", [KeyError("mine"), SessionExpired("another's")]),
        SessionClosed("closed"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_any_other_error_passes_through(world: World, error: BaseException) -> None:
    attempts = 0
    async with world.client() as client:
        for expired in (False, True):
            with pytest.raises(type(error)) as raised:
                async for attempt in client.sessions(description="mine"):
                    async with attempt:
                        attempts += 1
                        if expired:
                            await world.end_sessions("mine")
                        raise error
            assert raised.value is error
    assert attempts == 2


async def test_a_group_in_which_not_every_leaf_is_the_expiry_passes_through(
    world: World,
) -> None:
    async with world.client() as client:
        with pytest.raises(ExceptionGroup) as raised:
            async for attempt in client.sessions(description="mine"):
                async with attempt as session:
                    lease = await session.mutex("m").lock()
                    await world.end_sessions("mine")
                    loss = await lease.wait_lost()
                    raise ExceptionGroup("g", [ExceptionGroup("h", [loss, KeyError("k")]), loss])
        assert raised.group_contains(KeyError)
        attempts = 0
        async for attempt in client.sessions(description="mine"):
            async with attempt as session:
                attempts += 1
                if attempts > 1:
                    break
                lease = await session.mutex("m").lock()
                await world.end_sessions("mine")
                loss = await lease.wait_lost()
                raise ExceptionGroup("g", [ExceptionGroup("h", [loss]), loss])
        assert attempts == 2


async def test_a_loss_that_is_not_the_session_s_passes_through(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(LeaseLost, match="evicted"):
            async for attempt in client.sessions():
                async with attempt as session, session.mutex("m").lock() as lease:
                    assert await client.evict("/default", "m", lease.fencing_token)
                    await for_ever()


async def test_the_expiry_of_another_session_inside_passes_through(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(SessionExpired):
            async for attempt in client.sessions():
                async with attempt, client.session(description="inner"):
                    await world.end_sessions("inner")
                    await for_ever()


async def test_cancellation_from_outside_wins(world: World) -> None:
    async with world.client() as client:

        async def work() -> None:
            async for attempt in client.sessions(description="mine"):
                async with attempt:
                    await for_ever()

        task = asyncio.create_task(work())
        await turns()
        await world.end_sessions("mine")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_a_body_that_has_done_its_work_is_not_repeated_for_an_expiry_at_its_end(
    world: World, clock: VirtualClock
) -> None:
    done = 0
    async with world.client() as client:
        async for attempt in client.sessions():
            async with attempt:
                clock.advance(60)
                done += 1
    assert done == 1


async def test_an_attempt_that_is_not_used_leaves_nothing(world: World) -> None:
    async with world.client() as client:
        async for _ in client.sessions():
            pass
        async for _ in client.sessions():
            break
        assert client._core.sessions == {}


async def test_what_cannot_be_attached_is_not_tried_again(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(NodeNotFound):
            async for attempt in client.sessions("/none"):
                async with attempt:
                    pytest.fail("attached")


async def test_the_callback_form_gives_what_the_callback_returns(world: World) -> None:
    ids: list[int] = []

    async def work(session: Session) -> str:
        ids.append(session.id)
        async with session.mutex("m").lock():
            if len(ids) < 3:
                await world.end_sessions("mine")
                await for_ever()
            return "done"

    async with world.client() as client:
        assert await client.run("/default", work, description="mine") == "done"
    assert len(set(ids)) == 3


async def test_the_callback_form_takes_what_a_session_takes(world: World) -> None:
    async def work(session: Session) -> tuple[float, float]:
        (seen,) = await world.sessions()
        assert seen.description == "me"
        return session.recovery_window, session.max_stall

    async with world.client() as client:
        assert await client.run(
            "/default", work, recovery_window=5, description="me", on_loss="exit", max_stall=7
        ) == (5, 7)


async def test_the_callback_form_uses_the_default_node_without_a_path(world: World) -> None:
    async def work(session: Session) -> str:
        return session.node

    async with world.client() as client:
        assert await client.run(work) == "/default"
        assert await client.run(work, recovery_window=5) == "/default"


async def test_the_callback_form_needs_the_work(world: World) -> None:
    async with world.client() as client:
        run: Any = client.run
        for arguments in (("/default",), (7, print), (print, print)):
            with pytest.raises(InvalidArgument, match="a path and the work"):
                await run(*arguments)


# The implicit session


async def test_one_session_serves_all_that_is_asked_of_the_client(world: World) -> None:
    async with world.client() as client:
        assert await world.sessions() == []  # attached on first use
        async with client.mutex("m").lock() as first:
            await client.semaphore("s").create(1)
            async with client.semaphore("s").acquire() as second:
                async with client.election("e").campaign() as third:
                    assert first.session is second.session is third.session
        assert len(await world.sessions()) == 1


async def test_used_by_many_at_once_it_is_attached_once(world: World) -> None:
    client, engine = world.slow(3)
    async with client, asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(_lock(client.mutex(f"m{number}").lock()))
        await turns()
        assert engine.calls.count("attach") == 1
        assert engine.calls.count("open") == 1


async def _lock(call: object) -> None:
    async with call:  # type: ignore[attr-defined]
        pass


async def test_it_survives_the_cancellation_of_who_needed_it_first(world: World) -> None:
    client, engine = world.slow(3)
    async with client:
        first = asyncio.create_task(_lock(client.mutex("a").lock()))
        second = asyncio.create_task(_lock(client.mutex("b").lock()))
        await turns(9)
        first.cancel()
        await second
        assert engine.calls.count("attach") == 1
        await asyncio.wait([first])
        assert first.cancelled()


async def test_it_is_there_for_the_next_when_all_who_waited_for_it_were_cancelled(
    world: World,
) -> None:
    client, engine = world.slow(3)
    async with client:
        task = asyncio.create_task(_lock(client.mutex("a").lock()))
        await turns(9)
        task.cancel()
        await turns()
        async with client.mutex("a").lock():
            assert engine.calls.count("attach") == 1


async def test_its_failure_is_told_to_all_who_wait_and_the_next_tries_again(
    world: World,
) -> None:
    client, engine = world.slow(3)
    async with client:
        engine.fail("attach", EngineUnavailable("no route"))
        tasks = [asyncio.create_task(_lock(client.mutex("m").lock())) for _ in range(3)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["no route"] * 3
        async with client.mutex("m").lock():
            pass


async def test_expired_it_is_replaced_at_the_next_use(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")
        first = await mutex.lock()
        clock.advance(60)
        assert not first.held
        async with mutex.lock() as second:
            assert second.session is not first.session
        await world.end_sessions()
        await turns()
        async with mutex.lock() as third:
            assert third.session is not second.session


async def test_the_client_s_end_ends_who_waits_for_it(world: World) -> None:
    client, _ = world.slow(3)
    async with client:
        waiting = asyncio.create_task(_lock(client.mutex("m").lock()))
        await turns(9)
    with pytest.raises(SessionClosed, match="the client of memory://"):
        await waiting
    with pytest.raises(SessionClosed):
        await client.mutex("m").lock()
    assert await world.sessions() == []
