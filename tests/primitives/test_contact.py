"""Outages as programs see them: what errors say, and what is logged."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tenure._client.client import Client
from tenure._client.contact import reason_of
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure.engines import ClientParameters, split_client_parameters
from tenure.errors import AcquireTimeout, EngineError, EngineUnavailable, InvalidArgument
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World
from tests.primitives.slow import SlowEngine

REFUSED = EngineUnavailable("cache:6379 cannot be reached")
REFUSED.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")


def lose(engine: SlowEngine, *sessions: Session) -> None:
    """Break the way to the store, and have the sessions told."""
    engine.cut()
    engine.trouble_told = REFUSED
    for session in sessions:
        session._core.detached(REFUSED)


def find(engine: SlowEngine, *sessions: Session) -> None:
    engine.trouble_told = None
    engine.mend()
    for session in sessions:
        session._core.attached()


@asynccontextmanager
async def held_by_another(world: World) -> AsyncIterator[None]:
    async with world.client() as other, other.mutex("m").lock():
        yield


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        f"{each.levelname} {each.getMessage()}"
        for each in caplog.records
        if each.name == "tenure" and each.levelno >= logging.INFO
    ]


# What errors say


async def test_a_timeout_during_an_outage_names_it_and_has_its_cause(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        lose(engine, session)
        await asyncio.sleep(1)
        with pytest.raises(AcquireTimeout) as late:
            await session.mutex("nightly").lock(timeout=2)
        assert str(late.value) == (
            f"mutex 'nightly' on /default: not acquired within 2 s, because {client.url} has been "
            "unreachable for 3.0 s (connection refused)."
        )
        assert late.value.__cause__ is REFUSED
        assert (late.value.node, late.value.name) == ("/default", "nightly")
        find(engine, session)


async def test_a_waiter_is_told_of_an_outage_that_began_while_it_waited(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, held_by_another(world):
        waiting = asyncio.create_task(session.mutex("m").lock(timeout=5))
        await asyncio.sleep(2)
        lose(engine, session)
        with pytest.raises(AcquireTimeout, match=r"unreachable for 3\.0 s") as late:
            await waiting
        assert late.value.__cause__ is REFUSED
        find(engine, session)


async def test_a_store_that_falls_silent_is_not_taken_for_a_busy_one(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, held_by_another(world):
        waiting = asyncio.create_task(session.mutex("m").lock(timeout=5))
        await asyncio.sleep(2)
        engine.back.flowing = False  # and no one notices
        with pytest.raises(AcquireTimeout, match=r"has not answered for 1\.0 s") as late:
            await waiting
        assert isinstance(late.value.__cause__, EngineUnavailable)
        engine.mend()


async def test_a_shared_probe_without_an_answer_is_not_taken_for_one(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, held_by_another(world):
        mutex = session.mutex("m")
        waiting = [asyncio.create_task(mutex.lock(timeout=seconds)) for seconds in (5, 6.5)]
        await asyncio.sleep(2)
        engine.back.flowing = False
        for each in waiting:
            with pytest.raises(AcquireTimeout, match=r"has not answered for 1\.0 s"):
                await each
        engine.mend()


async def test_a_probe_costs_nothing_when_the_grant_comes_in_time(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        held = await other.mutex("m").lock()
        waiting = asyncio.create_task(session.mutex("m").lock(timeout=5))
        await asyncio.sleep(3)
        await held.release()
        await (await waiting).release()
        assert "describe" not in engine.calls


async def test_a_short_wait_is_not_probed(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        async with other.mutex("m").lock():
            with pytest.raises(AcquireTimeout, match=r"within \S+ s; "):
                await session.mutex("m").lock(timeout=0.1)
        assert engine.calls.count("describe") == 1  # for the holder's name


async def test_a_probe_of_a_session_that_ends_is_given_up(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client, world.client() as other:
        session = await client.session()
        async with other.mutex("m").lock():
            waiting = asyncio.create_task(session.mutex("m").lock(timeout=5))
            await asyncio.sleep(4.0)
            engine.back.flowing = False
            await asyncio.sleep(0.5)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            engine.mend()
            await session.aclose()


async def test_a_store_that_answers_and_grants_nothing_says_so(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, held_by_another(world):
        mutex = session.mutex("m")
        engine.trouble_told = EngineError("nothing is granted for 12 s, until old leases end")
        for call in (mutex.try_lock(), mutex.lock(timeout=0)):
            with pytest.raises(AcquireTimeout, match="at once, because nothing is granted"):
                await call
        with pytest.raises(AcquireTimeout, match="within 3 s, because nothing is granted") as late:
            await mutex.lock(timeout=3)
        assert late.value.__cause__ is engine.trouble_told
        engine.trouble_told = None
        assert await mutex.try_lock() is None


async def test_a_ticket_that_waits_in_vain_says_why(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        pool = session.semaphore("s")
        await pool.create(1)
        async with other.semaphore("s").acquire(), pool.enqueue() as ticket:
            with pytest.raises(
                AcquireTimeout, match=r"within 2 s; held by .*; the place in its queue"
            ):
                await ticket.wait(2)
            lose(engine, session)
            with pytest.raises(AcquireTimeout, match=r"refused\); the place .* is kept") as late:
                await ticket.wait(2)
            assert late.value.__cause__ is REFUSED
            find(engine, session)


# Reads


async def test_reads_end_within_the_answer_timeout(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.cut()
        reads = (
            session.mutex("m").inspect(),
            session.semaphore("s").describe(),
            session.semaphore("s").count(),
            session.election("e").leader(),
        )
        for read in reads:
            started = clock.now()
            with pytest.raises(
                EngineUnavailable, match=r"not read within 5 s, because .* 5\.0 s\."
            ):
                await read
            assert clock.now() == pytest.approx(started + 5)
        engine.mend()
        assert await session.mutex("m").inspect() is None


async def test_a_read_raises_the_errors_of_the_store_as_they_are(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.fail("describe", TimeoutError("the store's own"))
        with pytest.raises(TimeoutError, match="the store's own"):
            await session.mutex("m").inspect()


async def test_the_url_says_how_long_an_answer_may_take(world: World, clock: VirtualClock) -> None:
    _, engine = world.slow()
    client = Client(engine, clock, answer_timeout=0.5)
    async with client, client.session() as session:
        engine.cut()
        started = clock.now()
        with pytest.raises(AcquireTimeout, match=r"within 0\.5 s"):
            await session.mutex("m").try_lock()
        assert clock.now() == pytest.approx(started + 0.5)
        engine.mend()


@pytest.mark.parametrize(
    ("url", "rest", "seconds"),
    [
        ("memory://", "memory://", None),
        ("memory://?answer_timeout=2", "memory://", 2.0),
        ("redis://h?a=1&answer_timeout=0.5&b=2", "redis://h?a=1&b=2", 0.5),
        ("redis://h?xanswer_timeout=0.5", "redis://h?xanswer_timeout=0.5", None),
    ],
)
def test_the_answer_timeout_is_taken_from_the_url(
    url: str, rest: str, seconds: float | None
) -> None:
    assert split_client_parameters(url) == (rest, ClientParameters(answer_timeout=seconds))


@pytest.mark.parametrize(
    ("url", "rest", "given"),
    [
        ("redis://h?reaper=false", "redis://h", ClientParameters(reaper=False)),
        ("redis://h?a=1&reaper=on&answer_timeout=2", "redis://h?a=1", ClientParameters(2.0, True)),
    ],
)
def test_the_reaper_is_switched_in_the_url(url: str, rest: str, given: ClientParameters) -> None:
    assert split_client_parameters(url) == (rest, given)


@pytest.mark.parametrize("value", ["", "maybe", "1&reaper=1"])
def test_a_wrong_switch_of_the_reaper_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"reaper in a URL is true or false, given once"):
        split_client_parameters(f"redis://:secret@h?reaper={value}")


@pytest.mark.parametrize("value", ["", "0", "never", "nan", "601", "-1", "1&answer_timeout=1"])
def test_a_wrong_answer_timeout_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"answer_timeout in a URL is a number of seconds"):
        split_client_parameters(f"redis://:secret@h?answer_timeout={value}")


# The log


async def test_an_outage_is_logged_once_for_all_sessions(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tenure")
    client, engine = world.slow()
    async with client:
        sessions = [await client.session() for _ in range(3)]
        lose(engine, *sessions[:2])
        lose(engine, sessions[2])
        await asyncio.sleep(4)
        find(engine, sessions[0])
        assert len(logged(caplog)) == 1  # two are still away
        find(engine, *sessions[1:])
        lost, found = logged(caplog)
        assert lost.startswith(
            f"WARNING lost contact, nothing is granted meanwhile: url={client.url} "
            "error=connection refused"
        )
        assert found == f"INFO re-established contact: url={client.url} seconds=4.0"
        lose(engine, sessions[1])
        await asyncio.sleep(2)
        find(engine, sessions[1])
        assert len(logged(caplog)) == 4


async def test_a_brief_interruption_is_one_line_for_debugging(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tenure")
    client, engine = world.slow()
    async with client:
        session = await client.session()
        for _ in range(3):
            lose(engine, session)
            await asyncio.sleep(0.9)
            find(engine, session)
            await asyncio.sleep(5)
    said = [
        (each.levelname, each.getMessage())
        for each in caplog.records
        if "contact" in each.getMessage()
    ]
    line = f"lost contact for a moment: url={client.url} error=connection refused"
    assert said == [("DEBUG", line)] * 3


async def test_an_interruption_that_the_last_session_does_not_survive_is_not_logged(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tenure")
    client, _ = world.slow()
    async with client:
        session = await client.session()
        session._core.detached(REFUSED)
        await session.aclose()
        await asyncio.sleep(5)
    assert "contact" not in caplog.text


async def test_an_outage_that_outlives_the_sessions_ends_with_the_next_one(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tenure")
    client, engine = world.slow()
    async with client:
        await (await client.mutex("m").lock()).release()
        engine.cut()
        engine.trouble_told = REFUSED
        for core in client._core.sessions:
            assert isinstance(core, SessionCore)
            core.detached(REFUSED)
        await asyncio.sleep(60)
        assert not client._core.sessions
        assert len(logged(caplog)) == 1
        find(engine)
        await (await client.mutex("m").lock()).release()
        assert logged(caplog)[1:] == [f"INFO re-established contact: url={client.url} seconds=60.0"]


async def test_the_end_of_the_last_detached_session_ends_the_outage_of_the_others(
    world: World, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tenure")
    client, _ = world.slow()
    async with client, client.session():
        other = await client.session()
        other._core.detached()  # without a cause
        await asyncio.sleep(2)
        await other.aclose()
        lost, found = logged(caplog)
        assert lost.startswith(
            f"WARNING lost contact, nothing is granted meanwhile: url={client.url} error=unknown"
        )
        assert found.startswith("INFO re-established")


# Causes


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (REFUSED, "connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed, ..."),
            "connection refused",
        ),
        (EngineUnavailable("[Errno 113] Connect call failed ('10.0.0.9', 1)"), "no route to host"),
        (EngineUnavailable("the server closed the connection"), "the server closed the connection"),
        (EngineUnavailable("no answer within 5 s; is it stuck?"), "no answer within 5 s"),
        (ssl.SSLError(1, "wrong version number"), "[SSL] wrong version number"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_cause_is_told_in_a_few_words(error: Exception, reason: str) -> None:
    assert reason_of(error).endswith(reason.removeprefix("[SSL] "))
