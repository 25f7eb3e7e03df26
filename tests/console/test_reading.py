"""Reads in pages: each page is bounded, together they are the list, and searches end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.console import reading
from tenure.engines.contract import Engine
from tenure.engines.memory import MemoryEngine
from tenure.errors import EngineUnavailable, NodeNotFound, SemaphoreNotFound
from tests.console.serving import attached, enqueue


class WithoutPages(MemoryEngine):
    def pages(self) -> None:  # type: ignore[override]
        return None


@asynccontextmanager
async def opened(kind: type[MemoryEngine] = MemoryEngine) -> AsyncIterator[Engine]:
    engine = kind("", SystemClock())
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


async def all_pages(read: Any, **search: Any) -> list[Any]:
    found: list[Any] = []
    page = await read(**search)
    while True:
        found += page.items
        if page.following is None:
            return found
        assert len(page.items) <= search["most"]
        page = await read(**search, after=page.following)


@pytest.mark.parametrize("kind", [MemoryEngine, WithoutPages])
async def test_pages_together_are_the_list(kind: type[MemoryEngine]) -> None:
    async with opened(kind) as engine:
        workers = [await attached(engine, text=f"job {number}") for number in range(25)]
        for number, worker in enumerate(workers):
            await enqueue(worker, 1, f"lock-{number:02}")
            await enqueue(worker, 2, "shared")
        for most in (1, 7, 25, 26, 500):

            async def semaphores(**search: Any) -> Any:
                return await reading.semaphores(engine, "/default", **search)

            async def sessions(**search: Any) -> Any:
                return await reading.sessions(engine, "/default", **search)

            async def waiters(**search: Any) -> Any:
                return await reading.requests(engine, "/default", "shared", waiters=True, **search)

            names = [each.name for each in await all_pages(semaphores, most=most)]
            assert names == [f"lock-{number:02}" for number in range(25)] + ["shared"]
            names = [each.name for each in await all_pages(semaphores, most=most, search="K-1")]
            assert names == [f"lock-{number}" for number in range(10, 20)]
            ids = [each.id for each in await all_pages(sessions, most=most)]
            assert ids == [each.id for each in workers]
            found = await all_pages(sessions, most=most, search="JOB 2")
            assert [each.description for each in found] == [
                "job 2",
                *(f"job {n}" for n in range(20, 25)),
            ]
            found = await all_pages(waiters, most=most)
            assert [each.session_id for each in found] == ids[1:]
        owners = await reading.requests(engine, "/default", "shared", waiters=False)
        assert [each.session_id for each in owners.items] == ids[:1]


async def test_a_search_ends_and_says_where_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SEARCHED", 20)
    monkeypatch.setattr(reading, "SLICE", 10)
    async with opened() as engine:
        worker = await attached(engine)
        for number in range(50):
            await enqueue(worker, number + 1, f"lock-{number:02}")
        page = await reading.semaphores(engine, "/default", search="lock-49")
        assert (page.items, page.following, page.examined) == ([], "lock-19", 20)
        page = await reading.semaphores(engine, "/default", search="lock-49", after="lock-39")
        assert [each.name for each in page.items] == ["lock-49"]
        assert page.following is None


async def test_a_request_and_a_session_are_found() -> None:
    async with opened() as engine:
        workers = [await attached(engine) for _ in range(3)]
        for worker in workers:
            await enqueue(worker, 1, "nightly")
        described = await engine.describe_semaphore(
            "/default", "nightly", owners=True, waiters=True
        )
        (owner,), waiters = described.owners, described.waiters
        for order_id, session, waits in (
            (owner.order_id, owner.session_id, False),
            (waiters[1].order_id, waiters[1].session_id, True),
        ):
            found = await reading.find_request(engine, "/default", "nightly", order_id)
            assert found is not None
            assert (found[0].session_id, found[1]) == (session, waits)
        assert await reading.find_request(engine, "/default", "nightly", 7) is None
        assert await reading.find_request(engine, "/default", "nightly", 0) is None
        session_found = await reading.find_session(engine, "/default", workers[1].id)
        assert session_found is not None
        assert session_found.id == workers[1].id
        assert await reading.find_session(engine, "/default", 77) is None
        with pytest.raises(SemaphoreNotFound):
            await reading.requests(engine, "/default", "none", waiters=True)
        with pytest.raises(NodeNotFound):
            await reading.semaphores(engine, "/none")


async def test_a_silent_store_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ANSWER_TIMEOUT", 0.01)
    async with opened() as engine:
        with pytest.raises(EngineUnavailable, match="has not answered within"):
            await reading.answered(engine, "it", asyncio.Event().wait())
