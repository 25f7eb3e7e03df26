"""The order of operations when the server forgets its scripts, and others load them again."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Place
from tenure.engines.redis import connect
from tenure.engines.redis.scripts import SCRIPTS
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.recorder import Recorder
from tests.engines.redis.helpers import queue_of
from tests.engines.redis.servers import Server


def refused(server: Server) -> object:
    """How many calls of scripts the server has refused."""
    stats = server.tell("INFO", "commandstats")
    assert isinstance(stats, dict)
    return stats.get("cmdstat_evalsha")


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
