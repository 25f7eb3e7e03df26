"""Many reads at once: the client sends no more than the server reads, so that renewals arrive."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.engines.memory.session import MemorySession
from tenure.events import Renewed
from tenure.model import DEFAULT_NODE
from tenure.server.limits import Limits
from tests.server.talking import serving


async def _held_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, sessions: bool = False
) -> asyncio.Event:
    """Let the store answer no description, of a session or without, until the event is set."""
    may_answer = asyncio.Event()
    described = MemorySession if sessions else type(engine)
    describe: Any = described.describe_semaphore

    async def held_back(*args: Any, **kwargs: Any) -> Any:
        await may_answer.wait()
        return await describe(*args, **kwargs)

    monkeypatch.setattr(described, "describe_semaphore", held_back)
    return may_answer


@pytest.mark.parametrize("operations", [64, 1024])
async def test_a_client_that_reads_much_at_once_renews_its_leases(
    monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    engine = connect_engine("memory://many-reads", SystemClock())
    await engine.open()
    limits = Limits(operations_in_flight=operations)
    try:
        async with (
            asyncio.timeout(60),
            serving(engine=engine, limits=limits) as listener,
            tenure.connect(listener.address) as client,
            client.session(recovery_window=6) as session,
            session.mutex("m").lock() as lease,
            client.events() as events,
        ):
            may_answer = await _held_back(engine, monkeypatch)
            reads = [asyncio.create_task(client.describe_semaphore("m")) for _ in range(300)]
            proven = lease.deadline
            async for event in events:
                lease.check()
                if isinstance(event, Renewed) and lease.deadline >= proven + 3:
                    break  # renewed, and once more
            assert not any(each.done() and each.exception() is None for each in reads)
            may_answer.set()
            done = await asyncio.gather(*reads, return_exceptions=True)
            assert {each.name for each in done if not isinstance(each, BaseException)} <= {"m"}
            assert (await client.describe_semaphore("m")).owners
    finally:
        await engine.aclose()


@pytest.mark.parametrize("closing", [True, False])
async def test_reads_of_a_session_that_has_ended_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch, *, closing: bool
) -> None:
    engine = connect_engine("memory://ended-reads", SystemClock())
    await engine.open()
    try:
        async with (
            asyncio.timeout(60),
            serving(engine=engine) as listener,
            tenure.connect(listener.address) as client,
        ):
            await client.list_nodes()
            may_answer = await _held_back(engine, monkeypatch, sessions=True)
            for _ in range(1 if closing else 3):  # a session closes after its reads, in 14 s
                session = await client.session(description="reading")
                mutex = session.mutex("m")
                reads = [asyncio.create_task(mutex.describe(owners=True)) for _ in range(70)]
                await asyncio.sleep(0)
                if closing:
                    with contextlib.suppress(tenure.EngineError):  # it closes after its reads
                        await session.aclose()
                else:
                    (found,) = await engine.list_sessions(DEFAULT_NODE)
                    await engine.end_session(DEFAULT_NODE, found.id)
                done = await asyncio.gather(*reads, return_exceptions=True)
                assert all(isinstance(each, tenure.TenureError) for each in done)
            may_answer.set()
            async with client.session() as session, session.mutex("m").lock(timeout=30):
                assert await client.list_nodes() == [DEFAULT_NODE]
    finally:
        await engine.aclose()
