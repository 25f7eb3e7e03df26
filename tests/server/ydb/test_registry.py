"""What is kept of sessions that come and go."""

from __future__ import annotations

import asyncio

from tenure.server.admission import source_at
from tenure.server.auth.identity import ANONYMOUS
from tenure.server.reads import Reader
from tenure.server.ydb.registry import YdbSessionRegistry
from tests.server.ydb.raw import serving


async def test_a_session_that_comes_and_goes_is_kept_once() -> None:
    async with serving() as server:
        registry, stream = YdbSessionRegistry(server.context), object()
        client = ANONYMOUS, source_at("192.0.2.7")
        server.context.counts.sessions.take_anyway()
        for _ in range(1000):
            registry.join("/default", 1, 3_600_000, 0, stream, client)
            assert registry.leave("/default", 1, stream)
        assert len(registry) < 100
        assert registry.find("/default", 1) is not None
        registry.forget()
        assert not registry.returning


async def test_the_timeout_of_a_session_is_read_in_a_turn_of_its_client() -> None:
    async with serving() as server:
        registry, reads = YdbSessionRegistry(server.context), server.context.reads
        reader = Reader(reads, "client")
        async with reader.turn():
            asking = asyncio.create_task(registry.timeout_of("/default", 1, reader))
            for _ in range(3):
                await asyncio.sleep(0)
            assert reads.waiting == 1
        assert await asking is None
