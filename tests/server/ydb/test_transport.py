"""HTTP/2 and gRPC below the calls: bad input, clients that do not read or say nothing, limits.

What one client does wrong is told to it, or ends its connection, is a line in the log, and harms no
other one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import h2.config
import h2.connection
import pytest
from grpclib.client import UnaryUnaryMethod
from grpclib.const import Status as GrpcStatus
from grpclib.exceptions import GRPCError
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.server import listener
from tenure.server.admission import Source, source_at
from tenure.server.auth import ANONYMOUS, Authenticator
from tenure.server.budget import QUANTUM
from tenure.server.limits import Limits
from tenure.server.ydb.calls import GrpcCall, GrpcError, decoded, frame
from tenure.server.ydb.messages import Request, Status
from tenure.server.ydb.registry import ReturningClients
from tenure.server.ydb.transport import GrpcConnection
from tests.server.ydb.raw import (
    NODE,
    PATIENCE,
    SERVICE,
    Server,
    call,
    channel,
    eventually,
    serving,
    session,
    stream,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(
    server: Server,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare TCP connection."""
    host, _, port = server.target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def cut_off(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other end closes the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(PATIENCE):
            while data := await reader.read(65536):
                got += data
    return got


async def serves_others(server: Server) -> None:
    async with channel(server.target) as over:
        client = await session(over)
        assert await client.acquired(await client.acquire("m", 1, ephemeral=True))
        await client.send(session_stop=Request.SessionStop())
        await client.expect("session_stopped")


class Http2:
    """A client of HTTP/2 that does what a test wants, above all what it should not."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True, validate_outbound_headers=False, header_encoding="ascii"
            )
        )
        self.h2.initiate_connection()

    def call(self, path: str = SERVICE + "Session", **changes: str) -> int:
        """Begin a call; returns its stream's number."""
        number = self.h2.get_next_available_stream_id()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "here",
            "te": "trailers",
            "content-type": "application/grpc",
            **changes,
        }
        self.h2.send_headers(number, list(headers.items()))
        return number

    async def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())
        await self._writer.drain()


class Defective:
    """Receives a call's messages, and fails at the first."""

    choked = False

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self.ended: asyncio.Future[GrpcError] = asyncio.get_running_loop().create_future()

    def received(self, message: bytes) -> None:
        raise RuntimeError("a defect")

    def half_closed(self) -> None:
        raise AssertionError("it has failed")

    def broken(self, error: GrpcError) -> None:
        self.ended.set_result(error)


async def test_a_message_that_fails_unexpectedly_ends_its_call_alone() -> None:
    async def defective(call: GrpcCall, _: GrpcConnection) -> None:
        receiver = Defective(call)
        call.listen(receiver)
        raise await receiver.ended

    async with serving() as server:
        server.listener._methods["/defective"] = defective
        async with channel(server.target) as over:
            healthy = await session(over)
            method = UnaryUnaryMethod(over.channel, "/defective", Request, Request)
            with pytest.raises(GRPCError) as caught:
                await method(Request(), timeout=PATIENCE)
            assert caught.value.status is GrpcStatus.INTERNAL
            assert await healthy.acquired(await healthy.acquire("m", 1, ephemeral=True))
        assert "a call failed: operation=/defective" in server.lines.events()


async def test_a_thousand_messages_in_a_frame_are_all_answered() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        ping = Request(ping=Request.PingPong(opaque=7)).SerializeToString()
        frame = b"\x00" + len(ping).to_bytes(4, "big") + ping
        await client.call._stream.send_data(frame * 1000)
        for _ in range(1000):
            assert (await client.expect("pong")).opaque == 7


class NoMemory:
    """A message for which there is no memory."""

    DESCRIPTOR = Request.DESCRIPTOR

    @staticmethod
    def FromString(_: bytes) -> None:  # noqa: N802  (the name in protobuf)
        raise MemoryError


