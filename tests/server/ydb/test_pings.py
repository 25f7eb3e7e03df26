"""Pings of a session's stream, in both directions."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.raw import PATIENCE, channel, detached, serving, session, stream


async def test_a_ping_is_answered_with_a_pong() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        for opaque in (0, 1, 2**64 - 1):
            await client.send(ping=Request.PingPong(opaque=opaque))
            assert (await client.expect("pong")).opaque == opaque


async def test_the_server_goes_on_pinging_with_new_numbers() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=1)  # and so pings come every third of a second
        seen = set()
        for _ in range(3):
            opaque = (await client.hear()).ping.opaque
            seen.add(opaque)
            await client.send(pong=Request.PingPong(opaque=opaque))
        assert len(seen) == 3
        assert 0 not in seen


async def test_a_client_that_does_not_answer_a_ping_times_out_and_is_detached() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=3)
        await client.fails(Status.TIMEOUT)
        assert len(client.pings) == 1
        await detached(server, client.session_id)


@pytest.mark.parametrize(("timeout", "least"), [(30.0, 5.0), (6.0, 2.0)])
async def test_a_ping_may_be_unanswered_for_a_third_of_the_timeout_and_five_seconds_at_most(
    timeout: float, least: float
) -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        before = asyncio.get_running_loop().time()
        await client.start(timeout=timeout)
        await client.fails(Status.TIMEOUT)
        assert least <= asyncio.get_running_loop().time() - before < 4 * least
        assert len(client.pings) == 1


async def test_a_ping_that_was_answered_late_is_answered() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=30)
        late = (await client.hear()).ping.opaque
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.5):  # longer than the pause between two pings
                assert await client.call.recv_message() is None, "another ping, or a Failure"
        await client.send(pong=Request.PingPong(opaque=late))
        assert (await client.hear()).HasField("ping")


async def test_a_ping_that_carries_the_servers_number_counts_as_the_pong() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=1)
        async with asyncio.timeout(PATIENCE):
            for _ in range(4):
                message = await client.hear()
                while not message.HasField("ping"):
                    assert message.HasField("pong"), message
                    message = await client.hear()
                await client.send(ping=Request.PingPong(opaque=message.ping.opaque))


async def test_a_pong_that_does_not_answer_the_ping_is_a_bad_request() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.send(pong=Request.PingPong(opaque=7))
        await client.fails(Status.BAD_REQUEST)


async def test_a_pong_without_a_ping_is_ignored() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start(timeout=30)
        answered = (await client.hear()).ping.opaque
        for opaque in (answered, answered, 0, 7):
            await client.send(pong=Request.PingPong(opaque=opaque))
        assert await client.acquired(await client.acquire("m", ephemeral=True))
