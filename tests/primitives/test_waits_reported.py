"""Each wait is reported when it begins, and once when it ends, in whatever way it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from tenure import events
from tenure._client.client import Client
from tenure._client.session import Session
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
from tenure.events import Event, EventStream
from tests.primitives.helpers import World, turns

ENDS = (events.Acquired, events.TimedOut, events.NotAcquired)


def told(stream: EventStream) -> list[Event]:
    """The waits and their ends."""
    return [each for each in stream._events if isinstance(each, (events.Requested, *ENDS))]


def outcomes(stream: EventStream, name: str = "m") -> list[str]:
    """How the waits for a name have ended, each of which has begun before."""
    waiting = 0
    ends: list[str] = []
    for event in told(stream):
        assert isinstance(event, (events.Requested, *ENDS))
        if event.name != name:
            continue
        match event:
            case events.Requested():
                waiting += 1
                continue
            case events.NotAcquired():
                ends.append(event.outcome)
            case events.Acquired():
                ends.append("acquired")
            case events.TimedOut():
                ends.append("timed_out")
        waiting -= 1
        assert waiting >= 0
    assert waiting == 0
    return ends


Way = Callable[[World, Client, Session], Awaitable[None]]


async def a_timeout(world: World, client: Client, session: Session) -> None:
    with pytest.raises(AcquireTimeout):
        await session.mutex("m").lock(timeout=2)


async def an_attempt(world: World, client: Client, session: Session) -> None:
    assert await session.mutex("m").try_lock() is None


async def an_attempt_by_its_timeout(world: World, client: Client, session: Session) -> None:
    with pytest.raises(AcquireTimeout):
        await session.mutex("m").lock(timeout=0)


async def a_cancellation(world: World, client: Client, session: Session) -> None:
    waiting = asyncio.create_task(session.mutex("m").lock())
    await turns()
    waiting.cancel()
    await asyncio.wait([waiting])


async def a_timeout_of_the_program(world: World, client: Client, session: Session) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await session.mutex("m").lock()


async def an_eviction(world: World, client: Client, session: Session) -> None:
    waiting = asyncio.create_task(session.mutex("m").lock())
    await turns()
    place = (await world.queue("m"))[-1].order_id
    assert place is not None
    assert await client.evict("/default", "m", place)
    with pytest.raises(LeaseLost):
        await waiting


async def a_deletion(world: World, client: Client, session: Session) -> None:
    pool = session.semaphore("m")
    waiting = asyncio.create_task(pool.acquire())
    await turns()
    await pool.delete(force=True)
    with pytest.raises(SemaphoreNotFound):
        await waiting


async def a_close(world: World, client: Client, session: Session) -> None:
    waiting = asyncio.create_task(session.mutex("m").lock())
    await turns()
    await session.aclose()
    with pytest.raises(SessionClosed):
        await waiting


async def an_expiry(world: World, client: Client, session: Session) -> None:
    waiting = asyncio.create_task(session.mutex("m").lock())
    await turns()
    assert await client.end_session("/default", session.id)
    with pytest.raises(SessionExpired):
        await waiting


async def a_ticket_that_leaves(world: World, client: Client, session: Session) -> None:
    async with session.mutex("m").enqueue() as ticket:
        with pytest.raises(AcquireTimeout):
            await ticket.wait(timeout=1)  # the place is kept, and the wait goes on


async def a_deadlock(world: World, client: Client, session: Session) -> None:
    async with session.mutex("mine").lock():
        with pytest.raises(SelfDeadlock):
            await session.mutex("mine").lock()


@pytest.mark.parametrize("turns", [None, 2], ids=["directly", "far away"])
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (a_timeout, "timed_out"),
        (an_attempt, "rejected"),
        (an_attempt_by_its_timeout, "rejected"),
        (a_cancellation, "cancelled"),
        (a_timeout_of_the_program, "cancelled"),
        (an_eviction, "failed"),
        (a_close, "failed"),
        (an_expiry, "failed"),
        (a_ticket_that_leaves, "withdrawn"),
    ],
)
async def test_a_wait_has_one_end(world: World, way: Way, expected: str, turns: int | None) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.connect(turns))
        other = await stack.enter_async_context(world.client())
        held = await other.mutex("m").lock()
        stream = await stack.enter_async_context(client.events())
        session = await client.session()
        await way(world, client, session)
        await asyncio.sleep(1)
        assert outcomes(stream) == [expected]
        await session.aclose()
        await held.release()


async def test_a_wait_for_a_deleted_semaphore_has_one_end(world: World) -> None:
    async with world.client() as client, client.session() as session, client.events() as stream:
        await session.semaphore("m").create(limit=1)
        async with client.session() as other:
            held = await other.semaphore("m").acquire()
            await a_deletion(world, client, session)
            assert outcomes(stream) == ["acquired", "failed"]
            assert held.loss is not None
        lost = [each for each in stream._events if isinstance(each, events.Lost)]
        assert [each.cause for each in lost] == ["deleted"]


async def test_a_wait_of_a_program_for_itself_has_one_end(world: World) -> None:
    async with world.client() as client, client.session() as session, client.events() as stream:
        await a_deadlock(world, client, session)
        assert outcomes(stream, "mine") == ["acquired", "failed"]


async def test_waits_for_any_of_several_have_one_end_each(world: World) -> None:
    async with world.client() as client, client.session() as session, client.events() as stream:
        a, b, c = (session.mutex(name) for name in "abc")
        async with world.client() as other, other.mutex("a").lock(), other.mutex("c").lock():
            async with client.any_of(a, b):
                pass
            with pytest.raises(AcquireTimeout):
                await client.any_of(a, c, timeout=1)
            with pytest.raises(AcquireTimeout):
                await client.any_of(a, c, timeout=0)
            waiting = asyncio.create_task(client.any_of(a, c))
            await turns()
            waiting.cancel()
            await asyncio.wait([waiting])
        assert outcomes(stream, "a") == ["withdrawn", "timed_out", "timed_out", "cancelled"]
        assert outcomes(stream, "b") == ["acquired"]
        assert outcomes(stream, "c") == ["timed_out", "timed_out", "cancelled"]


async def test_a_wait_begins_before_the_session_is_attached(world: World) -> None:
    client, engine = world.slow()
    async with client, client.events() as stream:
        engine.back.flowing = False
        waiting = asyncio.create_task(client.mutex("m").lock())
        await turns()
        assert told(stream) == [events.Requested("/default", 0, "m")]
        await asyncio.sleep(3)
        engine.back.flowing = True
        lease = await waiting
        waits = told(stream)
        assert waits[1:] == [
            events.Acquired("/default", lease.session.id, "m", lease.fencing_token, waited=3.0)
        ]
        await lease.release()


async def test_a_wait_for_the_next_session_names_none(world: World) -> None:
    async with world.client() as client, client.events() as stream:
        async with client.mutex("m").lock() as lease:
            session = lease.session.id
        await client.end_session("/default", session)
        await turns()
        async with client.mutex("m").lock():
            pass
        begins = [each for each in told(stream) if isinstance(each, events.Requested)]
        assert begins == [events.Requested("/default", 0, "m")] * 2


async def test_a_wait_whose_session_is_never_attached_has_one_end(world: World) -> None:
    client, engine = world.slow()
    async with client, client.events() as stream:
        engine.fail("attach", EngineUnavailable("down"), EngineUnavailable("down"))
        with pytest.raises(EngineUnavailable):
            await client.mutex("m").lock()
        with pytest.raises(EngineUnavailable):
            await client.mutex("m").lock(timeout=5)
        engine.cut()
        with pytest.raises(AcquireTimeout):
            await client.mutex("m").lock(timeout=5)
        with pytest.raises(AcquireTimeout):
            await client.mutex("m").try_lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert outcomes(stream) == ["failed", "failed", "timed_out", "timed_out", "cancelled"]
        failed = told(stream)[1]
        assert failed == events.NotAcquired("/default", 0, "m", 0.0, "failed", "down")
        engine.mend()


@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_wait_for_a_session_ends_with_its_coroutine(
    world: World, timeout: float | None
) -> None:
    client, engine = world.slow()
    async with client, client.events() as stream:
        engine.back.flowing = False
        locking = client.mutex("m").lock(timeout=timeout)
        locking.send(None)
        await turns()
        thread = threading.Thread(target=locking.close)
        thread.start()
        thread.join()
        await turns()
        assert outcomes(stream) == ["cancelled"]
        engine.back.flowing = True


@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_wait_for_a_session_ends_with_the_client(
    world: World, timeout: float | None
) -> None:
    client, engine = world.slow()
    async with client:
        stream = client.events()
        engine.cut()
        waiting = asyncio.create_task(client.mutex("m").lock(timeout=timeout))
        await turns()
        engine.mend()
        await client.aclose()
        with pytest.raises(SessionClosed):
            await waiting
        assert outcomes(stream) == ["failed"]


async def test_a_request_that_the_store_refuses_has_one_end(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session, client.events() as stream:
        engine.fail("enqueue", EngineError("the disk is full"))
        with pytest.raises(EngineError):
            await session.mutex("m").lock()
        assert outcomes(stream) == ["failed"]
        (failed,) = told(stream)[1:]
        assert isinstance(failed, events.NotAcquired)
        assert failed.reason == "the disk is full"


@pytest.mark.parametrize("timeout", [None, 5])
async def test_a_request_that_is_refused_as_soon_as_it_is_sent_has_one_end(
    world: World, timeout: float | None
) -> None:
    async with world.client() as other, other.session() as session:
        await session.semaphore("m").create(limit=1)
        async with world.client() as client, client.events() as stream:
            with pytest.raises(InvalidArgument):
                await client.mutex("m").lock(timeout=timeout)
            assert outcomes(stream) == ["failed"]


async def test_a_request_that_cannot_be_made_is_no_wait(world: World) -> None:
    async with world.client() as client, client.events() as stream:
        session = await client.session()
        await session.aclose()
        with pytest.raises(SessionClosed):
            await session.mutex("m").lock()
        assert told(stream) == []


async def test_a_timeout_that_crosses_the_grant_has_one_end(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session, client.events() as stream:
        engine.back.flowing = False
        with pytest.raises(AcquireTimeout):
            await session.mutex("m").lock(timeout=2)
        engine.back.flowing = True
        await turns()
        assert outcomes(stream) == ["timed_out"]
        assert await world.queue("m") == []


async def test_a_recovered_request_waits_again(world: World) -> None:
    async with world.client() as client, world.client() as other:
        held = await other.mutex("m").lock()
        before = await client.session(resumable=True)
        _place = await before.mutex("m").enqueue()
        token = before.resume_token
        await before.detach()
        async with other.events() as stream, other.session(resume=token) as session:
            ticket = session.mutex("m").recover()
            assert ticket is not None
            assert [type(each) for each in told(stream)] == [events.Requested]
            await held.release()
            await (await ticket.wait(timeout=5)).release()
            assert outcomes(stream) == ["acquired"]


async def test_a_loss_has_a_cause(world: World) -> None:
    async with world.client() as client, client.events() as stream:
        for end in ("evict", "expire", "close"):
            session = await client.session()
            lease = await session.mutex("m").lock()
            match end:
                case "evict":
                    await client.evict("/default", "m", lease.fencing_token)
                case "expire":
                    await client.end_session("/default", session.id)
                case _:
                    await session.aclose()
            await turns()
            await session.aclose()
        lost = [each.cause for each in stream._events if isinstance(each, events.Lost)]
        assert lost == ["evicted", "session_expired", "session_closed"]