async def test_a_call_ends_whose_message_there_is_no_memory_for() -> None:
    async def serve(call: GrpcCall, _: GrpcConnection) -> None:
        decoded(NoMemory, await call.message() or b"")

    async with serving() as server, channel(server.target) as over:
        server.listener._methods["/large"] = serve
        method = UnaryUnaryMethod(over.channel, "/large", Request, Request)
        with pytest.raises(GRPCError) as caught:
            await method(Request(), timeout=PATIENCE)
        assert caught.value.status is GrpcStatus.RESOURCE_EXHAUSTED
        client = await session(over)
        assert await client.acquired(await client.acquire("m", 1, ephemeral=True))
        assert "a call failed: operation=/large" not in server.lines.events()


class Slow:
    """A connection whose messages each take a quarter of its quantum.

    Attributes:
        counts: the messages of each iteration of the loop.
    """

    def __init__(self, call: GrpcCall) -> None:
        self.counts = [0]
        self._seconds = 100.0
        call.connection.share.now = call.connection.context.budget.now = lambda: self._seconds
        self._count()

    def _count(self) -> None:
        self.counts.append(0)
        if sum(self.counts) < CALLS * MESSAGES:
            asyncio.get_running_loop().call_soon(self._count)

    def handled(self) -> None:
        """Note a message."""
        self._seconds += QUANTUM / 4
        self.counts[-1] += 1


class SlowReceiver:
    """Receives the messages of one call.

    Attributes:
        choked: it wants none for now.
        ended: done when the client has half-closed the call.
    """

    def __init__(self, slow: Slow, *, choked: bool) -> None:
        self.choked = choked
        self._slow = slow
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, message: bytes) -> None:
        self._slow.handled()

    def half_closed(self) -> None:
        self.ended.set_result(None)

    def broken(self, error: GrpcError) -> None:
        self.ended.set_exception(error)


CALLS, MESSAGES = 20, 50


@pytest.mark.parametrize("waits_for", ["a receiver", "room"])
async def test_small_messages_that_wait_are_handled_in_turns_of_their_connection(
    waits_for: str,
) -> None:
    all_have_come = asyncio.Event()
    slow: list[Slow] = []

    async def serve(call: GrpcCall, connection: GrpcConnection) -> None:
        connection.greeted(call.identity)
        if not slow:
            slow.append(Slow(call))
        receiver = SlowReceiver(slow[0], choked=waits_for == "room")
        if waits_for == "room":
            call.listen(receiver)
        await all_have_come.wait()
        if waits_for == "room":
            receiver.choked = False
            call.resume()
        else:
            call.listen(receiver)
        await receiver.ended

    async with serving() as server, connected(server) as (_, raw):
        server.listener._methods["/slow"] = serve
        client = Http2(raw)
        for number in [client.call("/slow") for _ in range(CALLS)]:
            client.h2.send_data(number, bytes(5) * MESSAGES, end_stream=True)
        await client.flush()

        async def half_closed() -> bool:
            calls = [call for each in server.listener.connections for call in each._calls]
            return len(calls) == CALLS and all(call.left for call in calls)

        await eventually(half_closed)
        all_have_come.set()
        await eventually_empty(server, connections=False)
        assert sum(slow[0].counts) == CALLS * MESSAGES
        assert max(slow[0].counts) <= 5, "a quantum, and the message with which it is used up"


# --- bad input


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x00" * 100,
        PREFACE + b"\xff" * 200,
        PREFACE + b"\x00\x00\x04\x00\x00\x00\x00\x00\x01abcd",  # data on a stream that is none
        PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",  # a frame too large
    ],
)
async def test_what_is_not_http2_ends_the_connection_with_a_line_in_the_log(
    nonsense: bytes,
) -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            writer.write(nonsense)
            await cut_off(reader)
        assert "not HTTP/2 as it should be" in server.lines.events()
        await serves_others(server)


