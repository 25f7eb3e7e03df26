"""Descriptions with owners and waiters wait for their turn over YDB's API too."""

from __future__ import annotations

from tenure.server.admission import source_at
from tenure.server.reads import Reader
from tests.server.ydb.raw import channel, serving, session


async def test_a_description_with_owners_waits_for_its_turn_and_nothing_else_does() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        await client.create("s", 1)
        asked = [
            await client.describe("s", include_owners=True),
            await other.describe("s", include_waiters=True),
        ]
        for each, number in zip((client, other), asked, strict=True):
            assert (await each.expect("describe_semaphore_result")).req_id == number
        async with Reader(server.context.reads, source_at("127.0.0.1")):
            asked = [
                await client.describe("s", include_owners=True),
                await other.describe("s", include_waiters=True),
            ]
            third = await session(over)
            assert (await third.described("s")).limit == 1
            assert await third.acquired(await third.acquire("m", 1, ephemeral=True))
            assert server.context.reads.waiting == 1  # one of the connection's
        for each, number in zip((client, other), asked, strict=True):
            assert (await each.expect("describe_semaphore_result")).req_id == number
        assert server.context.reads.waiting == 0


async def test_a_description_ends_with_its_stream() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        await client.create("s", 1)
        async with Reader(server.context.reads, source_at("127.0.0.1")):
            await client.describe("s", include_owners=True)
            assert await other.acquired(await other.acquire("m", 1, ephemeral=True))
            assert server.context.reads.waiting == 1
            await client.call.cancel()
            again = await session(over, session_id=client.session_id)
            assert again.session_id == client.session_id
        assert server.context.reads.waiting == 0
