"""Servers in virtual time, and what tests of hosted sessions say again and again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tenure.engines.memory import MemoryEngine
from tenure.server.native import NativeListener
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way
from tenure.wire.messages import (
    Enqueue,
    ListSessions,
    Placed,
    Renew,
    SessionsListed,
)
from tests.server.talking import Direct, serving

_numbers = itertools.count(1)

ALL = 2**64 - 1


def new_store() -> str:
    """The URL of a store that several servers may have."""
    return f"memory://hosting-{next(_numbers)}"


@asynccontextmanager
async def two_servers(clock: VirtualClock) -> AsyncIterator[tuple[NativeListener, NativeListener]]:
    """Two servers on one store."""
    store = new_store()
    async with serving(store, clock=clock) as one, serving(store, clock=clock) as other:
        yield one, other


@asynccontextmanager
async def slow_store(clock: VirtualClock, way: Way, **more: Any) -> AsyncIterator[NativeListener]:
    """A server whose store answers as the way has it."""
    engine = FaultyEngine(MemoryEngine("", clock), way)
    await engine.open()
    async with serving(engine=engine, **more) as listener:
        try:
            yield listener
        finally:
            way.mend()
    await engine.aclose()


async def mutex(client: Direct, channel: int, hold: int, name: str = "m") -> Placed:
    client.say(Enqueue(client.next_rid(), channel, hold, name, ALL, b"data", None, True))
    return await client.hear(Placed, skip=True)


async def sessions(client: Direct) -> list[int]:
    client.say(ListSessions(client.next_rid(), "/default"))
    return [each.id for each in (await client.hear(SessionsListed, skip=True)).sessions]


async def keep(client: Direct, seconds: float) -> None:
    """Let time pass, and have the session renewed meanwhile."""
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        client.say(Renew(1, 1))
