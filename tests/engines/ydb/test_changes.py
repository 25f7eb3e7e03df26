"""Changes of a waiter that another operation on it follows before their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, EngineSession, Place, Withdrawn
from tenure.engines.ydb import connect
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.ydb.behind import Server

PATIENCE = 30.0


async def enqueued(session: EngineSession, request_id: int) -> Place:
    """Request the mutex, and return the place."""
    placed = session.enqueue(request_id, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
    return (await answer_of(placed)).place


@asynccontextmanager
async def owner_and_waiter(server: Server) -> AsyncIterator[tuple[EngineSession, EngineSession]]:
    """Attach two sessions, of which each has a request of number 1."""
    engine = connect(server.url, SystemClock())
    await engine.open()
    try:
        async with asyncio.timeout(PATIENCE):
            how = Attach(DEFAULT_NODE, 30.0)
            owner, waiter = [await engine.attach(how, Recorder()) for _ in range(2)]
            assert await enqueued(owner, 1) is Place.GRANTED
            assert await enqueued(waiter, 1) is Place.WAITING
            yield owner, waiter
    finally:
        await engine.aclose()


async def test_a_change_is_answered_although_its_request_is_withdrawn_meanwhile(
    server: Server,
) -> None:
    async with owner_and_waiter(server) as (owner, waiter):
        changed = waiter.alter(1, count=None, data=b"changed")
        left = waiter.withdraw(1)
        await answer_of(changed)
        assert await answer_of(left) is Withdrawn.LEFT
        assert await enqueued(waiter, 2) is Place.WAITING
        assert await enqueued(waiter, 3) is Place.WAITING
        for each in (2, 3):
            assert await answer_of(waiter.withdraw(each)) is Withdrawn.LEFT
        assert await answer_of(owner.withdraw(1)) is Withdrawn.LEFT


async def test_a_change_is_answered_although_another_one_follows_it_at_once(
    server: Server,
) -> None:
    async with owner_and_waiter(server) as (owner, waiter):
        changes = [waiter.alter(1, count=None, data=data) for data in (b"1", b"2", b"3")]
        for each in changes:
            await answer_of(each)
        assert await enqueued(waiter, 2) is Place.WAITING
        assert await answer_of(owner.withdraw(1)) is Withdrawn.LEFT
        described = await waiter.describe_semaphore("m", owners=True, waiters=False)
        assert [each.data for each in described.owners] == [b"3"]
