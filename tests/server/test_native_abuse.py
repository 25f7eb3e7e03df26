"""What clients should not do: an error to that client, a line in the log, no harm to others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tenure.engines.memory import MemoryEngine
from tenure.errors import EngineUnavailable
from tenure.server import listener as accepting
from tenure.server.admission import Source
from tenure.server.auth import Identity, Peer
from tenure.server.auth.authenticator import UNKNOWN_PEER, Authenticator
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import ANONYMOUS
from tenure.server.limits import Limits
from tenure.server.native import NativeListener
from tenure.server.native import stream as native_stream
from tenure.server.native.connection import NativeServerConnection
from tenure.server.tls import TlsFiles, server_context
from tenure.testing import VirtualClock
from tenure.testing.clock import run
from tenure.testing.faults import FaultyEngine, Way
from tenure.wire.frames import HEADER_BYTES, FrameReader, FrameWriter
from tenure.wire.messages import (
    Attach,
    Bye,
    DescribeSemaphore,
    Done,
    EndSession,
    Enqueue,
    Failed,
    Hello,
    ListNodes,
    Placed,
    Proven,
    Renew,
    SemaphoreDescribed,
    Withdraw,
)
from tests.server.certificates import Authority
from tests.server.messages import any_message
from tests.server.talking import Caller, Direct, called, linked, port_of, serving


def frame(message: Struct) -> bytes:
    writer = FrameWriter(1 << 20)
    writer.add(message)
    return bytes(writer.take())


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.message} {getattr(record, 'facts', {})}" for record in caplog.records]


async def is_well(client: Caller, hold: int = 1) -> None:
    """A client and its session on channel 1 are served as ever."""
    client.say(Enqueue(client.next_rid(), 1, hold, f"well{hold}", 1, b"", None, True))
    assert (await client.hear(Placed)).place == 0
    client.say(Withdraw(client.next_rid(), 1, hold), Renew(1, hold))
    await client.hear(Done)
    await client.hear(Proven)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server_tls(authority: Authority) -> ssl.SSLContext:
    pair = authority.signs("server")
    return server_context(TlsFiles(pair.cert, pair.key))


@pytest.fixture
def client_tls(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.cert)


# --- what cannot be read -------------------------------------------------------------------

HELLO = Hello(1, 1, [], "", b"program")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([b"\x00\x00\x00\x02\xc1\xc1"], "cannot read"),
        ([frame(ListNodes(1))], "first message must be Hello"),
        ([struct.pack(">I", 20_000)], "a message of 20000 bytes was announced"),
        ([frame(Hello(1, 1, [], "", b""))], "1 to 64 bytes"),
        ([frame(Hello(2, 3, [], "", b"p"))], "speaks version 1"),
        ([frame(HELLO), frame(HELLO)], "Hello is sent once"),
        ([frame(HELLO), frame(Attach(1, 0, "new", "/default", 9.0))], "channel 0"),
        (
            [frame(HELLO), *(frame(Attach(n, 1, "new", "/default", 9.0)) for n in (1, 2))],
            "channel 1",
        ),
        ([frame(HELLO), struct.pack(">I", 5 << 20)], "4194304 are the maximum"),
        ([frame(HELLO), b"\x00\x00\x00\x03\x92\x63\x01"], "cannot read"),
        ([frame(HELLO), b"\x00\x00\x00\x05" + b"\x91" * 5], "cannot read"),
        ([frame(HELLO), b"\x00\x00\x20\x00" + b"\x91" * 0x2000], "cannot read"),
        ([frame(Hello(1, 1, [], "token", b"p")).replace(b"token", b"\xfftext")], "utf-8"),
        ([frame(HELLO), frame(ListNodes(1)) * 20, b"\x00\x00\x00\x02\x91\xff"], "cannot read"),
    ],
)
async def test_nonsense_gets_an_answer_a_line_in_the_log_and_the_end(
    said: list[bytes], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as listener, called(listener) as other:
        await other.attach()
        async with called(listener, greet=False) as client:
            client.write(b"".join(said))
            bye = await client.hear(Bye, skip=True)
            assert complaint in bye.error.message
            assert not bye.again
            await client.until_lost()
        await is_well(other)
    assert any("bad message" in each or "wrong greeting" in each for each in lines(caplog))


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_a_message_that_fails_unexpectedly_gets_an_answer_and_a_line_in_the_log(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Authenticator):
        def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:
            if token:
                raise error()
            return super().authenticate(token, peer)

    async with serving(authenticator=Broken()) as listener, called(listener) as other:
        await other.attach()
        async with called(listener, greet=False) as client:
            client.write(frame(Hello(1, 1, [], "token", b"p")))
            bye = await client.hear(Bye)
            assert "failed to carry out" in bye.error.message
            assert bye.again
            await client.until_lost()
        await is_well(other)
    (line,) = (each for each in lines(caplog) if "a message failed" in each)
    assert repr(error()) in line


@pytest.mark.parametrize("part", ["decode", "keep", "answer"])
async def test_a_lack_of_memory_ends_one_connection_without_a_traceback(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = frame(ListNodes(7))
    decode, feed, add = native_stream._decode, FrameReader.feed, FrameWriter.add

    def failing_decode(content: memoryview) -> Any:
        if content == message[HEADER_BYTES:]:
            raise MemoryError
        return decode(content)

    def failing_feed(reader: FrameReader, data: bytes) -> Any:
        if data == message:
            raise MemoryError
        return feed(reader, data)

    def failing_add(writer: FrameWriter, answer: Struct) -> int:
        if isinstance(answer, Bye):
            raise MemoryError
        return add(writer, answer)

    if part == "keep":
        monkeypatch.setattr(FrameReader, "feed", failing_feed)
    else:
        monkeypatch.setattr(native_stream, "_decode", failing_decode)
    if part == "answer":
        monkeypatch.setattr(FrameWriter, "add", failing_add)
    async with serving() as listener, called(listener) as other, called(listener) as client:
        await other.attach()
        client.write(message)
        if part != "answer":
            bye = await client.hear(Bye)
            assert "failed to carry out" in bye.error.message
            assert bye.again
        await client.until_lost()
        await is_well(other)
    (line,) = (each for each in lines(caplog) if "a message failed" in each)
    assert "MemoryError()" in line
    assert not any(each.exc_info for each in caplog.records)


@settings(max_examples=100)
@given(pieces=st.lists(st.binary(max_size=60), max_size=5), greeted=st.booleans())
def test_random_bytes_harm_nobody(pieces: list[bytes], greeted: bool) -> None:
    clock = VirtualClock()

    async def abuse() -> None:
        async with serving(clock=clock) as listener, linked(listener) as other:
            await other.attach()
            client = Direct(listener)
            if greeted:
                await client.greet()
            for piece in pieces:
                if not client.way.closed:
                    client.write(piece)
                await asyncio.sleep(0)
            client.lose()
            await is_well(other)
            assert listener.context.counts.greetings.taken == 0
            assert listener.context.counts.connections.taken == 1

    run(abuse(), clock)


@settings(max_examples=150)
@given(messages=st.lists(any_message(), max_size=12), cut=st.booleans())
def test_any_messages_in_any_order_harm_nobody(messages: list[Struct], cut: bool) -> None:
    """They are of the right shape, and may do what their sender may: to itself, and to nodes."""
    clock = VirtualClock()

    async def abuse() -> None:
        async with serving(clock=clock) as listener, linked(listener) as other:
            await other.attach(node="/default", window=30.0)
            client = Direct(listener)
            await client.greet()
            client.say(Attach(1, 1, "new", "/default", 5.0, "", b"key"))
            for message in messages:
                if client.way.closed:
                    break
                client.write(frame(message))
                await asyncio.sleep(0.3)
            if cut:
                client.lose()
            ended_by_it = any(isinstance(each, EndSession) for each in messages)
            if not ended_by_it:
                await is_well(other, 77)
            client.lose()
            other.lose()
            await asyncio.sleep(60)
            counts = listener.context.counts
            assert (counts.connections.taken, counts.greetings.taken) == (0, 0)
            assert (counts.sessions.taken, listener.registry.sessions) == (0, {})

    run(abuse(), clock)


@pytest.mark.parametrize(
    ("said", "answer", "event"),
    [
        (
            b"POST / HTTP/1.1\r\nHost: 127.0.0.1:7070\r\n\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            "an HTTP client at a port that does not serve HTTP",
        ),
        (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"\x15\x03\x01",  # an alert
            "a TLS client at a port without TLS",
        ),
    ],
)
async def test_clients_of_other_protocols_are_sent_away(
    said: bytes, answer: bytes, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        writer.write(said)
        async with asyncio.timeout(60):
            heard = await reader.read()
        assert heard.startswith(answer)
        writer.close()
        await writer.wait_closed()
    assert any(event in each for each in lines(caplog))


# --- too much ------------------------------------------------------------------------------


async def test_who_says_nothing_is_sent_away_and_makes_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(greetings=2, greeting_time=1.0)
    async with serving(limits=limits) as listener:
        async with called(listener, greet=False) as one, called(listener, greet=False) as two:
            async with called(listener, greet=False) as three:
                bye = await one.hear(Bye)
                assert bye.again
                assert "greetings = 2" in bye.error.message
                await one.until_lost()
                assert listener.context.counts.greetings.taken <= 2
                await three.until_lost()
            assert any(
                "connection refused" in each and "greetings" in each for each in lines(caplog)
            )
            await two.until_lost()
        async with called(listener) as four:
            await four.attach()
    assert any("did not identify itself" in each for each in lines(caplog))


async def test_a_client_that_greets_comes_in_past_silent_ones() -> None:
    async with serving(limits=Limits(greetings=3)) as listener, AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(called(listener, greet=False))
        for _ in range(5):
            client = await stack.enter_async_context(called(listener))
            await client.attach()
        counts = listener.context.counts
        assert (counts.connections.taken, counts.greetings.taken) == (5, 2)


async def test_a_handshake_that_is_not_finished_counts_and_yields(
    server_tls: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(greetings=1, greeting_time=0.5)
    url = "tenures://127.0.0.1:0"
    async with serving(limits=limits, url=url, tls=server_tls) as listener:
        async with called(listener, greet=False) as one, called(listener, greet=False) as two:
            await one.until_lost()
            assert listener.context.counts.greetings.taken == 1
            await two.until_lost()
        assert listener.context.counts.greetings.taken == 0
    assert any("handshake failed" in each for each in lines(caplog))
    assert any("connection refused" in each and "greetings" in each for each in lines(caplog))


async def test_a_source_that_connects_too_fast_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "source_at", lambda _: Source("192.0.2.1"))
    limits = Limits(connections=2, connections_per_second=2)
    async with serving(limits=limits) as listener, AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(called(listener, greet=False))
        refused = await stack.enter_async_context(called(listener, greet=False))
        bye = await refused.hear(Bye)
        assert bye.again
        assert "connections_per_second = 2" in bye.error.message
        await refused.until_lost()
        assert listener.context.counts.greetings.taken == 2


def _as_is(client: Caller) -> Caller:
    return client


async def test_local_clients_come_in_however_many_there_are_from_the_network(
    tmp_path: Path,
) -> None:
    limits = Limits(connections=1, greetings=1)
    path = tmp_path / "tenure.sock"
    async with serving(limits=limits) as listener, called(listener) as one:
        await one.attach()
        local = NativeListener(listener.context, f"tenure+unix://{path}")
        await local.open()
        try:
            async with called(listener, greet=False) as silent:
                for number in range(10):
                    client = Caller()
                    await asyncio.get_running_loop().create_unix_connection(
                        functools.partial(_as_is, client), str(path)
                    )
                    await client.greet()
                    await client.attach()
                    assert listener.context.counts.connections.taken == number + 2
                assert not silent.lost
        finally:
            await local.aclose()


async def test_too_many_connections_are_refused_and_told_to_come_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(limits=Limits(connections=1)) as listener, called(listener) as one:
        await one.attach()
        async with called(listener, greet=False) as two:
            two.say(Hello(1, 1, [], "", two.program))
            bye = await two.hear(Bye)
            assert bye.again
            assert bye.error.kind == "EngineUnavailable"
            assert "connections = 1" in bye.error.message
            await two.until_lost()
        async with called(listener, one.program) as aside:  # it has a session here
            aside.rid = one.rid
            await aside.attach(2)
        await is_well(one)
    assert any("connection refused" in each and "connections" in each for each in lines(caplog))


async def test_thousands_of_connections_come_and_go_and_leave_nothing() -> None:
    async with serving(limits=Limits(greetings=300)) as listener, called(listener) as other:
        await other.attach()
        where = "127.0.0.1", port_of(listener)
        for batch in range(20):
            sockets = []
            for number in range(100):
                made = socket.create_connection(where)
                if number % 3 == 1:
                    made.sendall(frame(HELLO)[:7])
                elif number % 3 == 2:
                    made.sendall(frame(HELLO))
                if number % 2:
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sockets.append(made)
                await asyncio.sleep(0)
            for made in sockets:
                made.close()
            await is_well(other, batch)
        counts = listener.context.counts
        async with asyncio.timeout(30):
            while len(listener.connections) > 1 or counts.greetings.taken:
                await is_well(other, 99)
        assert counts.connections.taken == 1
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, NativeServerConnection)]
        assert len(alive) == 1


async def test_too_many_sessions_on_a_connection_are_refused() -> None:
    limits = Limits(sessions_per_connection=1)
    async with serving(limits=limits) as listener, called(listener) as client:
        await client.attach()
        client.say(Attach(9, 2, "new", "/default", 9.0))
        assert "sessions_per_connection" in (await client.hear(Failed)).error.message
        await is_well(client)


# --- not reading, not writing --------------------------------------------------------------


@pytest.mark.usefixtures("loop_factory")
async def test_who_does_not_read_is_not_read_from_and_in_the_end_cut_off(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach()
        client.reads = False
        client.say(Renew(1, 1))
        assert not client.is_read()
        since = clock.now()
        await client.until_lost()
        assert 30 <= clock.now() - since < 32
    assert any("it does not read" in each for each in lines(caplog))


@pytest.mark.usefixtures("loop_factory")
async def test_who_reads_again_is_read_from_again(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach(window=60.0)
        client.reads = False
        client.say(Renew(1, 1))
        assert not client.is_read()
        await asyncio.sleep(20)
        client.read_again()
        assert client.is_read()
        await client.hear(Proven)
        await asyncio.sleep(10)  # its silence counts from now, and not from before
        await is_well(client)


@pytest.mark.usefixtures("loop_factory")
async def test_who_reads_again_in_time_gets_everything(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        await client.attach(window=60.0)
        client.reads = False
        client.say(*(Renew(1, number) for number in range(2000)))
        client.say(*(Renew(1, number) for number in range(2000, 3000)))
        await asyncio.sleep(20)
        client.read_again()
        await client.until(lambda: len(client.unread) == 3000, "all answers")
        assert [(await client.hear(Proven)).number for _ in range(3000)] == list(range(3000))
        assert client.is_read()


@pytest.mark.usefixtures("loop_factory")
async def test_who_is_silent_is_taken_for_dead(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        since = clock.now()
        await client.until_lost()
        assert 15 <= clock.now() - since <= 17


async def test_a_reader_that_stops_cannot_make_the_servers_memory_grow() -> None:
    limits = Limits(data_bytes=100_000, message_bytes=300_000, output_bytes=600_000)
    async with serving(limits=limits) as listener, called(listener) as other:
        await other.attach(window=60.0)
        async with called(listener) as client:
            await client.attach(window=60.0)
            client.say(Enqueue(5, 1, 1, "big", 1, bytes(100_000), None, True))
            await client.hear(Placed)
            (connection,) = (
                each for each in listener.connections if each.program == client.program
            )
            transport = connection._transport
            assert client.transport is not None
            assert transport is not None
            client.transport.pause_reading()
            asked = list(range(10, 200))
            for rid in asked:
                client.say(DescribeSemaphore(rid, 1, "big", True, False))
            most = 0
            while connection._blocked_at is None or connection._reading:
                await is_well(other)
                most = max(most, transport.get_write_buffer_size() + connection._unwritten)
            for _ in range(50):
                await is_well(other)
                most = max(most, transport.get_write_buffer_size() + connection._unwritten)
            assert most < 2 * limits.output_bytes
            assert connection._held <= limits.output_bytes
            client.transport.resume_reading()  # every request is answered, one way or the other
            await client.until(lambda: len(client.unread) >= len(asked), "all answers")
            assert {getattr(each, "rid", 0) for each in client.unread} == set(asked)
            refused = [each for each in client.heard if isinstance(each, Failed)]
            assert all("output_bytes" in each.error.message for each in refused)
            assert any(isinstance(each, SemaphoreDescribed) for each in client.heard)
            client.pass_over()
            await is_well(client, 9)


async def test_who_comes_in_while_the_server_drains_is_sent_on() -> None:
    async with serving() as listener, called(listener, greet=False) as late:
        await listener.drain()
        late.say(Hello(1, 1, [], "", late.program))
        assert (await late.hear(Bye)).again
        await late.until_lost()


@asynccontextmanager
async def slow_server(
    clock: VirtualClock, way: Way, limits: Limits
) -> AsyncIterator[NativeListener]:
    engine = FaultyEngine(MemoryEngine("", clock), way)
    await engine.open()
    async with serving(engine=engine, limits=limits) as listener:
        yield listener
        way.mend()
    await engine.aclose()


@pytest.mark.usefixtures("loop_factory")
async def test_no_more_operations_are_under_way_than_may_be(clock: VirtualClock) -> None:
    way = Way(delay=lambda: 1.0)
    limits = Limits(operations_in_flight=4)
    async with slow_server(clock, way, limits) as listener, linked(listener) as client:
        await client.attach()
        client.say(*(Withdraw(rid, 1, rid) for rid in range(2, 12)))
        assert client.connection._in_flight == 4
        assert not client.is_read()
        client.connection.data_received(frame(Withdraw(12, 1, 1)))  # read before it was stopped
        await asyncio.sleep(2.5)
        assert len(client.unread) == 4
        assert client.connection._in_flight == 4
        await client.until(lambda: len(client.unread) == 11, "eleven answers")
        assert [(await client.hear(Done)).rid for _ in range(11)] == list(range(2, 13))
        assert client.is_read()


@pytest.mark.usefixtures("loop_factory")
async def test_one_that_says_much_at_once_does_not_keep_others_waiting(
    clock: VirtualClock,
) -> None:
    async with (
        serving(clock=clock) as listener,
        linked(listener) as client,
        linked(listener) as other,
    ):
        await client.attach()
        await other.attach()
        client.say(*(Renew(1, number) for number in range(5000)))
        await is_well(other)
        assert 0 < len(client.unread) < 5000
        await client.until(lambda: len(client.unread) == 5000, "all of its answers")


# --- who may come in -----------------------------------------------------------------------


async def test_a_wrong_token_is_refused_and_not_repeated_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(authenticator=Authenticator({"right": "someone"})) as listener:
        async with called(listener, greet=False) as client:
            client.say(Hello(1, 1, [], "secret-guess", client.program))
            bye = await client.hear(Bye)
            assert bye.error.kind == "AuthenticationFailed"
            assert not bye.again
            await client.until_lost()
        async with called(listener, greet=False) as client:
            await client.greet("right")
            await client.attach()
    assert any("wrong token" in each for each in lines(caplog))
    assert not any("secret-guess" in each for each in lines(caplog))


# --- where it listens, and its end ---------------------------------------------------------


async def test_a_unix_socket_is_there_for_its_owner_and_gone_at_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tenure.sock"
    async with serving(url=f"tenure+unix://{path}") as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        caller = Caller()
        await asyncio.get_running_loop().create_unix_connection(lambda: caller, str(path))
        await caller.greet()
        await caller.attach()
        await is_well(caller)
        await listener.drain()
        assert not path.exists()
        assert (await caller.hear(Bye)).again
        await is_well(caller, 2)
        caller.close()
        await caller.until_lost()


async def test_tls_is_spoken(server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async with serving(url="tenures://127.0.0.1:0", tls=server_tls) as listener:
        caller = Caller()
        await caller.dial(
            "127.0.0.1", port_of(listener), ssl=client_tls, server_hostname="localhost"
        )
        await caller.greet()
        await caller.attach()
        await is_well(caller)
        caller.close()
        await caller.until_lost()


async def test_a_server_that_drains_serves_who_is_there_and_lets_nobody_in() -> None:
    async with serving() as listener, called(listener) as client:
        await client.attach()
        await listener.drain()
        bye = await client.hear(Bye)
        assert bye.again
        assert "going to be stopped" in bye.error.message
        await is_well(client)
        with pytest.raises(ConnectionRefusedError):
            await Caller().dial("127.0.0.1", port_of(listener))


async def test_all_addresses_of_a_machine_share_one_port() -> None:
    async with serving(url="tenure://:0") as listener:
        for host in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError):  # a machine without IPv6
                caller = Caller()
                await caller.dial(host, port_of(listener))
                await caller.greet()
                caller.close()
                await caller.until_lost()


async def test_an_address_that_is_taken_is_named() -> None:
    async with serving() as listener:
        with pytest.raises(EngineUnavailable, match="cannot listen at tenure://127"):
            async with serving(url=listener.address):
                pass


async def test_a_listener_may_be_closed_twice_and_before_it_was_open() -> None:
    async with serving() as listener:
        await listener.aclose()
        await listener.aclose()
        await NativeListener(listener.context, "tenure://127.0.0.1:0").aclose()


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1.0])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused_and_costs_no_quota(
    timeout: float,
) -> None:
    async with serving() as listener, called(listener) as client:
        await client.attach()
        client.say(Enqueue(client.next_rid(), 1, 1, "m", 1, b"", timeout, True))
        failed = await client.hear(Failed)
        assert failed.error.kind == "InvalidArgument"
        account = GuardedEngine(listener.context.guard, ANONYMOUS).account
        assert account.requests.used == 0
        await is_well(client)
