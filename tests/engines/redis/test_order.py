"""The order of operations when the server forgets its scripts, or the client cannot write them."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Answer, Attach, Place
from tenure.engines.redis import connect
from tenure.engines.redis.engine import RedisEngine
from tenure.engines.redis.lua import SCRIPTS
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.recorder import Detached, Recorder
from tests.engines.redis.helpers import PATIENCE, queue_of
from tests.engines.redis.servers import Server

T = TypeVar("T")


def refused(server: Server) -> object:
    """How many calls of scripts the server has refused."""
    stats = server.tell("INFO", "commandstats")
    assert isinstance(stats, dict)
    return stats.get("cmdstat_evalsha")


async def result(answer: Answer[T]) -> T:
    """An answer, now or when it comes."""
    return await answer if isinstance(answer, asyncio.Future) else answer


@pytest.mark.parametrize("when", ["asked at once", "asked in a turn of the loop"])
async def test_a_withdrawal_does_not_overtake_its_request(server: Server, when: str) -> None:
    engine = connect(server.url, SystemClock())
    await engine.open()
    try:
        session = await engine.attach(Attach("/default", 30.0), Recorder())
        server.tell("SCRIPT", "FLUSH")
        before = refused(server)
        asked = session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
        while refused(server) == before:
            pass  # the loop does not read the refusal yet
        for script in SCRIPTS.values():
            server.tell("SCRIPT", "LOAD", script.text)
        withdrawn: list[object] = []
        if when == "asked at once":
            withdrawn.append(session.withdraw(1))
        else:
            asyncio.get_running_loop().call_soon(lambda: withdrawn.append(session.withdraw(1)))
        assert isinstance(asked, asyncio.Future)
        assert (await asked).place is Place.GRANTED
        (answer,) = withdrawn
        assert isinstance(answer, asyncio.Future)
        assert await answer
        async with tenure.connect(server.url) as other:
            assert await queue_of(other, "m") == (0, 0)
    finally:
        await engine.aclose()


async def test_what_cannot_be_written_is_sent_on_the_next_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: bytes) -> None:
        patch.undo()
        raise MemoryError

    engine = connect(server.url, SystemClock())
    await engine.open()
    try:
        session = await engine.attach(Attach("/default", 30.0), Recorder())
        asked = []
        with monkeypatch.context() as patch:
            for hold in range(1, 21):  # so many that some are sent before the turn of the loop ends
                asked.append(
                    session.enqueue(
                        hold, f"m{hold % 10}", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True
                    )
                )
                if hold == 1:
                    wire = cast("Any", engine).reconnector._connection
                    patch.setattr(wire._transport, "write", fails)
        async with asyncio.timeout(PATIENCE):
            places = [(await result(each)).place for each in asked]
        assert places == [Place.GRANTED] * 10 + [Place.WAITING] * 10
    finally:
        await engine.aclose()


async def test_a_removal_told_before_the_loss_of_its_session_costs_no_connection(
    server: Server,
) -> None:
    """The store is asked to forget the request, and answers that the session is gone."""
    engine = connect(server.url, SystemClock())
    assert isinstance(engine, RedisEngine)
    await engine.open()
    try:
        heard, others = Recorder(), Recorder()
        session = await engine.attach(Attach("/default", 30.0), heard)
        neighbour = await engine.attach(Attach("/default", 30.0), others)
        asked = session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
        assert (await result(asked)).place is Place.GRANTED
        key = f"{{tenure}}:s:{session.id}"
        token = server.tell("HGET", key, "a")
        assert isinstance(token, bytes)
        server.tell("DEL", key)
        server.tell("PUBLISH", engine.channel, f"e {token.decode()} 1")
        await heard.wait_for(lambda told: told.end is not None, "the end of the session")
        await result(neighbour.enqueue(1, "m2", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True))
        assert not any(isinstance(each, Detached) for each in others.said)
    finally:
        await engine.aclose()
