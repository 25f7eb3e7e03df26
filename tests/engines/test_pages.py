"""Lists in pages: page by page they are the list, and each page costs what is on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine, EngineSession, Pages
from tenure.engines.redis.pages import RedisPages
from tenure.errors import EngineUnavailable, NodeNotFound, SemaphoreNotFound
from tenure.model import NodeConfig, SemaphoreDescription
from tenure.server.dflockd.listener import Deaf
from tenure.server.reads import session_by_id
from tenure.testing.faults import FaultyEngine, Way
from tests.engines.postgresql.servers import a_schema
from tests.engines.redis.servers import a_namespace
from tests.server.served import served

KINDS = ["memory", "sqlite", "memory behind a way", "postgresql", "redis", "redis, large", "native"]


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine that is not open."""
    if request.param == "redis, large":  # as if its nodes had many names
        monkeypatch.setattr(RedisPages, "few", 0)
    behind = {"postgresql": a_schema, "redis": a_namespace, "redis, large": a_namespace}
    if request.param in behind:
        with behind[request.param]() as of_it:
            yield connect_engine(of_it, SystemClock())
        return
    if request.param == "native":
        with served("memory://") as server:
            yield connect_engine(server.address, SystemClock())
        return
    url = f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else "memory://"
    engine: Engine = connect_engine(url, SystemClock())
    yield FaultyEngine(engine, Way()) if request.param == "memory behind a way" else engine


@asynccontextmanager
async def opened(engine: Engine) -> AsyncIterator[Engine]:
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


def pages_of(engine: Engine) -> Pages:
    pages = engine.pages()
    assert pages is not None
    return pages


async def attached(engine: Engine, node: str = "/default", window: float = 60.0) -> EngineSession:
    return await engine.attach(Attach(node, window, "somebody", "window", b"key"), Deaf())


async def enqueue(session: EngineSession, hold: int, name: str) -> None:
    placed = session.enqueue(hold, name, 2**64 - 1, b"", timeout=None, ephemeral=True)
    if isinstance(placed, asyncio.Future):
        await placed


async def test_sessions_come_in_pages_by_id(store: Engine) -> None:
    async with opened(store) as engine:
        await engine.create_node("/other", NodeConfig(), exist_ok=False)
        mine = [await attached(engine) for _ in range(7)]
        stranger = await attached(engine, "/other")
        pages, after, found = pages_of(engine), 0, []
        for size in (3, 3, 1, 0):
            page = await pages.sessions("/default", after=after, most=3)
            assert len(page) == size
            found += [(each.id, each.description, each.recovery_window) for each in page]
            after = page[-1].id if page else after
        assert found == [(each.id, "somebody", 60.0) for each in mine]
        assert [each.id for each in await pages.sessions("/other", after=0, most=3)] == [
            stranger.id
        ]
        assert await pages.sessions("/default", after=2**62, most=3) == []
        with pytest.raises(NodeNotFound):
            await pages.sessions("/none", after=0, most=3)


async def test_a_session_is_found_by_its_id(store: Engine) -> None:
    async with opened(store) as engine:
        first, second = await attached(engine), await attached(engine)
        for each in (first, second):
            found = await session_by_id(engine, "/default", each.id)
            assert found is not None
            assert found.id == each.id
        for number in (0, -1, second.id + 1, 2**63 - 1, 2**64 - 1):
            assert await session_by_id(engine, "/default", number) is None


async def test_semaphores_come_in_pages_by_name(store: Engine) -> None:
    async with opened(store) as engine:
        session = await attached(engine)
        names = sorted(["a", "b", "B", "é", "zz", "z", "漢", "\U0001f512"])
        for name in names[::2]:
            await session.create_semaphore(name, 2, name.encode(), exist_ok=False)
        for hold, name in enumerate(names[1::2], start=1):
            await enqueue(session, hold, name)
        whole = await engine.list_semaphores("/default", owners=False, waiters=False)
        pages, after = pages_of(engine), ""
        found: list[SemaphoreDescription] = []
        while page := await pages.semaphores(
            "/default", owners=False, waiters=False, after=after, most=3
        ):
            assert len(page) <= 3
            found += page
            after = page[-1].name
        assert found == list(whole)
        assert [each.name for each in found] == names
        with pytest.raises(NodeNotFound):
            await pages.semaphores("/none", owners=False, waiters=False, after="", most=3)


