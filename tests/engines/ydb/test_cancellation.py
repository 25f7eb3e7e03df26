"""Cancelled anywhere: nothing is left behind, and what goes on goes on in good order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach
from tenure.engines.ydb import connect
from tenure.model import DEFAULT_NODE
from tenure.testing.recorder import Recorder
from tests.engines.ydb.behind import Server, in_memory

TURNS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with in_memory() as store:
        server = Server(store)
        server.start()
        yield server
        server.stop()


async def cancelled_after(turns: int, operation: Awaitable[Any]) -> None:
    """Begin it, cancel it after so many turns of the loop, and wait for its end."""
    task = asyncio.ensure_future(operation)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def test_opening(server: Server) -> None:
    for turns in range(TURNS):
        engine = connect(server.url, SystemClock())
        await cancelled_after(turns, engine.open())
        await engine.aclose()


@pytest.mark.parametrize(
    "operation",
    [
        lambda session, n: session.create_semaphore(f"new {n}", 1, b"", exist_ok=True),
        lambda session, n: session.update_semaphore("pool", b"%d" % n),
        lambda session, _: session.describe_semaphore("pool", owners=True, waiters=True),
        lambda session, n: session.delete_semaphore(f"old {n}", force=True),
    ],
    ids=["create", "update", "describe", "delete"],
)
async def test_an_operation(
    server: Server, operation: Callable[[Any, int], Awaitable[object]]
) -> None:
    engine = connect(server.url, SystemClock())
    await engine.open()
    session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
    await session.create_semaphore("pool", 1, b"", exist_ok=True)
    for turns in range(8):
        await session.create_semaphore(f"old {turns}", 1, b"", exist_ok=True)
        await cancelled_after(turns, operation(session, turns))
    assert (await session.describe_semaphore("pool", owners=False, waiters=False)).limit == 1
    await engine.aclose()


@pytest.mark.parametrize("how", ["close", "detach"])
async def test_the_end_of_a_session(server: Server, how: str) -> None:
    engine = connect(server.url, SystemClock())
    await engine.open()
    for turns in range(8):
        session = await engine.attach(Attach(DEFAULT_NODE, 1.0), Recorder())
        await cancelled_after(turns, getattr(session, how)())
        await getattr(session, how)()  # is over when this returns, whoever began it
    await engine.aclose()
    store = connect_engine(server.store, SystemClock())
    await store.open()
    server.stop()  # it tells its store who has gone before it ends, and ends nobody's session
    sessions = await store.list_sessions(DEFAULT_NODE)
    assert how == "detach" or sessions == []
    assert not any(each.attached for each in sessions)
    server.start()
    await store.aclose()


async def test_acquiring_with_siblings(server: Server) -> None:
    """Tasks of one client want one name, and are cancelled at any moment: nothing is left."""
    async with tenure.connect(server.url) as client:
        mutex = client.mutex("cancelled")

        async def work() -> None:
            async with mutex.lock():
                await asyncio.sleep(0)

        for turns in range(12):
            tasks = [asyncio.create_task(work()) for _ in range(4)]
            for _ in range(3 * turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks)
            assert not any(task.exception() for task in tasks if not task.cancelled())
        async with asyncio.timeout(20), mutex.lock():
            pass
