"""A client that says exactly what it is told to say, and remembers what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from msgspec import Struct

from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.limits import Limits
from tenure.server.listener import Greeting
from tenure.server.native import NativeListener
from tenure.server.native.connection import NativeServerConnection
from tenure.wire.frames import FrameReader, FrameWriter
from tenure.wire.messages import (
    VERSION,
    Attach,
    Attached,
    Failed,
    Hello,
    Welcome,
    server_message,
)

PATIENCE = 60.0
"""Seconds after which what a test waits for is taken to be lost."""

M = TypeVar("M", bound=Struct)

_MOST = 64 * 1024 * 1024


class Raw(asyncio.Protocol):
    """A connection: bytes out, messages in.

    Attributes:
        heard: all messages, in order.
        lost: whether the server has closed it.
    """

    def __init__(self) -> None:
        self.heard: list[Struct] = []
        self.lost = False
        self.transport: asyncio.Transport | None = None
        self._reader = FrameReader(_MOST)
        self._decode = server_message().decode
        self._news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.heard += [self._decode(frame) for frame in self._reader.feed(data)]
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._news.set()

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return as soon as the condition is true of what was heard."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(
                f"never came: {what}; heard {str(self.heard[-5:])[-500:]}"
            ) from None

    async def until_lost(self) -> None:
        await self.until(lambda: self.lost, "the end of the connection")

    def close(self) -> None:
        assert self.transport is not None
        self.transport.abort()


class Caller(Raw):
    """A client that has been greeted, or may be."""

    def __init__(self, program: bytes | None = None) -> None:
        super().__init__()
        self.program = os.urandom(16) if program is None else program
        self._writer = FrameWriter(_MOST)
        self._read = 0
        self.rid = 0

    async def dial(self, host: str, port: int, **more: Any) -> None:
        """Connect, as this caller; `more` is what asyncio takes."""
        await asyncio.get_running_loop().create_connection(lambda: self, host, port, **more)

    def say(self, *messages: Struct) -> None:
        """Send messages, in one write."""
        for message in messages:
            self._writer.add(message)
        self.write(bytes(self._writer.take()))

    async def listen(self) -> Struct:
        """The next message."""
        await self.until(lambda: bool(self.unread) or self.lost, "another message")
        assert self.unread, f"the connection was lost; heard {str(self.heard[-5:])[-500:]}"
        self._read += 1
        return self.heard[self._read - 1]

    def pass_over(self) -> None:
        """What has been heard until now is not listened to."""
        self._read = len(self.heard)

    async def hear(self, kind: type[M], *, skip: bool = False) -> M:
        """The next message, which is of that kind; with `skip`, the next of that kind."""
        while True:
            message = await self.listen()
            if isinstance(message, kind):
                return message
            assert skip, f"a {kind.__name__} was expected, not {str(message)[:300]}"

    @property
    def unread(self) -> list[Struct]:
        return self.heard[self._read :]

    async def greet(self, token: str = "") -> Welcome:
        self.say(Hello(VERSION, VERSION, [], token, self.program))
        return await self.hear(Welcome)

    def next_rid(self) -> int:
        self.rid += 1
        return self.rid

    async def attach(self, channel: int = 1, kind: str = "new", **more: Any) -> Attached:
        """Attach a session; raises `AssertionError` with what it failed with."""
        more = {"node": "/default", "window": 10.0, "key": b"key", **more}
        self.say(Attach(self.next_rid(), channel, kind, **more))  # type: ignore[arg-type]
        await self.until(
            lambda: self.lost or any(isinstance(each, Attached | Failed) for each in self.unread),
            "the answer to Attach",
        )
        return await self.hear(Attached)


@asynccontextmanager
async def serving(
    store: str = "memory://",
    *,
    limits: Limits | None = None,
    authenticator: Authenticator | None = None,
    clock: Clock | None = None,
    url: str = "tenure://127.0.0.1:0",
    engine: Engine | None = None,
    **more: Any,
) -> AsyncIterator[NativeListener]:
    """A listener on a store of its own, or on an engine that is open."""
    mine = engine is None
    if engine is None:
        engine = connect_engine(store, clock or SystemClock())
        await engine.open()
    context = Context(
        engine,
        limits or Limits(),
        Authenticator() if authenticator is None else authenticator,
        logging.getLogger("tenure.server"),
    )
    if engine.clock.virtual:  # nobody looks a name up then, and nobody connects
        more["sockets"] = [socket.create_server(("127.0.0.1", 0))]
    listener = NativeListener(context, url, **more)
    try:
        await listener.open()
        yield listener
    finally:
        await listener.aclose()
        if mine:
            await engine.aclose()


def port_of(listener: NativeListener) -> int:
    """Where it listens."""
    port = urlsplit(listener.address).port
    assert port
    return port


@asynccontextmanager
async def called(
    listener: NativeListener, program: bytes | None = None, *, greet: bool = True
) -> AsyncIterator[Caller]:
    """A connection to it, greeted."""
    caller = Caller(program)
    await caller.dial("127.0.0.1", port_of(listener))
    try:
        if greet:
            await caller.greet()
        yield caller
    finally:
        with contextlib.suppress(AssertionError):
            caller.close()
        await caller.until_lost()


class _InMemory(asyncio.Transport):
    """What the server writes to: everything reaches the caller, unless it does not read."""

    def __init__(self, caller: Direct) -> None:
        super().__init__()
        self.caller = caller
        self.kept = bytearray()
        self.reading = True
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.caller.gone, "written to a connection that is lost"
        if self.caller.reads:
            self.caller.loop.call_soon(self.caller.arrive, bytes(data))
        else:
            self.kept += data
            self.caller.connection.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It keeps nothing that can be sent."""

    def pause_reading(self) -> None:
        assert self.reading, "paused twice"
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading, "resumed twice"
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.kept:
            self.abort()
        self.closed = True

    def abort(self) -> None:
        if not self.closed or self.kept:
            self.closed = True
            self.kept.clear()
            self.caller.loop.call_soon(self.caller.lose)


class Direct(Caller):
    """A client without a network: it speaks to the server's connection itself, in virtual time.

    Attributes:
        reads: whether it reads what the server writes.
        half_open: nothing of what the server says arrives, and nobody is told so.
    """

    def __init__(self, listener: NativeListener, program: bytes | None = None) -> None:
        super().__init__(program)
        self.loop = asyncio.get_running_loop()
        self.reads = True
        self.half_open = False
        self.gone = False
        self.connection = NativeServerConnection(listener, Greeting(listener.context, "memory"))
        self.way = _InMemory(self)
        self.connection.connection_made(self.way)

    def write(self, data: bytes) -> None:
        assert not self.half_open
        self.connection.data_received(data)

    def arrive(self, data: bytes) -> None:
        if not self.half_open and not self.gone:
            self.data_received(data)

    def is_read(self) -> bool:
        """Whether the server reads from it."""
        return self.way.reading

    def read_again(self) -> None:
        """Read what has been written, and whatever will be."""
        self.reads = True
        kept, self.way.kept = bytes(self.way.kept), bytearray()
        self.data_received(kept)
        self.connection.resume_writing()

    def lose(self) -> None:
        """Both ends learn that the connection is lost."""
        if not self.gone:
            self.gone = True
            self.connection.connection_lost(None)
            self.connection_lost(None)

    def close(self) -> None:
        self.lose()


@asynccontextmanager
async def linked(listener: NativeListener, program: bytes | None = None) -> AsyncIterator[Direct]:
    """Such a client, greeted."""
    direct = Direct(listener, program)
    try:
        await direct.greet()
        yield direct
    finally:
        direct.lose()