@settings(max_examples=5)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.binary(max_size=200), max_size=5))))
async def test_random_bytes_harm_nobody(clients: list[tuple[bool, list[bytes]]]) -> None:
    async with serving() as server:
        for with_preface, chunks in clients:
            async with connected(server) as (reader, writer):
                writer.write(PREFACE * with_preface)
                for chunk in chunks:
                    writer.write(chunk)
                writer.write_eof()
                await cut_off(reader)
        assert not any("failed" in event for event in server.lines.events())
        await serves_others(server)


@settings(max_examples=5)
@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=100))))
async def test_random_messages_on_streams_harm_nobody(clients: list[tuple[bool, bytes]]) -> None:
    statuses: set[GrpcStatus] = set()
    async with serving() as server:
        async with channel(server.target) as over:
            for started, message in clients:
                client = await session(over) if started else await stream(over)
                frame = b"\x00" + len(message).to_bytes(4, "big") + message
                await client.call._stream.send_data(frame)
                await client.call.end()
                try:
                    while (said := await client.receive()) is not None:
                        assert said.WhichOneof("response") in {"failure", "pong"}
                except GRPCError as error:  # not even a stream was begun
                    statuses.add(error.status)
        assert statuses <= {GrpcStatus.INVALID_ARGUMENT}
        assert not any("failed" in event for event in server.lines.events())
        await serves_others(server)


async def test_a_message_that_is_no_session_request_ends_the_stream() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.call._stream.send_data(b"\x00\x00\x00\x00\x02\xff\xff")
        assert await client.status() is GrpcStatus.INVALID_ARGUMENT
        assert "call refused" in server.lines.events()


async def test_a_message_that_is_too_large_is_refused_before_it_is_read() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.call._stream.send_data(b"\x00\xff\xff\xff\xff")
        assert await client.status() is GrpcStatus.RESOURCE_EXHAUSTED
        (refused,) = [facts for _, event, facts in server.lines.seen if event == "call refused"]
        assert "message_bytes" in refused["reason"]


async def test_a_compressed_message_is_not_understood() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.call._stream.send_data(b"\x01\x00\x00\x00\x01x")
        assert await client.status() is GrpcStatus.UNIMPLEMENTED


async def test_a_stream_that_ends_within_a_message_is_an_error() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        await client.call._stream.send_data(b"\x00\x00\x00\x00\x09abc")
        await client.call.end()
        assert await client.receive() is None
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(GRPCError) as caught:
                await client.call.recv_trailing_metadata()
        assert caught.value.status is GrpcStatus.INTERNAL


async def test_a_message_may_come_in_pieces_of_any_size() -> None:
    async with serving() as server, channel(server.target) as over:
        client = await session(over)
        message = Request(ping=Request.PingPong(opaque=77)).SerializeToString()
        for byte in b"\x00" + len(message).to_bytes(4, "big") + message:
            await client.call._stream.send_data(bytes([byte]))
        assert (await client.expect("pong")).opaque == 77


@pytest.mark.parametrize(
    "changes", [{"content-type": "text/html"}, {":method": "GET"}, {"path": "/x"}]
)
async def test_a_call_that_is_no_grpc_is_refused(changes: dict[str, str]) -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            client.call(**changes)
            await client.flush()
            ended = False
            async with asyncio.timeout(PATIENCE):
                while not ended:
                    for event in client.h2.receive_data(await reader.read(65536)):
                        ended = ended or type(event).__name__ == "StreamEnded"
        assert "call refused" in server.lines.events()


async def test_headers_that_are_no_text_end_the_connection() -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            client = Http2(writer)
            client.h2.config.header_encoding = None
            number = client.h2.get_next_available_stream_id()
            client.h2.send_headers(number, [(b":method", b"POST"), (b"x", b"\xff\xfe")])
            await client.flush()
            await cut_off(reader)
        assert "not HTTP/2 as it should be" in server.lines.events()
        await serves_others(server)


async def test_a_call_without_a_request_is_ended_in_time() -> None:
    async with (
        serving(limits=Limits(greeting_time=0.1)) as server,
        channel(server.target) as over,
    ):
        client = await stream(over)
        with pytest.raises(GRPCError) as caught:
            await client.hear()
        assert caught.value.status is GrpcStatus.DEADLINE_EXCEEDED


