"""Connections without an authenticated call: what is read of them, and when they are closed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from grpclib.client import UnaryUnaryMethod
from grpclib.const import Status as GrpcStatus
from grpclib.exceptions import GRPCError
from h2.events import DataReceived

from tenure.server.auth import Authenticator
from tenure.server.limits import Limits
from tenure.server.ydb.messages import Request, Status, discovery
from tenure.server.ydb.transport import GrpcConnection
from tests.hostile.target import h2_frame
from tests.server.ydb.raw import (
    PATIENCE,
    Server,
    call,
    channel,
    eventually,
    serving,
    session,
    stream,
)
from tests.server.ydb.test_transport import Http2, connected, cut_off, serves_others

TOKEN = "a token that nobody guesses"
WRONG = {"x-ydb-auth-ticket": "a guess"}
DISCOVERY = "/Ydb.Discovery.V1.DiscoveryService/"


async def refused(server: Server, reader: asyncio.StreamReader, client: Http2) -> int:
    """Read until the connection is closed; return the response to the first call."""
    got = await cut_off(reader)
    events = client.h2.receive_data(got)
    data = b"".join(each.data for each in events if isinstance(each, DataReceived))
    assert any(type(each).__name__ == "ConnectionTerminated" for each in events)
    size = 5 + int.from_bytes(data[1:5], "big")
    answer = discovery.WhoAmIResponse.FromString(data[5:size])
    return int(answer.operation.status)


async def test_data_behind_a_rejected_token_ends_the_connection() -> None:
    async with serving(authenticator=Authenticator({TOKEN: "someone"})) as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            number = client.call(DISCOVERY + "WhoAmI", **WRONG)
            await client.flush()
            writer.write(h2_frame(0, 0, number, b"x") * 10_000)
            assert await refused(server, reader, client) == Status.UNAUTHORIZED
        assert server.lines.events().count("access denied") == 1
        assert "not HTTP/2 as it should be" in server.lines.events()


async def test_calls_with_a_rejected_token_are_served_one_by_one_and_only_a_few() -> None:
    async with serving(authenticator=Authenticator({TOKEN: "someone"})) as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            for _ in range(50):
                client.call(DISCOVERY + "WhoAmI", **WRONG)
            await client.flush()
            assert await refused(server, reader, client) == Status.UNAUTHORIZED
        assert server.lines.events().count("access denied") == 8


async def test_a_few_unknown_methods_may_be_called_first_and_not_many() -> None:
    async with serving() as server:
        async with channel(server.target) as over:
            for _ in range(3):
                method = UnaryUnaryMethod(over.channel, "/unknown", Request, Request)
                with pytest.raises(GRPCError):
                    await method(Request(), timeout=PATIENCE)
            await call(over, "WhoAmI")
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            for _ in range(50):
                client.call("/unknown")
            await client.flush()
            await cut_off(reader)
        assert server.lines.events().count("call refused") == 3 + 8


async def test_a_first_call_is_answered_however_many_are_sent_with_it() -> None:
    headers = {"x-ydb-auth-ticket": TOKEN}
    many = 700
    async with (
        serving(authenticator=Authenticator({TOKEN: "someone"})) as server,
        connected(server) as (reader, writer),
    ):
        client = Http2(writer)
        for each in range(many):
            number = client.call(DISCOVERY + "WhoAmI", **headers, filler=f"{each:0500}")
            client.h2.send_data(number, bytes(5), end_stream=True)
        sent = client.h2.data_to_send()
        assert len(sent) > 2 * 64 * 1024
        writer.write(sent)
        ended = 0
        async with asyncio.timeout(PATIENCE):
            while ended < many:
                events = client.h2.receive_data(await reader.read(65536))
                ended += sum(type(each).__name__ == "StreamEnded" for each in events)


async def test_nothing_but_calls_is_read_for_64_kib() -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            await client.flush()
            writer.write(h2_frame(77, 0, 0, bytes(16384)) * 8)
            await cut_off(reader)
        (bad,) = [
            facts for _, event, facts in server.lines.seen if event == "not HTTP/2 as it should be"
        ]
        assert "65536 bytes without an authenticated call" in bad["reason"]
        await serves_others(server)


async def test_data_of_a_stream_without_a_call_is_not_read_for_ever() -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            number = client.call(DISCOVERY + "WhoAmI")
            client.h2.send_data(number, bytes(5), end_stream=False)
            await client.flush()
            ended = False
            async with asyncio.timeout(PATIENCE):
                while not ended:
                    events = client.h2.receive_data(await reader.read(65536))
                    ended = any(type(each).__name__ == "StreamEnded" for each in events)
            writer.write(h2_frame(0, 0, number, b"x") * 20_000)
            await cut_off(reader)
        assert "not HTTP/2 as it should be" in server.lines.events()
        await serves_others(server)


async def test_a_closed_connection_leaves_no_cycle_to_the_collector() -> None:
    authenticator, limits = Authenticator({TOKEN: "someone"}), Limits(greeting_time=0.3)
    async with serving(authenticator=authenticator, limits=limits) as server:
        gc.collect()
        gc.disable()
        try:
            async with connected(server) as (reader, writer):
                client = Http2(writer)
                client.call(DISCOVERY + "WhoAmI", **WRONG)
                await client.flush()
                seen: list[weakref.ref[GrpcConnection]] = []

                async def begun() -> bool:
                    seen.extend(weakref.ref(each) for each in server.listener.connections)
                    return bool(seen)

                await eventually(begun)
                await cut_off(reader)

            async def collected() -> bool:
                return seen[0]() is None

            await eventually(collected)
        finally:
            gc.enable()


# Unfinished messages

SMALL: dict[str, Any] = {"data_bytes": 4096, "message_bytes": 72 * 1024}


def begun(size: int) -> bytes:
    """A message that lacks its last byte."""
    return b"\x00" + size.to_bytes(4, "big") + bytes(size - 1)


async def test_a_message_that_does_not_come_whole_in_time_ends_its_call() -> None:
    limits = Limits(message_time=0.1)
    async with serving(limits=limits) as server, channel(server.target) as over:
        client = await stream(over, answers_pings=False)
        await client.start()
        await client.call._stream.send_data(begun(1000))
        assert await client.status() is GrpcStatus.DEADLINE_EXCEEDED
        other = await session(over)
        assert await other.acquired(await other.acquire("m", 1, ephemeral=True))


async def test_unfinished_messages_of_one_source_have_a_budget_over_all_connections() -> None:
    limits = Limits(**SMALL, identity_input_bytes=2 * 72 * 1024)
    async with serving(limits=limits) as server:
        holders = []
        for _ in range(3):
            over = channel(server.target)
            client = await session(await over.__aenter__())
            await client.call._stream.send_data(begun(70_000))
            holders.append((over, client))

        async def closed() -> bool:
            return "connection closed" in server.lines.events()

        await eventually(closed)
        (facts,) = [f for _, event, f in server.lines.seen if event == "connection closed"]
        assert facts["limit"] == "identity_input_bytes"
        assert server.context.input.total <= 2 * 72 * 1024
        for over, _ in holders:
            await over.__aexit__(None, None, None)

        async def empty() -> bool:
            return server.context.input.total == 0

        await eventually(empty)
        await serves_others(server)


async def test_messages_that_come_whole_are_not_counted_afterwards() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        request = Request(
            create_semaphore=Request.CreateSemaphore(
                req_id=1, name="s", limit=1, data=bytes(50_000)
            )
        )
        await client.call.send_message(request)
        await client.expect("create_semaphore_result")
        assert server.context.input.total == 0
