"""Watches in large numbers: each costs the same to begin and to end, however many there are.

Work is counted, not timed: the lines that run in the modules that keep watches, and the comparisons
of one watch with another that a search through a list makes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.core import node
from tenure.engines._kit.watchers import LocalWatch
from tenure.engines.contract import Attach, Engine, EngineSession
from tenure.engines.etcd import watch_cache
from tenure.engines.sqlite.watches import SqliteWatch
from tenure.engines.ydb import watches
from tenure.testing.conformance import Stores
from tenure.testing.recorder import Recorder
from tests.engines.stores import MEMORY_IN_REAL_TIME, stores

FEW, MANY = 150, 300
KEEP_WATCHES = {
    *(
        "engine.py",
        "watches.py",
        "monitor.py",
        "monitor.py",
        "node.py",
        "store.py",
        "watchers.py",
        "watches.py",
    ),
}

ENGINES = [
    pytest.param(MEMORY_IN_REAL_TIME, node.StoredWatch, id="memory"),
    pytest.param(stores("sqlite"), SqliteWatch, id="sqlite"),
    pytest.param(stores("redis"), LocalWatch, id="redis"),
    pytest.param(stores("etcd"), watch_cache.CacheWatcher, id="etcd"),
]
YDB = pytest.param(stores("ydb"), watches._Listener, id="ydb")

on_engines = pytest.mark.parametrize(("store", "watch"), [*ENGINES, YDB])
on_engines_with_long_queues = pytest.mark.parametrize(("store", "watch"), ENGINES)


class Work:
    """A count of what is done in its block."""

    def __init__(self) -> None:
        self.done = 0

    def __enter__(self) -> Work:
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if os.path.basename(frame.f_code.co_filename) not in KEEP_WATCHES:
            return None
        self.done += event == "line"
        return self._trace


@pytest.fixture
def work(watch: type, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts, with the comparisons of an engine's watches."""
    counting = Work()

    def compared(one: object, other: object) -> bool:
        counting.done += 1
        return one is other

    monkeypatch.setattr(watch, "__eq__", compared)
    return counting


@asynccontextmanager
async def opened(store: Stores) -> AsyncIterator[Engine]:
    with store.empty() as url:
        engine = store.connector(url, SystemClock())
        await engine.open()
        try:
            yield engine
        finally:
            await engine.aclose()


async def attached(engine: Engine) -> EngineSession:
    return await engine.attach(Attach("/default", 30.0), Recorder())


async def waiting(session: EngineSession, count: int) -> None:
    """Have requests in a queue, all but the first of which wait."""
    for hold in range(count):
        answer = session.enqueue(hold, "queue", 1, b"", timeout=None, ephemeral=False)
        if isinstance(answer, asyncio.Future):
            await answer


async def watching(session: EngineSession, names: list[str]) -> list[Callable[[], None]]:
    stops = [session.watch(name, data=True, owners=True, changed=lambda: None) for name in names]
    await session.create_semaphore("after", 1, b"", exist_ok=True)  # they have begun by then
    return stops


@on_engines
async def test_ending_watches_one_by_one_takes_as_much_for_each(store: Stores, work: Work) -> None:
    async with opened(store) as engine:
        session = await attached(engine)
        taken = []
        for count in (FEW, MANY):
            stops = await watching(session, ["x"] * count)
            work.done = 0
            with work:
                for stop in reversed(stops):  # the worst order for a search
                    stop()
            taken.append(work.done)
        few, many = taken
        assert many < 1.5 * MANY / FEW * few


@on_engines
async def test_beginning_watches_takes_as_much_for_each(store: Stores, work: Work) -> None:
    async with opened(store) as engine:
        session = await attached(engine)
        taken = []
        for count in (FEW, MANY):
            work.done = 0
            with work:
                stops = [
                    session.watch("x", data=False, owners=True, changed=lambda: None)
                    for _ in range(count)
                ]
            taken.append(work.done)
            for stop in stops:
                stop()
        few, many = taken
        assert many < 1.5 * MANY / FEW * few


@on_engines_with_long_queues
async def test_a_session_that_ends_looks_at_no_waiter_of_others(store: Stores, work: Work) -> None:
    async with opened(store) as engine:
        taken = []
        other = await attached(engine)
        await other.create_semaphore("queue", 1, b"", exist_ok=True)
        for others in (0, MANY):
            await waiting(other, others)
            session = await attached(engine)
            await waiting(session, 2)
            work.done = 0
            with work:
                await session.close()
            taken.append(work.done)
        alone, among_many = taken
        assert among_many < alone + MANY / 2


@on_engines
async def test_a_session_that_ends_looks_at_no_watch_of_others(store: Stores, work: Work) -> None:
    async with opened(store) as engine:
        taken = []
        for others in (0, MANY):
            other = await attached(engine)
            await watching(other, ["x", "y"] * (others // 2))
            session = await attached(engine)
            await watching(session, ["x", "z"])
            work.done = 0
            with work:
                await session.close()
            taken.append(work.done)
        alone, among_many = taken
        assert among_many < alone + MANY / 2