async def test_frames_of_a_kind_that_nobody_knows_are_ignored() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        client = Http2(writer)
        client.call()
        await client.flush()
        writer.write(b"\x00\x00\x03\xee\x00\x00\x00\x00\x00abc")
        client.h2.ping(b"12345678")
        await client.flush()
        answered = False
        async with asyncio.timeout(PATIENCE):
            while not answered:
                for event in client.h2.receive_data(await reader.read(65536)):
                    answered = answered or type(event).__name__ == "PingAckReceived"


async def test_streams_that_are_opened_and_reset_without_end_leave_nothing_behind() -> None:
    async with serving() as server:
        async with connected(server) as (_, writer):
            client = Http2(writer)
            for _ in range(500):
                number = client.call()
                client.h2.reset_stream(number)
            await client.flush()
            await serves_others(server)

        async def nothing_runs() -> bool:
            return not server.listener._tasks

        await eventually(nothing_runs)


async def test_connections_that_are_opened_and_dropped_leave_nothing_behind() -> None:
    async with serving() as server:
        for number in range(200):
            async with connected(server) as (_, writer):
                writer.write(PREFACE[: number % len(PREFACE)])
        await serves_others(server)

        async def nobody() -> bool:
            counts = server.context.counts
            return counts.connections.taken == counts.greetings.taken == 0

        await eventually(nobody)


# --- limits


async def test_who_says_nothing_is_sent_away() -> None:
    async with serving(limits=Limits(greeting_time=0.1)) as server:
        async with connected(server) as (reader, writer):
            writer.write(PREFACE)
            await cut_off(reader)
        async with connected(server) as (reader, _):
            await cut_off(reader)
        assert server.lines.events().count("connection closed: no call in time") == 2
        async with channel(server.target) as over:
            client = await session(over)
            await asyncio.sleep(0.3)  # who has called stays, whether it goes on or not
            assert await client.acquired(await client.acquire("m", 1, ephemeral=True))


async def test_connections_are_limited() -> None:
    async with (
        serving(limits=Limits(connections=1)) as server,
        channel(server.target) as over,
    ):
        await session(over)
        async with channel(server.target) as other:
            with pytest.raises(GRPCError, match="connections = 1") as caught:
                await call(other, "WhoAmI")
            assert caught.value.status is GrpcStatus.UNAVAILABLE
        (refused,) = [
            facts for _, event, facts in server.lines.seen if event == "connection refused"
        ]
        assert refused["limit"] == "connections"


async def test_a_full_server_lets_in_a_client_whose_session_is_detached() -> None:
    tokens = {"billing": "token-of-billing-", "reports": "token-of-reports-"}
    authenticator = Authenticator({token: name for name, token in tokens.items()})
    billing, reports = ([("x-ydb-auth-ticket", each)] for each in tokens.values())
    limits = Limits(connections=1)
    async with serving(limits=limits, authenticator=authenticator) as server:

        async def is_alone() -> bool:
            return not (server.context.counts.connections.taken or server.listener._tasks)

        async with channel(server.target) as over:
            client = await stream(over, metadata=billing)
            await client.start()
        await eventually(is_alone)
        async with channel(server.target) as full, channel(server.target) as other:
            await (await stream(full, metadata=reports)).start()
            assert await (await stream(other, metadata=reports)).status() is GrpcStatus.UNAVAILABLE
            async with channel(server.target) as over, channel(server.target) as further:
                again = await stream(over, metadata=billing)
                await again.start(session_id=client.session_id)
                one_more = await stream(further, metadata=billing)
                assert await one_more.status() is GrpcStatus.UNAVAILABLE


