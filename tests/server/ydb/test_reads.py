"""Descriptions with owners and waiters wait for their turn over YDB's API too."""

from __future__ import annotations

import asyncio

from tenure.server.admission import source_at
from tenure.server.reads import Reader
from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.raw import NODE, PATIENCE, Client, call, channel, serving, session, stream


async def test_a_first_description_with_owners_waits_for_its_turn_and_nothing_else_does() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        await client.create("s", 1)
        async with Reader(server.context.reads, source_at("127.0.0.1")).turn():
            asked = [
                await client.describe("s", include_owners=True),
                await other.describe("s", include_waiters=True),
            ]
            third = await session(over)
            assert (await third.described("s")).limit == 1
            assert await third.acquired(await third.acquire("m", 1, ephemeral=True))
            assert server.context.reads.waiting == 2
        for each, number in zip((client, other), asked, strict=True):
            assert (await each.expect("describe_semaphore_result")).req_id == number
        assert server.context.reads.waiting == 0


async def test_a_description_of_a_node_waits_for_its_turn() -> None:
    async with serving() as server, channel(server.target) as over:
        async with Reader(server.context.reads, source_at("127.0.0.1")).turn():
            describing = asyncio.create_task(call(over, "DescribeNode", path=NODE))
            async with asyncio.timeout(PATIENCE):
                while not server.context.reads.waiting:  # noqa: ASYNC110  (nothing tells)
                    await asyncio.sleep(0.01)
            made = await call(over, "CreateNode", path="/local/n")
            assert made.status == Status.SUCCESS
        assert (await describing).status == Status.SUCCESS
        assert server.context.reads.waiting == 0


async def test_a_connection_that_guesses_keys_waits_for_its_turn() -> None:
    async with serving() as server, channel(server.target) as over, channel(server.target) as own:
        owner = await session(own, protection_key=b"key")

        async def guess() -> Client:
            client = await stream(over)
            start = Request.SessionStart(path=NODE, session_id=owner.session_id)
            await client.send(session_start=start)
            return client

        await (await guess()).fails(Status.BAD_SESSION)
        async with Reader(server.context.reads, source_at("127.0.0.1")).turn():
            second = await guess()
            async with asyncio.timeout(PATIENCE):
                while not server.context.reads.waiting:  # noqa: ASYNC110  (nothing tells)
                    await asyncio.sleep(0.01)
            await session(own, session_id=owner.session_id, protection_key=b"key")
        await second.fails(Status.BAD_SESSION)


async def test_a_description_ends_with_its_stream() -> None:
    async with serving() as server, channel(server.target) as over:
        client, other = await session(over), await session(over)
        await client.create("s", 1)
        async with Reader(server.context.reads, source_at("127.0.0.1")).turn():
            await client.describe("s", include_owners=True)
            assert await other.acquired(await other.acquire("m", 1, ephemeral=True))
            assert server.context.reads.waiting == 1
            await client.call.cancel()
            again = await session(over, session_id=client.session_id)
            assert again.session_id == client.session_id
        assert server.context.reads.waiting == 0
