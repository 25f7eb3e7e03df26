"""Descriptions that are longer than what the server holds of other replies."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.model import RequestDescription, SemaphoreDescription
from tenure.server.limits import Limits
from tenure.server.ydb import requests
from tenure.server.ydb.long_replies import LONGEST, LongReplies, size_of
from tenure.server.ydb.messages import Request, Response, Status
from tests.server.ydb.raw import FOREVER, NODE, SERVICE, Client, Over, channel, serving, session

MIB = 2**20
REQUESTS = st.lists(
    st.builds(
        RequestDescription,
        session_id=st.integers(1, 2**63),
        order_id=st.integers(1, 2**53),
        count=st.integers(1, 2**64 - 1),
        data=st.binary(max_size=300),
        timeout=st.none() | st.floats(0, 86400),
    ),
    max_size=8,
).map(tuple)


@given(REQUESTS, REQUESTS, st.text(max_size=20), st.binary(max_size=300), st.booleans())
def test_a_description_in_pieces_is_the_same_message(
    owners: tuple[RequestDescription, ...],
    waiters: tuple[RequestDescription, ...],
    name: str,
    data: bytes,
    shown: bool,
) -> None:
    found = SemaphoreDescription(
        name=name, data=data, limit=7, held=3, ephemeral=shown, owners=owners, waiters=waiters
    )
    whole = requests.described(5, found, {}, owners=shown, watched=shown)
    long = requests.described_at_length(5, found, {}, owners=shown, watched=shown)
    framed = b"".join(long.pieces())
    assert framed[:5] == b"\x00" + (len(framed) - 5).to_bytes(4, "big")
    assert Response.FromString(framed[5:]) == whole
    assert len(framed) <= size_of(found, owners=shown)


async def crowd(over: Over, number: int) -> list[Client]:
    """Sessions that wait for one semaphore, each with data of 1 MiB; the first one owns it."""
    clients = [await session(over) for _ in range(number)]
    await clients[0].create("s")
    for each, client in enumerate(clients):
        asked = await client.acquire("s", data=bytes([each]) * MIB)
        await (client.pending(asked) if each else client.acquired(asked))
    return clients


async def test_a_description_of_twenty_mebibytes_is_answered(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        clients = await crowd(over, 20)
        reader = await session(over)
        found = await reader.described("s", include_owners=True, include_waiters=True)
        entries = [*found.owners, *found.waiters]
        assert [each.session_id for each in entries] == [each.session_id for each in clients]
        for number, each in enumerate(entries):
            assert each.data == bytes([number]) * MIB
        assert all(each.timeout_millis == FOREVER for each in found.waiters)
        assert await reader.acquired(await reader.acquire("m", ephemeral=True))


async def test_a_long_description_can_be_watched() -> None:
    async with serving() as server, channel(server.target) as over:
        (owner, *_) = await crowd(over, 10)
        reader = await session(over)
        asked = await reader.describe(
            "s", include_owners=True, include_waiters=True, watch_owners=True
        )
        assert (await reader.expect("describe_semaphore_result")).watch_added
        await owner.released(await owner.release("s"))
        assert await reader.changed(asked) == (False, True)


async def test_a_grpc_client_that_takes_long_messages_gets_one() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving())
        over = await stack.enter_async_context(channel(server.target))
        await crowd(over, 20)
        options = [("grpc.max_receive_message_length", LONGEST)]
        other = await stack.enter_async_context(
            grpc.aio.insecure_channel(server.target, options=options)
        )
        call = other.stream_stream(
            SERVICE + "Session",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=Response.FromString,
        )()
        start = Request.SessionStart(path=NODE, timeout_millis=30_000)
        await call.write(Request(session_start=start))
        ask = Request.DescribeSemaphore(req_id=1, name="s", include_waiters=True)
        await call.write(Request(describe_semaphore=ask))
        async with asyncio.timeout(30):
            while not (message := await call.read()).HasField("describe_semaphore_result"):
                pass
        found = message.describe_semaphore_result.semaphore_description
        assert sum(len(each.data) for each in found.waiters) == 19 * MIB
        call.cancel()


@pytest.mark.parametrize("why", ["too long", "too many"])
async def test_what_cannot_be_sent_is_refused_and_nothing_is_lost(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "too long":
        monkeypatch.setattr("tenure.server.ydb.long_replies.LONGEST", 300_000)
    else:
        monkeypatch.setattr("tenure.server.ydb.long_replies._AT_A_TIME", 0)
    limits = Limits(data_bytes=64 * 1024, message_bytes=128 * 1024, output_bytes=256 * 1024)
    async with serving(limits=limits) as server, channel(server.target) as over:
        clients = [await session(over) for _ in range(6)]
        await clients[0].create("s")
        for each in clients:
            await each.acquire("s", data=b"d" * 60_000)
            await each.receive()
        reader = await session(over)
        asked = await reader.describe("s", include_owners=True, include_waiters=True)
        assert await reader.refused(asked, "describe_semaphore_result") == Status.OVERLOADED
        asked = await reader.describe("s", include_waiters=True, watch_data=True)
        assert await reader.refused(asked, "describe_semaphore_result") == Status.OVERLOADED
        assert (await reader.described("s")).limit == 1
        await clients[0].released(await clients[0].release("s"))
        asked = await reader.release("s")  # and not told of a change: there is no watch
        assert not await reader.released(asked)


def test_long_replies_count_for_as_long_as_they_exist() -> None:
    replies = LongReplies()
    found = SemaphoreDescription(name="s", data=b"", limit=1, held=0, ephemeral=False)
    held = []
    while not replies.why_not(100):
        held.append(requests.described_at_length(1, found, {}, owners=True, watched=False))
        replies.add(held[-1])
    assert len(held) == 4
    held.pop()
    assert not replies.why_not(100)
    assert "the maximum" in replies.why_not(LONGEST + 1)


async def test_a_client_that_reads_slowly_sees_its_ping_late_and_is_not_timed_out() -> None:
    async with serving() as server, channel(server.target) as over, channel(server.target) as slow:
        await crowd(over, 12)
        reader = await session(slow, timeout=6)  # a ping may be unanswered for 2 s
        await reader.describe("s", include_waiters=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):  # and nothing is read
                await asyncio.Event().wait()
        result = await reader.expect("describe_semaphore_result")
        assert len(result.semaphore_description.waiters) == 11
        await reader.receive_ping()
        assert await reader.acquired(await reader.acquire("m", ephemeral=True))