async def test_names_come_in_pages(store: Engine) -> None:
    async with opened(store) as engine:
        session = await attached(engine)
        names = sorted(["a", "B", "\u00e9", "zz", "z*[?]", "\U0001f512"])
        for name in names[::2]:
            await session.create_semaphore(name, 2, b"", exist_ok=False)
        for hold, name in enumerate(names[1::2], start=1):
            await enqueue(session, hold, name)
        pages, found = pages_of(engine), [""]
        while page := await pages.names("/default", after=found[-1], most=4):
            assert len(page) <= 4
            found += page
        assert found[1:] == names
        assert not await pages.names("/default", after="\U0010ffff", most=4)
        with pytest.raises(NodeNotFound):
            await pages.names("/none", after="", most=3)


async def test_a_long_queue_fills_its_page(store: Engine) -> None:
    async with opened(store) as engine:
        sessions = [await attached(engine) for _ in range(10)]
        for session in sessions:
            for hold, name in enumerate("ab", start=1):
                await enqueue(session, hold, name)
        pages = pages_of(engine)
        for after, name in (("", "a"), ("a", "b")):
            (found,) = await pages.semaphores(
                "/default", owners=True, waiters=True, after=after, most=5
            )
            assert found.name == name
            assert [each.session_id for each in (*found.owners, *found.waiters)] == [
                each.id for each in sessions
            ]
        assert not await pages.semaphores("/default", owners=True, waiters=True, after="b", most=5)


async def test_a_queue_comes_in_pages_by_order_id(store: Engine) -> None:
    async with opened(store) as engine:
        sessions = [await attached(engine) for _ in range(7)]
        await sessions[0].create_semaphore("gpu", 3, b"", exist_ok=False)
        for session in sessions:
            placed = session.enqueue(1, "gpu", 1, b"data", timeout=None, ephemeral=False)
            if isinstance(placed, asyncio.Future):
                await placed
        pages = pages_of(engine)
        whole = await engine.describe_semaphore("/default", "gpu", owners=True, waiters=True)
        for waiters, queue in ((False, whole.owners), (True, whole.waiters)):
            for most in (1, 2, 3, 4, 50):
                after, found = 0, []
                while page := await pages.requests(
                    "/default", "gpu", waiters=waiters, after=after, most=most
                ):
                    assert len(page) <= most
                    found += [(each.session_id, each.order_id, each.data) for each in page]
                    after = page[-1].order_id
                assert found == [(each.session_id, each.order_id, each.data) for each in queue]
        with pytest.raises(SemaphoreNotFound):
            await pages.requests("/default", "none", waiters=True, after=0, most=3)
        with pytest.raises(NodeNotFound):
            await pages.requests("/none", "gpu", waiters=True, after=0, most=3)


async def test_pages_have_nothing_of_a_session_that_is_over(store: Engine) -> None:
    async with opened(store) as engine:
        over, living = await attached(engine, window=1.0), await attached(engine)
        await enqueue(over, 1, "a")
        await enqueue(living, 1, "a")
        pages = pages_of(engine)
        async with asyncio.timeout(20):
            while len(await pages.sessions("/default", after=0, most=5)) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        (found,) = await pages.semaphores("/default", owners=True, waiters=True, after="", most=5)
        assert [each.session_id for each in found.owners] == [living.id]


@pytest.mark.parametrize("store", ["sqlite", "postgresql", "redis", "native"], indirect=True)
async def test_an_engine_that_is_closed_has_no_pages(store: Engine) -> None:
    with pytest.raises(EngineUnavailable):
        pages_of(store.inner if isinstance(store, FaultyEngine) else store)
