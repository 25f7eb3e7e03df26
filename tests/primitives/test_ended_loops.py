"""Clients that close while `asyncio.run` ends: it cancels all tasks, and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import tenure
from tenure.engines.memory.session import MemorySession

URL = "memory://ended-loops"


@pytest.fixture
def slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store needs some iterations of the loop to end a session."""
    for name in ("close", "detach"):
        end: Callable[[MemorySession], Awaitable[None]] = getattr(MemorySession, name)

        async def later(
            session: MemorySession, end: Callable[[MemorySession], Awaitable[None]] = end
        ) -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            await end(session)

        monkeypatch.setattr(MemorySession, name, later)


@pytest.mark.usefixtures("slow_end")
@pytest.mark.parametrize("iterations", range(1, 10))
def test_a_close_is_completed_when_the_program_has_ended(iterations: int) -> None:
    async def keep(go: asyncio.Event, closed: asyncio.Event) -> None:
        async with tenure.connect(URL) as client:
            go.set()
            await closed.wait()
            lease = await client.mutex("a").try_lock()
            assert lease is not None
            await lease.release()

    async def main() -> None:
        client = tenure.connect(URL)
        kept_until_the_end.append(await client.mutex("a").lock())
        closing.append(asyncio.ensure_future(client.aclose()))
        for _ in range(iterations):
            await asyncio.sleep(0)

    closing: list[asyncio.Future[None]] = []
    kept_until_the_end: list[tenure.Lease] = []
    with asyncio.Runner() as keeper:  # the store in memory lasts as long as a client
        go, closed = asyncio.Event(), asyncio.Event()
        kept = keeper.get_loop().create_task(keep(go, closed))
        keeper.run(go.wait())
        asyncio.run(main())
        closed.set()
        keeper.get_loop().run_until_complete(kept)
