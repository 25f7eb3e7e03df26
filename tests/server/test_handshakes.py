"""TLS handshakes that come in pieces: the server starts one when its first message is complete."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tenure.server.limits import Limits
from tenure.server.tls import SlicedTls, TlsFiles, server_context
from tenure.wire.frames import FrameReader, FrameWriter
from tenure.wire.messages import GREETING_BYTES, Hello, Welcome, server_message
from tests.hostile.connecting import client_hello
from tests.server.certificates import Authority
from tests.server.talking import port_of, serving

URL = "tenures://127.0.0.1:0"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Counted(SlicedTls):
    """Counts the handshakes that the server has begun to calculate."""

    begun = 0

    @classmethod
    def _create(cls, *args: Any, **more: Any) -> Counted:
        cls.begun += 1
        made = super()._create(*args, **more)
        assert isinstance(made, Counted)
        return made


def server_tls(authority: Authority) -> ssl.SSLContext:
    pair = authority.signs("server")
    return server_context(TlsFiles(pair.cert, pair.key))


async def test_a_handshake_is_calculated_once_its_first_message_is_whole(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "begun", 0)
    context = server_tls(authority)
    context.sslobject_class = Counted
    hello = client_hello()
    async with asyncio.timeout(30), serving(url=URL, tls=context) as listener:
        reader, slow = await asyncio.open_connection("127.0.0.1", port_of(listener))
        for each in hello[:-1]:
            slow.write(bytes([each]))
            await asyncio.sleep(0)
        other, whole = await asyncio.open_connection("127.0.0.1", port_of(listener))
        whole.write(hello)
        await other.readexactly(5)  # the answer: so all that came before has been seen
        assert Counted.begun == 1
        slow.write(hello[-1:])
        await reader.readexactly(5)
        assert Counted.begun == 2
        for writer in (slow, whole):
            writer.close()


class Client:
    """TLS over a plain connection, whose bytes go out as a test wants."""

    def __init__(
        self, context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_hostname="localhost")

    async def greets(self, send: Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]) -> bytes:
        """Make the handshake, say hello, and return the server's first message."""
        await self._exchange(self._tls.do_handshake, send)
        frames = FrameWriter(GREETING_BYTES)
        frames.add(Hello(1, 1, [], "", b"program"))
        hello = bytes(frames.take())
        await self._exchange(lambda: self._tls.write(hello), send)
        answers, found = FrameReader(65_536), list[bytes]()
        while not found:
            received = await self._exchange(lambda: self._tls.read(4096), send)
            found = [bytes(each) for each in answers.feed(received)]
        return found[0]

    async def _exchange(
        self,
        step: Callable[[], Any],
        send: Callable[[asyncio.StreamWriter, bytes], Awaitable[None]],
    ) -> Any:
        while True:
            result = None
            with contextlib.suppress(ssl.SSLWantReadError):
                result = step() or True
            if self._sent.pending:
                await send(self._writer, self._sent.read())
            if result is not None:
                return result
            self._received.write(await self._reader.read(4096))


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def context(request: pytest.FixtureRequest, authority: Authority) -> ssl.SSLContext:
    """The client's context, of each version."""
    context = ssl.create_default_context(cafile=authority.cert)
    context.minimum_version = context.maximum_version = request.param
    return context


async def test_a_client_that_sends_single_bytes_comes_in(
    context: ssl.SSLContext, authority: Authority
) -> None:
    async def send(writer: asyncio.StreamWriter, sent: bytes) -> None:
        for each in sent:
            writer.write(bytes([each]))
            await asyncio.sleep(0)

    limits = Limits(greeting_time=60.0)  # each byte is read in its turn
    async with serving(url=URL, tls=server_tls(authority), limits=limits) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        answer = await Client(context, reader, writer).greets(send)
        assert isinstance(server_message().decode(answer), Welcome)
        writer.close()


@pytest.mark.parametrize("last", [1, 4, 5, 6, 21, 22, 31])
async def test_a_client_whose_messages_end_with_a_short_segment_comes_in(
    context: ssl.SSLContext, authority: Authority, last: int
) -> None:
    async with (
        asyncio.timeout(30),
        serving(url=URL, tls=server_tls(authority), limits=Limits(greeting_time=60.0)) as listener,
    ):

        async def send(writer: asyncio.StreamWriter, sent: bytes) -> None:
            writer.write(sent[:-last])
            other_reader, other = await asyncio.open_connection("127.0.0.1", port_of(listener))
            other.write(client_hello())
            await other_reader.readexactly(5)  # the answer: all that came before has been seen
            other.close()
            writer.write(sent[-last:])

        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        answer = await Client(context, reader, writer).greets(send)
        assert isinstance(server_message().decode(answer), Welcome)
        writer.close()


async def test_what_is_no_handshake_ends_without_one(authority: Authority) -> None:
    async with asyncio.timeout(30), serving(url=URL, tls=server_tls(authority)) as listener:
        for sent in (b"", b"\x16", b"\x16\x03\x01", b"\x16\x03\x01\xff\xff" + bytes(100)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
            writer.write(sent)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert listener.context.counts.greetings.taken == 0
