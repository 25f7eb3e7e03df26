"""A session's stream: how it starts, goes on, and ends."""

from __future__ import annotations

from tests.server.ydb.raw import channel, serving, session


async def test_a_session_starts_and_its_mutex_is_taken_and_given_back() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        assert client.session_id > 0
        assert client.timeout_millis == 30_000
        assert await client.acquired(await client.acquire("m", 2**64 - 1, ephemeral=True))
        assert await client.released(await client.release("m"))
