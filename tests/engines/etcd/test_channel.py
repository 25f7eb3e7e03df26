"""gRPC's calls over a channel, to a member that a test plays: one that is slow, leaves, or lies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from tenure.engines.etcd import grpc, members
from tenure.engines.etcd.grpc import CallFailed, Code, message
from tenure.engines.etcd.members import Channel
from tests.engines.etcd.servers import free_port
from tests.server.certificates import Authority

PATIENCE = 30.0
BEGUN = [(":status", "200"), ("content-type", "application/grpc")]


class Talk(asyncio.Protocol):
    """One connection, from the member's side.

    Attributes:
        theirs: its state; `flush` sends what that has to say.
        heard: all events so far.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._more = asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self.theirs = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.heard: list[h2.events.Event] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._member.talks.append(self)
        self._member.came.set()
        if self._member.greets:
            self.theirs.initiate_connection()
            self.theirs.update_settings(self._member.settings)
            self.flush()

    def data_received(self, data: bytes) -> None:
        if self._member.deaf:
            return
        for event in self.theirs.receive_data(data):
            self.heard.append(event)
            if isinstance(event, h2.events.StreamEnded):
                self._member.answers(self, event.stream_id)
        self._more.set()
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._more.set()

    def flush(self) -> None:
        if self.transport is not None:
            self.transport.write(self.theirs.data_to_send())

    def answer(self, number: int, *words: bytes, status: str = "0", reason: str = "") -> None:
        self.theirs.send_headers(number, BEGUN)
        for each in words:
            self.theirs.send_data(number, message(each))
        trailers = [("grpc-status", status), ("grpc-message", reason)]
        self.theirs.send_headers(number, trailers, end_stream=True)
        self.flush()

    async def until(self, kind: type[h2.events.Event], number: int = 1) -> h2.events.Event:
        """The event of this kind that comes as the number-th."""
        async with asyncio.timeout(PATIENCE):
            while True:
                found = [each for each in self.heard if isinstance(each, kind)]
                if len(found) >= number:
                    return found[number - 1]
                self._more.clear()
                await self._more.wait()

    async def until_closed(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.transport is not None:
                self._more.clear()
                await self._more.wait()


class Member:
    """A member of no cluster.

    Attributes:
        answers: what it does when a request is complete.
        greets: whether it says what it allows.
        deaf: whether it hears nothing.
        talks: its connections so far.
    """

    def __init__(self) -> None:
        self.answers: Callable[[Talk, int], None] = lambda talk, number: talk.answer(number, b"yes")
        self.greets = True
        self.deaf = False
        self.settings: dict[SettingCodes | int, int] = {}
        self.talks: list[Talk] = []
        self.came = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0, secrets: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Talk(self), "127.0.0.1", port, ssl=secrets
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for talk in self.talks:
            if talk.transport is not None:
                talk.transport.abort()
                await talk.until_closed()


@asynccontextmanager
async def a_channel(
    member: Member, secrets: ssl.SSLContext | None = None, server_name: str = ""
) -> AsyncIterator[Channel]:
    channel = Channel(f"127.0.0.1:{member.port}", secrets, server_name)
    try:
        yield channel
    finally:
        await channel.aclose()


@asynccontextmanager
async def a_member(port: int = 0, secrets: ssl.SSLContext | None = None) -> AsyncIterator[Member]:
    member = Member()
    await member.start(port, secrets)
    try:
        yield member
    finally:
        await member.aclose()


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Member, Channel]]:
    async with a_member() as member, a_channel(member) as channel:
        yield member, channel


async def ask(channel: Channel, *, timeout: float = PATIENCE) -> bytes:
    return await channel.call("/a/Method", b"what", timeout, (("token", "t"),))


async def refused(channel: Channel, *, timeout: float = PATIENCE) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await ask(channel, timeout=timeout)
    return caught.value


