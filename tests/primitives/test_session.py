# ruff: noqa: PT012, SIM117  what raises here is a block, with its body
"""Sessions: attached, out of contact, expired or closed; and what their end does to others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from typing import Any

import pytest

from tenure import events
from tenure._client.client import Client
from tenure.engines.contract import Attach, EngineSession, SessionEvents
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    Misuse,
    NodeNotFound,
    SessionClosed,
    SessionExpired,
)
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, for_ever, this_task, turns

ENGINES = pytest.mark.parametrize("engine_turns", [None, 0, 2])


# States


async def test_it_is_attached_until_it_is_closed(world: World) -> None:
    async with world.client() as client:
        session = await client.session(description="me", recovery_window=20)
        assert session.state == "attached"
        assert (session.node, session.recovery_window, session.max_stall) == ("/default", 20, 40)
        assert repr(session) == f"<Session {session.id} on /default>"
        (seen,) = await world.sessions()
        assert (seen.id, seen.description, seen.recovery_window) == (session.id, "me", 20)
        await session.aclose()
        assert state_of(session) == "closed"
        assert repr(session) == f"<Session {session.id} on /default (over)>"
        assert await world.sessions() == []
        with pytest.raises(SessionClosed, match="on /default was closed"):
            await session.mutex("m").lock()


def state_of(session: Any) -> str:
    """Its state, without a type checker taking the answer for lasting."""
    state: str = session.state
    return state


async def test_out_of_contact_it_is_detached_and_back_in_contact_attached(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        (slow,) = engine.sessions
        slow.attached()  # it is already
        engine.renewals.clear()
        slow.detached()
        slow.detached()
        assert state_of(session) == "detached"
        slow.attached()
        assert state_of(session) == "attached"
        assert engine.renewals == [client.clock.now()]  # it proves itself at once


async def test_over_it_does_not_come_back(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.events() as stream:
        session = await client.session()
        (slow,) = engine.sessions
        slow.detached()
        await session.aclose()
        stream._events.clear()
        slow.attached()
        slow.detached()
        slow.events.granted(99, 1)
        slow.ended(SessionExpired("too late"))
        assert state_of(session) == "closed"
        assert list(stream._events) == []


async def test_left_behind_it_is_detached_for_good_and_lives_for_its_window(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session(recovery_window=5)
        _held = await session.mutex("m").lock()
        await session.detach()
        assert state_of(session) == "detached"
        assert len(await world.queue("m")) == 1
        with pytest.raises(SessionClosed, match="was detached"):
            await session.mutex("m").lock()
        await session.aclose()  # changes nothing any more
        assert len(await world.queue("m")) == 1
        await asyncio.sleep(6.1)
        assert await world.sessions() == []


async def test_one_that_has_expired_is_not_left_behind(world: World) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session()
        session._core.begin_end(SessionExpired("by the keeper's thread"))
        await session.detach()
        assert state_of(session) == "expired"
        assert engine.calls[-1] == "close"


async def test_past_its_deadline_it_is_expired_whoever_looks(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session()
        clock.advance(31)
        assert state_of(session) == "expired"
        with pytest.raises(SessionExpired, match="recovery window of 30 s"):
            await session.mutex("m").lock()


async def test_one_that_nobody_hears_of_expires_in_the_store(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=10)
        engine.cut()
        await asyncio.sleep(12)
        assert await world.sessions() == []
        assert state_of(session) == "expired"
        engine.mend()


# The block


async def test_leaving_its_block_closes_it(world: World) -> None:
    async with world.client() as client:
        async with client.session() as session:
            lease = await session.mutex("m").lock()
        assert state_of(session) == "closed"
        assert not lease.held
        assert await world.queue("m") == []
        with pytest.raises(KeyError):
            async with client.session() as session:
                raise KeyError("the body's")
        assert await world.sessions() == []


async def test_expiry_cancels_the_body_and_raises(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(SessionExpired, match="administrator"):
            async with client.session():
                await world.end_sessions()
                await for_ever()
        assert this_task().cancelling() == 0
        with pytest.raises(SessionExpired):
            async with client.session():
                await world.end_sessions()
                with contextlib.suppress(asyncio.CancelledError):
                    await for_ever()
        assert this_task().cancelling() == 0
        await turns()


async def test_expiry_does_not_hide_the_body_s_error(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(KeyError):
            async with client.session():
                await world.end_sessions()
                try:
                    await for_ever()
                finally:
                    raise KeyError("the body's")


async def test_an_expiry_between_attaching_and_entering_is_one_inside(world: World) -> None:
    outcomes = set()
    client, _ = world.slow(1)

    async def end(step: int) -> None:
        await turns(step)
        await world.end_sessions("mine")

    async with client:
        for step in range(12):
            ending = asyncio.create_task(end(step))
            try:
                async with client.session(description="mine"):
                    await turns(15)
                outcomes.add("too early")
                await world.end_sessions("mine")
            except (SessionExpired, EngineUnavailable) as error:
                outcomes.add(type(error).__name__)
            await ending
            assert this_task().cancelling() == 0
    assert {"too early", "SessionExpired"} <= outcomes
    assert client._core.sessions == {}


async def test_a_lease_inside_of_it_is_lost_first(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(LeaseLost) as raised:
            async with client.session() as session, session.mutex("m").lock():
                await world.end_sessions()
                await for_ever()
        assert isinstance(raised.value.__cause__, SessionExpired)
        caught = False
        with pytest.raises(SessionExpired):
            async with client.session() as session:
                try:
                    async with session.mutex("m").lock():
                        await world.end_sessions()
                        await for_ever()
                except LeaseLost:
                    caught = True
                await for_ever()
        assert caught
    assert this_task().cancelling() == 0


async def test_cancellation_from_outside_wins_over_expiry(world: World) -> None:
    async with world.client() as client:

        async def work() -> None:
            async with client.session():
                await for_ever()

        task = asyncio.create_task(work())
        await turns()
        await world.end_sessions()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_closed_inside_of_its_block_it_ends_quietly(world: World) -> None:
    async with world.client() as client:
        async with client.session() as session:
            await session.aclose()
            await turns()


async def test_closed_by_another_task_the_body_goes_on(world: World) -> None:
    async with world.client() as client:
        async with client.session() as session:
            closing = asyncio.create_task(session.aclose())
            await turns()
        await closing


async def test_it_is_entered_once(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        async with session:
            with pytest.raises(Misuse, match="entered already"):
                await session.__aenter__()
        with pytest.raises(Misuse, match="left once"):
            await session.__aexit__(None, None, None)
        with pytest.raises(SessionClosed):
            await session.__aenter__()


async def test_it_is_left_by_who_has_entered_it(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(Misuse, match="session on /default is left without"):
            await session.__aexit__(None, None, None)
        assert session.state == "attached"


async def test_a_body_that_is_closed_from_outside_closes_it_soon(world: World) -> None:
    async with world.client() as client:
        session = await client.session()

        async def work() -> None:
            async with session:
                await _Suspended()

        coroutine = work()
        coroutine.send(None)
        coroutine.close()
        await turns()
        assert state_of(session) == "closed"


class _Suspended:
    def __await__(self) -> Any:
        yield


# Closing


async def test_it_may_be_closed_twice_and_by_several_at_once(world: World) -> None:
    client, engine = world.slow(2)
    async with client:
        session = await client.session()
        await asyncio.gather(session.aclose(), session.aclose(), session.detach())
        await session.aclose()
        assert engine.calls.count("close") == 1
        assert engine.calls.count("detach") == 0


async def test_a_close_that_fails_is_told_to_who_closes(world: World) -> None:
    client, engine = world.slow()
    async with client:
        engine.fail("close", EngineError("disk full"), EngineError("disk full"))
        session = await client.session()
        with pytest.raises(EngineError, match=r"did not confirm .*\(disk full\); the session ends"):
            await session.aclose()
        with pytest.raises(KeyError) as raised:
            async with client.session():
                raise KeyError("the body's")
        assert "closing the session on /default failed: the store did not confirm the end" in str(
            raised.value.__notes__
        )
        engine.fail("close", EngineError("disk full"))
        with pytest.raises(EngineError):
            async with client.session():
                pass


@pytest.mark.parametrize(("window", "longest"), [(2, 2), (10, 5)])
async def test_a_close_outwaits_neither_the_window_nor_the_answer_timeout(
    world: World, clock: VirtualClock, window: float, longest: float
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=window)
        started = clock.now()
        engine.cut()
        with pytest.raises(EngineError, match="no answer"):
            await session.aclose()
        assert clock.now() - started == pytest.approx(longest)
        engine.mend()


async def test_an_expired_session_that_cannot_be_closed_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow()
    async with client:
        engine.fail("close", EngineError("disk full"))
        session = await client.session()
        with caplog.at_level(logging.WARNING, logger="tenure"):
            await world.end_sessions()
            await turns()
        assert state_of(session) == "expired"
        assert "did not confirm the end of the session on /default (disk full)" in caplog.text
        await session.aclose()


async def test_a_close_that_nobody_waits_for_any_more_and_that_fails_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=10)
        engine.cut()
        closing = asyncio.create_task(session.aclose())
        await turns()
        closing.cancel()
        with caplog.at_level(logging.WARNING, logger="tenure"):
            await asyncio.sleep(11)
        assert "did not confirm the end of the session on /default (no answer)" in caplog.text
        engine.mend()
        del session
    gc.collect()
    assert unheard == []


# Attaching


async def test_a_node_must_exist(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(NodeNotFound, match="/none"):
            await client.session("/none")
        with pytest.raises(NodeNotFound):
            async with client.session("/none"):
                pytest.fail("entered")
        assert client._core.sessions == {}


async def test_what_is_asked_for_is_checked_in_the_call(world: World) -> None:
    client = world.client()
    for wrong, what in (
        ({"path": "x"}, "starts with '/'"),
        ({"recovery_window": 0.5}, "1 to 1800 seconds"),
        ({"recovery_window": -1}, "a recovery window is zero or more"),
        ({"description": "x" * 1025}, "1024 bytes"),
        ({"description": None}, "description is a str, not NoneType"),
        ({"description": "\ud800"}, "valid Unicode text"),
        ({"on_loss": "explode"}, "on_loss"),
        ({"max_stall": -1}, "max_stall"),
    ):
        arguments: dict[str, Any] = wrong
        with pytest.raises(InvalidArgument, match=what):
            client.session(**arguments)
        with pytest.raises(InvalidArgument, match=what):
            client.sessions(**arguments)


class Late:
    """An engine whose attaching takes longer than the session it attaches lives, or worse."""

    def __init__(self, client: Client, seconds: float, ended: bool) -> None:
        self._inner = client._core.engine
        self._seconds = seconds
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def attach(self, how: Attach, told: SessionEvents) -> EngineSession:
        session = await self._inner.attach(how, told)
        told.attached()
        told.detached()
        if self._ended:
            told.ended(SessionExpired("an administrator was quicker"))
        await asyncio.sleep(self._seconds)
        return session


@pytest.mark.parametrize("ended", [True, False])
async def test_an_attaching_that_takes_too_long_has_failed(world: World, ended: bool) -> None:
    client = world.client()
    client._core.engine = Late(client, 0 if ended else 29, ended)
    async with client:
        with pytest.raises(EngineUnavailable, match=r"took longer|quicker"):
            await client.session()
        await turns()
        assert await world.sessions() == []
        assert client._core.sessions == {}


@pytest.mark.parametrize("engine_turns", [None, 2])
async def test_an_attaching_that_is_closed_from_outside_leaves_no_session(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client:
        attaching = client.session()
        attaching.send(None)
        attaching.close()
        await turns()
        assert client._core.sessions == {}
        assert await world.sessions() == []


# Who may use it


async def test_it_cannot_be_used_on_another_loop(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        failures: list[str] = []

        def elsewhere() -> None:
            async def use() -> None:
                for call in (
                    session.mutex("m").lock(),
                    lease.wait_lost(),
                    session.aclose(),
                    session.detach(),
                    client.session(),
                    client.mutex("m").lock(),
                    client.list_nodes(),
                    client.aclose(),
                ):
                    try:
                        await call
                    except Misuse as error:
                        failures.append(str(error))

            asyncio.run(use())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(failures) == 8
        assert all("another event loop; call tenure.connect() in this one" in f for f in failures)
        assert state_of(session) == "attached"


async def test_a_thread_may_acquire_through_the_loop(world: World) -> None:
    async with world.client() as client, client.session() as session:
        loop = asyncio.get_running_loop()
        leases = []
        thread = threading.Thread(
            target=lambda: leases.append(
                asyncio.run_coroutine_threadsafe(session.mutex("m").lock(), loop)
            )
        )
        thread.start()
        thread.join()
        lease = await asyncio.wrap_future(leases[0])
        assert lease.held


async def test_a_deadline_found_by_another_thread_ends_it_on_its_own_loop(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, client.events() as stream:
        session = await client.session()
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock():
                clock.advance(60)
                thread = threading.Thread(target=session._core.lapse)
                thread.start()
                thread.join()
                assert not session._core.finished
                await for_ever()
        assert any(isinstance(event, events.Expired) for event in stream._events)


async def test_a_grant_that_crosses_the_end_is_lost(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session()
        engine.back.flowing = False
        acquiring = asyncio.create_task(session.mutex("m").lock())
        await turns(2)
        session._core.begin_end(SessionExpired("by the keeper's thread"))
        engine.back.flowing = True
        await turns(1)  # the grant comes between the beginning and the rest of the end
        (lease,) = session._core.requests.values()
        assert lease.state.value == "held"
        assert not lease.held
        session._core.finish_end()
        assert isinstance(lease.loss, LeaseLost)
        with pytest.raises((LeaseLost, SessionExpired)):
            await acquiring


def test_a_loop_that_was_closed_leaves_nothing_to_be_told(
    world: World, clock: VirtualClock
) -> None:
    async def begin() -> Any:
        client = world.client()
        session = await client.session()
        return await session.mutex("m").lock()

    with asyncio.Runner() as runner:
        lease = runner.run(begin())
    clock.advance(60)
    assert not lease.held
    assert isinstance(lease.loss, LeaseLost)
