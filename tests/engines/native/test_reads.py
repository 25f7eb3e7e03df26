"""Many reads at once: the client sends no more than the server reads, so that renewals arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.server.limits import Limits
from tests.server.talking import serving


async def _held_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the store answer no description until the event is set."""
    may_answer = asyncio.Event()
    describe = engine.describe_semaphore

    async def held_back(*args: Any, **kwargs: Any) -> Any:
        await may_answer.wait()
        return await describe(*args, **kwargs)

    monkeypatch.setattr(engine, "describe_semaphore", held_back)
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
            client.session(recovery_window=2) as session,
            session.mutex("m").lock() as lease,
        ):
            may_answer = await _held_back(engine, monkeypatch)
            reads = [asyncio.create_task(client.describe_semaphore("m")) for _ in range(300)]
            proven = lease.deadline
            while lease.deadline < proven + 2:  # a window later than before the reads
                await asyncio.sleep(0.05)
                lease.check()
            assert not any(each.done() and each.exception() is None for each in reads)
            may_answer.set()
            done = await asyncio.gather(*reads, return_exceptions=True)
            assert {each.name for each in done if not isinstance(each, BaseException)} <= {"m"}
            assert (await client.describe_semaphore("m")).owners
    finally:
        await engine.aclose()