async def test_calls_share_a_connection_and_say_who_asks() -> None:
    async with both() as (member, channel):
        assert await asyncio.gather(*(ask(channel) for _ in range(10))) == [b"yes"] * 10
        (talk,) = member.talks
        first = talk.heard[[type(each) for each in talk.heard].index(h2.events.RequestReceived)]
        assert isinstance(first, h2.events.RequestReceived)
        headers = {bytes(name): bytes(value) for name, value in first.headers}
        assert headers[b":path"] == b"/a/Method"
        assert headers[b":authority"] == f"127.0.0.1:{member.port}".encode()
        assert headers[b"token"] == b"t"


async def test_tokens_that_come_and_go_are_not_kept() -> None:
    async with both() as (_, channel):
        for number in range(200):
            metadata = (("token", str(number)),)
            assert await channel.call("/a/Method", b"", PATIENCE, metadata) == b"yes"
        assert len(channel._heads) <= 64


# How a call ends


def trailers(talk: Talk, number: int, *more: tuple[str, str], begun: bool = True) -> None:
    if begun:
        talk.theirs.send_headers(number, BEGUN)
    talk.theirs.send_headers(number, list(more), end_stream=True)


def data(talk: Talk, number: int, said: bytes, *, ended: bool = False) -> None:
    talk.theirs.send_headers(number, BEGUN)
    talk.theirs.send_data(number, said, end_stream=ended)


def half(talk: Talk, number: int) -> None:
    data(talk, number, b"\0\0\0\0\5no")
    trailers(talk, number, ("grpc-status", "0"), begun=False)