async def test_a_returning_client_has_a_few_connections_more_than_sessions() -> None:
    clients = ReturningClients()
    client, other = (ANONYMOUS, source_at("192.0.2.7")), (ANONYMOUS, source_at("192.0.2.9"))
    assert not clients.let_in(client)
    for detached in (True, False):
        clients.count_session(client, 1, detached=detached)
    assert [clients.let_in(client) for _ in range(6)] == [True] * 5 + [False]
    assert not clients.let_in(other)
    clients.lost(client)
    assert clients.let_in(client)
    clients.count_session(client, -1, detached=True)
    for _ in range(5):
        clients.lost(client)
    assert not clients.let_in(client), "its other session is attached"
    clients.count_session(client, -1, detached=False)
    assert not clients


async def test_a_tls_client_at_a_port_without_tls_is_named_in_the_log() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01" + bytes(507))
        await cut_off(reader)
        assert "a TLS client at a port without TLS" in server.lines.events()


async def test_a_silent_connection_yields_its_slot_and_is_sent_goaway() -> None:
    async with (
        serving(limits=Limits(greetings=1)) as server,
        connected(server) as (reader, writer),
    ):
        writer.write(PREFACE)
        assert await reader.readexactly(9)
        async with channel(server.target) as over:
            client = await session(over)
            assert b"greetings = 1" in await cut_off(reader)
            assert await client.acquired(await client.acquire("m", 1, ephemeral=True))


async def test_a_source_that_connects_too_fast_is_sent_goaway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "source_at", lambda _: Source("192.0.2.1"))
    limits = Limits(connections=1, connections_per_second=1)
    async with (
        serving(limits=limits) as server,
        channel(server.target) as over,
    ):
        await session(over)
        async with connected(server) as (reader, writer):
            client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            client.initiate_connection()
            writer.write(client.data_to_send())
            events = client.receive_data(await cut_off(reader))
        (goaway,) = [each for each in events if isinstance(each, ConnectionTerminated)]
        assert goaway.error_code is ErrorCodes.ENHANCE_YOUR_CALM
        assert b"connections_per_second = 1" in (goaway.additional_data or b"")


async def test_sessions_of_a_connection_are_limited() -> None:
    async with (
        serving(limits=Limits(sessions_per_connection=1)) as server,
        channel(server.target) as over,
    ):
        first = await session(over)
        second = await stream(over)
        await second.send(session_start=Request.SessionStart(path=NODE, timeout_millis=5000))
        assert "sessions_per_connection" in await second.fails(Status.PRECONDITION_FAILED)
        await first.call.cancel()

        async def left() -> bool:
            return not server.listener._streams

        await eventually(left)
        await session(over)


async def test_of_operations_without_end_so_many_are_under_way() -> None:
    limits = Limits(operations_in_flight=10)
    async with serving(limits=limits) as server, channel(server.target) as over:
        client = await session(over)
        most = 0
        (connection,) = server.listener.connections
        counting = connection.operations

        def count(more: int, size: int) -> None:
            nonlocal most
            counting(more, size)
            most = max(most, connection._operations)

        connection.operations = count  # type: ignore[method-assign]
        asks = [Request.DescribeSemaphore(req_id=each, name="none") for each in range(1, 201)]
        messages = [Request(describe_semaphore=each).SerializeToString() for each in asks]
        # In one piece, so that the client answers pings soon, however busy the machine is.
        await client.call._stream.send_data(b"".join(map(frame, messages)))
        for each in asks:
            kind = "describe_semaphore_result"
            assert await client.refused(each.req_id, kind) == Status.NOT_FOUND
        assert 1 < most <= 10
        other = await session(over)
        assert await other.acquired(await other.acquire("m", 1, ephemeral=True))