OUT_OF_RANGE = (("grpc-status", "11"), ("grpc-message", "too%20long%20ago"))
ENDS: dict[str, tuple[Callable[[Talk, int], None], Code, str]] = {
    "refused": (lambda t, n: t.answer(n, status="7", reason="no"), Code.PERMISSION_DENIED, "no"),
    "refused at once": (
        lambda t, n: trailers(
            *(t, n, (":status", "200"), ("content-type", "application/grpc"), *OUT_OF_RANGE),
            begun=False,
        ),
        *(Code.OUT_OF_RANGE, "too long ago"),
    ),
    "refused without a word": (lambda t, n: t.answer(n, status="5"), Code.NOT_FOUND, "NOT_FOUND"),
    "a status of another time": (lambda t, n: t.answer(n, status="99"), Code.UNKNOWN, "UNKNOWN"),
    "no answer": (lambda t, n: t.answer(n), Code.INTERNAL, "no answer"),
    "two answers": (lambda t, n: t.answer(n, b"1", b"2"), Code.INTERNAL, "more than one"),
    "half an answer": (half, Code.INTERNAL, "OK"),
    "no status": (lambda t, n: trailers(t, n, ("a", "b")), Code.INTERNAL, "without a status"),
    "data at the end": (
        lambda t, n: data(t, n, message(b"yes"), ended=True),
        *(Code.INTERNAL, "without a status"),
    ),
    "a proxy in between": (
        lambda t, n: trailers(t, n, (":status", "503"), begun=False),
        *(Code.UNAVAILABLE, "HTTP status 503"),
    ),
    "a page for people": (
        lambda t, n: t.theirs.send_headers(n, [(":status", "200"), ("content-type", "text/html")]),
        *(Code.INTERNAL, "not gRPC"),
    ),
    "packed": (lambda t, n: data(t, n, b"\1\0\0\0\1x"), Code.INTERNAL, "compressed"),
    "reset": (
        lambda t, n: t.theirs.reset_stream(n, ErrorCodes.INTERNAL_ERROR),
        *(Code.UNAVAILABLE, "INTERNAL_ERROR"),
    ),
    "cut off": (
        lambda t, n: t.transport.abort() if t.transport else None,
        *(Code.UNAVAILABLE, "closed"),
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_call_that_ends_badly_says_how(how: str) -> None:
    async with both() as (member, channel):
        member.answers, code, words = ENDS[how]
        failed = await refused(channel)
        assert (failed.code, failed.again) == (code, False)
        assert words in str(failed)
        member.answers = lambda talk, number: talk.answer(number, b"yes")
        assert await ask(channel) == b"yes"  # and the next one is none the worse


async def test_an_answer_may_be_announced_and_come_in_pieces() -> None:
    async with both() as (member, channel):

        def answers(talk: Talk, number: int) -> None:
            talk.theirs.send_headers(number, [(":status", "103")])
            talk.theirs.send_headers(number, BEGUN)
            for byte in message(b"yes"):
                talk.theirs.send_data(number, bytes([byte]))
                talk.flush()
            trailers(talk, number, ("grpc-status", "0"), begun=False)

        member.answers = answers
        assert await ask(channel) == b"yes"


async def test_who_waits_too_long_or_not_any_more_is_told_to_the_member_and_nobody_else() -> None:
    async with both() as (member, channel):
        assert await ask(channel) == b"yes"
        member.answers = lambda *_: None
        other = asyncio.create_task(ask(channel))
        await asyncio.sleep(0)  # it goes first
        failed = await refused(channel, timeout=0.05)
        assert failed.code is Code.DEADLINE_EXCEEDED
        (talk,) = member.talks
        await talk.until(h2.events.StreamReset)
        unwanted = asyncio.create_task(ask(channel))
        await talk.until(h2.events.RequestReceived, 4)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        reset = await talk.until(h2.events.StreamReset, 2)
        assert (reset.stream_id, reset.error_code) == (7, ErrorCodes.CANCEL)  # type: ignore[attr-defined]
        talk.answer(3, b"late, but in time")
        assert await other == b"late, but in time"


# Messages both ways


async def test_a_call_that_is_closed_before_its_task_began_leaves_no_error() -> None:
    async with both() as (member, channel):
        assert await ask(channel) == b"yes"
        member.answers = lambda *_: None
        begun = ask(channel)
        begun.send(None)
        begun.close()  # an exception that no task retrieves would fail this test
        (talk,) = member.talks
        await talk.until(h2.events.StreamReset)


async def test_a_conversation_goes_both_ways_to_its_end() -> None:
    async with both() as (member, channel):
        member.answers = lambda *_: None
        call = channel.converse("/a/Talk")
        call.write(b"one")  # before there is a connection
        reading = asyncio.create_task(call.read())
        await asyncio.wait_for(member.came.wait(), PATIENCE)
        (talk,) = member.talks
        await talk.until(h2.events.DataReceived)
        talk.theirs.send_headers(1, BEGUN)
        talk.theirs.send_data(1, message(b"two") + message(b"three"))
        talk.flush()
        assert await reading == b"two"
        call.write(b"four")
        call.done_writing()
        await talk.until(h2.events.StreamEnded)
        assert await call.read() == b"three"
        again = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        reading = asyncio.create_task(call.read())
        trailers(talk, 1, ("grpc-status", "0"), begun=False)
        talk.flush()
        assert await reading is None
        assert await call.read() is None
        call.write(b"to nobody")
        call.done_writing()
        call.cancel()
        assert await call.read() is None


async def test_a_conversation_that_is_left_fails_for_who_reads() -> None:
    async with both() as (_, channel):
        call = channel.converse("/a/Talk")
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        call.cancel("it was left")
        for each in (reading, call.read()):
            with pytest.raises(CallFailed, match="it was left") as caught:
                await each
            assert caught.value.code is Code.CANCELLED


# Connections that come and go


async def test_a_member_that_leaves_is_asked_once_more_on_another_connection() -> None:
    async with both() as (member, channel):

        def leave(talk: Talk, number: int) -> None:
            if number == 1:
                return
            member.answers = lambda talk, number: talk.answer(number, b"again")
            talk.theirs.close_connection(last_stream_id=1)
            talk.flush()
            # which says that the first one is done, whatever the implementation here believes
            assert talk.transport is not None

        member.answers = leave
        first = asyncio.create_task(ask(channel))
        await asyncio.wait_for(member.came.wait(), PATIENCE)
        (talk,) = member.talks
        await talk.until(h2.events.StreamEnded)
        assert await ask(channel) == b"again"
        assert len(member.talks) == 2
        assert not first.done()
        assert talk.transport is not None
        talk.transport.abort()
        with pytest.raises(CallFailed, match="closed"):
            await first


async def test_a_member_that_leaves_with_nothing_under_way_is_left() -> None:
    async with both() as (member, channel):
        assert await ask(channel) == b"yes"
        (talk,) = member.talks
        talk.theirs.close_connection()
        talk.flush()
        await talk.until_closed()
        assert await ask(channel) == b"yes"
        assert len(member.talks) == 2


async def test_a_connection_whose_numbers_are_used_up_is_followed_by_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc, "_SILENCE", 0.02)
    async with both() as (member, channel):
        assert await ask(channel) == b"yes"
        member.answers = lambda *_: None
        assert channel._connection is not None
        channel._connection.protocol._next = (1 << 31) - 1
        talk = member.talks[0]
        last = asyncio.create_task(ask(channel))
        await talk.until(h2.events.StreamEnded, 2)
        member.answers = lambda talk, number: talk.answer(number, b"another")
        assert await ask(channel) == b"another"
        assert len(member.talks) == 2
        last.cancel()  # with which the first connection has nothing to do any more
        await talk.until_closed()
        with pytest.raises(asyncio.CancelledError):
            await last


async def test_who_asks_while_it_is_being_closed_is_told_so() -> None:
    async with both() as (_, channel):
        assert await ask(channel) == b"yes"
        closing = asyncio.create_task(channel.aclose())
        await asyncio.sleep(0)
        assert "closed" in str(await refused(channel))
        await closing


async def test_a_call_that_is_always_sent_away_fails() -> None:
    async with both() as (member, channel):
        member.answers = lambda talk, number: talk.theirs.reset_stream(
            number, ErrorCodes.REFUSED_STREAM
        )
        failed = await refused(channel)
        assert (failed.code, failed.again) == (Code.UNAVAILABLE, True)


async def test_a_member_that_comes_back_is_found_and_meanwhile_calls_fail_at_once() -> None:
    port = free_port()
    channel = Channel(f"127.0.0.1:{port}")
    reasons = {str(await refused(channel)) for _ in range(5)}  # most without an attempt
    assert len(reasons) == 1
    assert f"127.0.0.1:{port} cannot be reached" in reasons.pop()
    async with a_member(port):
        assert await eventually(channel) == b"yes"
        await channel.aclose()
    for _ in range(2):
        await channel.aclose()
        assert "closed" in str(await refused(channel))


async def eventually(channel: Channel) -> bytes:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await ask(channel)
            except CallFailed:
                await asyncio.sleep(0.01)  # nothing tells when it may be tried again


async def test_who_waits_for_a_connection_hears_why_there_is_none() -> None:
    async with a_member() as member, a_channel(member) as channel:
        member.greets = False
        asked = [asyncio.create_task(refused(channel)) for _ in range(3)]
        unwanted = asyncio.create_task(ask(channel, timeout=0.01))
        await asyncio.wait_for(member.came.wait(), PATIENCE)
        with pytest.raises(CallFailed, match="in time"):
            await unwanted
        (talk,) = member.talks
        assert talk.transport is not None
        talk.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        for each in asked:
            failed = await each
            assert "does not begin with its settings" in str(failed)
            assert failed.code is Code.UNAVAILABLE
        member.greets = True
        assert await eventually(channel) == b"yes"


async def test_a_member_that_only_says_good_bye_is_no_connection() -> None:
    async with a_member() as member, a_channel(member) as channel:
        member.greets = False
        asked = asyncio.create_task(refused(channel))
        await asyncio.wait_for(member.came.wait(), PATIENCE)
        (talk,) = member.talks
        member.deaf = True
        talk.theirs.initiate_connection()
        talk.theirs.close_connection()
        talk.flush()
        assert "leaving" in str(await asked)


async def test_a_member_that_accepts_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "_CONNECTING", 0.05)
    async with a_member() as member, a_channel(member) as channel:
        member.greets = False
        assert "no answer" in str(await refused(channel))