@pytest.mark.parametrize("lost", [False, True])
async def test_messages_count_as_input_until_their_operations_are_answered(*, lost: bool) -> None:
    answered, begun, number, size = asyncio.Event(), 0, 10, 60_000
    limits = Limits(
        data_bytes=64 * 1024,
        message_bytes=128 * 1024,
        identity_input_bytes=4 * 4 * size,
    )

    async def update(*_: object) -> None:
        nonlocal begun
        begun += 1
        await answered.wait()

    async with serving(limits=limits) as server:
        async with channel(server.target) as over:
            clients = [await session(over) for _ in range(number)]
            for each in server.listener._streams:
                guarded: Any = each._session
                guarded._session.update_semaphore = update  # the store's own
            # HTTP/2's flow control lets only a few of them through before they are carried out.
            sending = [asyncio.create_task(each.update("s", bytes(size))) for each in clients]
            (connection,) = server.listener.connections

            async def enough_have_come() -> bool:
                return connection.overloaded

            await eventually(enough_have_come)
            assert begun == 4
            assert 4 * size < server.context.input.total < 4 * 4 * size
            if not lost:
                answered.set()
                await asyncio.wait(sending)
                for client in clients:
                    await client.expect("update_semaphore_result")
                assert begun == number
                assert server.context.input.total == 0
            for task in sending:
                task.cancel()
            await asyncio.wait(sending)
        answered.set()
        await eventually_empty(server)
        assert server.context.input.total == 0


async def test_a_connection_that_is_lost_with_much_unread_takes_all_of_it_along() -> None:
    limits = Limits(operations_in_flight=1)
    async with serving(limits=limits) as server:
        async with channel(server.target) as over:
            clients = [await session(over) for _ in range(3)]

            async def stuck(*_: object, **__: object) -> None:
                await asyncio.Event().wait()

            for each in server.listener._streams:
                guarded: Any = each._session
                its = guarded._session  # the store's own
                its.describe_semaphore = stuck
            for client in clients:
                await client.describe("none")

            async def all_have_come() -> bool:
                (connection,) = server.listener.connections
                return connection.overloaded and len(connection.choked) == 3

            await eventually(all_have_come)
            for connection in list(server.listener.connections):
                connection.cut_off()
            await eventually_empty(server)
        await serves_others(server)


async def eventually_empty(server: Server, *, connections: bool = True) -> None:
    async def empty() -> bool:
        left = connections and server.listener.connections
        return not (left or server.listener._tasks)

    await eventually(empty)


@pytest.mark.parametrize("limit", ["output_bytes", "output_time"])
async def test_who_does_not_read_is_not_read_from_and_then_cut_off(limit: str) -> None:
    smallest = {"data_bytes": 64 * 1024, "message_bytes": 128 * 1024}
    limits = Limits(
        **smallest,
        output_bytes=256 * 1024 if limit == "output_bytes" else 64 * 1024 * 1024,
        output_time=0.5 if limit == "output_time" else 60.0,
    )
    async with serving(limits=limits) as server, channel(server.target) as over:
        writer = await session(over)
        await writer.create("s", 1, b"d" * 64 * 1024)
        async with connected(server) as (_, raw):
            client = Http2(raw)
            number = client.call()
            start = Request.SessionStart(path=NODE, timeout_millis=30_000)
            ask = Request.DescribeSemaphore(name="s")
            messages = [Request(session_start=start)]
            messages += [Request(describe_semaphore=ask)] * 1000
            data = b"".join(
                b"\x00" + len(each).to_bytes(4, "big") + each
                for each in (message.SerializeToString() for message in messages)
            )
            for begin in range(0, len(data), 8192):
                client.h2.send_data(number, data[begin : begin + 8192])
            await client.flush()
            await eventually_logged(server, "connection cut off: the client does not read")
        (told,) = [facts for _, event, facts in server.lines.seen if "cut off" in event]
        assert told["limit"] in {limit, "output_time"}
        assert await writer.acquired(await writer.acquire("m", 1, ephemeral=True))


async def eventually_logged(server: Server, event: str) -> None:
    async def logged() -> bool:
        return event in server.lines.events()

    await eventually(logged)


async def test_no_line_of_the_log_has_a_token_or_what_a_client_sent() -> None:
    async with serving() as server, channel(server.target) as over:
        metadata: Any = [("x-ydb-auth-ticket", "a secret of mine")]
        client = await stream(over, metadata=metadata)
        await client.send(session_start=Request.SessionStart(path="/local/none"))
        await client.fails(Status.NOT_FOUND)
        assert server.lines.seen
        assert not any("secret" in str(line) for line in server.lines.seen)