async def test_closing_ends_what_is_under_way_connected_or_not() -> None:
    async with a_member() as member:
        async with a_channel(member) as channel:
            member.answers = lambda *_: None
            asked = asyncio.create_task(refused(channel))
            await asyncio.wait_for(member.came.wait(), PATIENCE)
            await member.talks[0].until(h2.events.StreamEnded)
        assert "closed" in str(await asked)
        async with a_channel(member) as channel:
            asked = asyncio.create_task(refused(channel))
            await asyncio.sleep(0)
        assert "closed" in str(await asked)


async def test_closing_does_not_wait_for_a_member_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc, "_CLOSING", 0.05)
    async with a_member() as member:
        member.settings = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30}
        async with a_channel(member) as channel:
            assert await ask(channel) == b"yes"
            (talk,) = member.talks
            talk.theirs.increment_flow_control_window(1 << 30)
            talk.flush()
            call = channel.converse("/a/Talk")
            await talk.until(h2.events.RequestReceived, 2)
            assert talk.transport is not None
            talk.transport.pause_reading()
            call.write(bytes(32 << 20))  # more than fits in between
        with pytest.raises(CallFailed, match="closed"):
            await call.read()


# Whether it is alive


async def test_a_silent_member_is_asked_for_a_sign_of_life_and_left_if_it_gives_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc, "_SILENCE", 0.02)
    monkeypatch.setattr(grpc, "_SIGN_OF_LIFE", 1.0)
    async with both() as (member, channel):
        member.answers = lambda *_: None
        asked = asyncio.create_task(refused(channel))
        await asyncio.wait_for(member.came.wait(), PATIENCE)
        (talk,) = member.talks
        await talk.until(h2.events.PingReceived, 3)
        assert not asked.done()
        member.deaf = True
        assert "no sign of life" in str(await asked)
        await talk.until_closed()


async def test_a_member_that_asks_for_a_sign_of_life_gets_it_soon() -> None:
    async with both() as (member, channel):
        assert await ask(channel) == b"yes"
        (talk,) = member.talks
        for number in range(3):
            talk.theirs.ping(b"%08d" % number)
            talk.flush()
        for number in range(3):
            answer = await talk.until(h2.events.PingAckReceived, number + 1)
            assert answer.ping_data == b"%08d" % number  # type: ignore[attr-defined]
        talk.theirs.ping(b"answered")  # or not, if it is closed before
        talk.flush()
        assert await ask(channel) == b"yes"


async def test_nobody_is_asked_for_signs_of_life_when_there_is_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc, "_SILENCE", 0.005)
    async with both() as (member, channel):

        async def asked_so_often(number: int) -> int:
            """When the member has read all that was said until now."""
            talk.theirs.ping(b"%08d" % number)
            talk.flush()
            await talk.until(h2.events.PingAckReceived, number)
            return sum(isinstance(each, h2.events.PingReceived) for each in talk.heard)

        assert await ask(channel) == b"yes"  # during which it may be, on a slow machine
        (talk,) = member.talks
        before = await asked_so_often(1)
        await asyncio.sleep(0.05)
        assert await asked_so_often(2) == before


# Encryption


def secrets_for(authority: Authority, *protocols: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a member that is called ``member``, and of who asks it."""
    pair = authority.signs("member")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.cert, pair.key)
    server.set_alpn_protocols(list(protocols))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(authority.cert)
    client.set_alpn_protocols(["h2"])
    return server, client


async def test_a_member_is_called_what_its_certificate_says(tmp_path: Path) -> None:
    server, client = secrets_for(Authority(tmp_path), "h2")
    async with (
        a_member(secrets=server) as member,
        a_channel(member, client, "localhost") as channel,
    ):
        assert await ask(channel) == b"yes"
        (talk,) = member.talks
        request = await talk.until(h2.events.RequestReceived)
        headers = dict(request.headers)  # type: ignore[attr-defined]
        assert (headers[b":authority"], headers[b":scheme"]) == (b"localhost", b"https")


async def test_a_member_that_speaks_no_http2_says_so_by_its_certificate(tmp_path: Path) -> None:
    server, client = secrets_for(Authority(tmp_path), "http/1.1")
    async with (
        a_member(secrets=server) as member,
        a_channel(member, client, "localhost") as channel,
    ):
        assert "does not support HTTP/2" in str(await refused(channel))
