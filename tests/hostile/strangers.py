"""Many connections of one machine that never authenticate, in the clear and over TLS."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import selectors
import socket
import ssl
from typing import Any

from tenure.wire.frames import FrameWriter
from tenure.wire.messages import VERSION, Hello, Ping
from tests.hostile.connecting import client_hello
from tests.hostile.http2 import BEGIN, call_block
from tests.hostile.target import Listener, Target, h2_frame

_MOST = 1 << 20  # bytes on each connection
_PIECE = 16 * 1024  # bytes of one write
_TOKEN = "a-token-that-is-not-valid"
_UPDATES = 256  # of keys, in one write
_SESSION = "/Ydb.Coordination.V1.CoordinationService/Session"


def _native() -> tuple[bytes, bytes]:
    writer = FrameWriter(1 << 20)
    writer.add(Hello(VERSION, VERSION, [], _TOKEN, b"attacker"))
    hello = bytes(writer.take())
    writer.add(Ping())
    return hello, bytes(writer.take())


def _ydb() -> tuple[bytes, bytes]:
    block = call_block(_SESSION, ("x-ydb-auth-ticket", _TOKEN))
    return BEGIN + h2_frame(1, 4, 1, block), h2_frame(0, 0, 1, b"x")


_INPUT: dict[Listener, tuple[bytes, bytes]] = {
    "tenure": _native(),
    "ydb": _ydb(),
    "dflockd": (b"", b"auth\n_\n%s\n" % _TOKEN.encode()),
    "http": (b"", b"GET /metrics HTTP/1.1\r\nauthorization: Bearer %s\r\n\r\n" % _TOKEN.encode()),
}


class _Stranger:
    """One connection at a time, opened again when closed, with a megabyte of small input."""

    piece = _PIECE

    def __init__(
        self, target: Target, listener: Listener, selector: selectors.BaseSelector
    ) -> None:
        self._address = ("127.0.0.1", target.port(listener))
        opening, unit = _INPUT[listener]
        self._input = memoryview(opening + unit * (_MOST // len(unit)))
        self._selector = selector
        self._sock: socket.socket | None = None
        self._at = 0
        self._out = memoryview(b"")

    def open(self) -> None:
        self.close()
        self._at = 0
        self._out = memoryview(b"")
        self.begin()
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._address)
        self._sock = sock
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def begin(self) -> None:
        """Prepare the next connection."""

    def more(self) -> bytes | memoryview:
        """Return what to send next; nothing after the last of it."""
        piece = self._input[self._at : self._at + _PIECE]
        self._at += len(piece)
        return piece

    def received(self, data: bytes) -> None:
        """Forget what the server sends."""

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def go_on(self, ready: int) -> None:
        """Send more. Raises `OSError` when it was cut off."""
        assert self._sock is not None
        with contextlib.suppress(BlockingIOError):
            if ready & selectors.EVENT_READ:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("the server has closed the connection")
                self.received(data)
            if not self._out:
                self._out = memoryview(self.more())
            if self._out:
                self._out = self._out[self._sock.send(self._out[: self.piece]) :]
        sends = selectors.EVENT_WRITE if self._out or self._at < len(self._input) else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | sends, self)


class _Slow(_Stranger):
    """Sends one byte in each packet."""

    piece = 1


_HELLO = client_hello()


@functools.cache
def _trusting(authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    return context


class _Unfinished(_Stranger):
    """Begins a handshake, and leaves when the server has answered."""

    tail = b""

    def begin(self) -> None:
        self._input = memoryview(_HELLO + self.tail)

    def received(self, data: bytes) -> None:
        raise ConnectionResetError("the server has paid for its half")


class _SlowHello(_Unfinished):
    """Begins a handshake, one byte in each packet."""

    piece = 1


class _Garbage(_Unfinished):
    """Begins a handshake, and continues it with noise."""

    tail = b"\x16\x03\x03\x40\x00" + random.Random(1).randbytes(16384)

    def received(self, data: bytes) -> None:
        """Wait until the server has closed it."""


class _Secured(_Stranger):
    """Completes the handshake, and sends a megabyte of small input."""

    def __init__(
        self, target: Target, listener: Listener, selector: selectors.BaseSelector
    ) -> None:
        super().__init__(target, listener, selector)
        self._context = _trusting(target.ca)

    def begin(self) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = self._context.wrap_bio(
            self._incoming, self._outgoing, server_hostname="localhost"
        )
        self._done = False
        self._shake()

    def received(self, data: bytes) -> None:
        if not self._done:
            self._incoming.write(data)
            self._shake()

    def _shake(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._done = True

    def more(self) -> bytes | memoryview:
        if self._done:
            self.encrypt()
        return self._outgoing.read()

    def encrypt(self) -> None:
        piece = super().more()
        if piece:
            self._tls.write(piece)


class _SlowSecured(_Secured):
    """Does so with one byte in each packet, the handshake included."""

    piece = 1


def change_keys(client: Any, count: int) -> None:
    """Change the keys of a client's connection (TLS 1.3), which `ssl` has no call for."""
    library = ctypes.CDLL(ssl._ssl.__file__)  # type: ignore[attr-defined]
    address = id(client._sslobj) + 3 * ctypes.sizeof(ctypes.c_void_p)
    connection = ctypes.c_void_p.from_address(address)  # the library's own object
    for _ in range(count):
        assert library.SSL_key_update(connection, 0) == 1
        assert library.SSL_do_handshake(connection) == 1


class _KeyUpdates(_Secured):
    """Completes the handshake, and changes its keys (TLS 1.3) without end."""

    def encrypt(self) -> None:
        change_keys(self._tls, _UPDATES)


KINDS: dict[str, type[_Stranger]] = {
    "": _Stranger,
    "-slow": _Slow,
    "-tls-input": _Secured,
    "-tls-slow-input": _SlowSecured,
    "-tls-key-updates": _KeyUpdates,
    "-tls-unfinished": _Unfinished,
    "-tls-slow": _SlowHello,
    "-tls-garbage": _Garbage,
}
"""What strangers do at a listener, with TLS or without."""


def strangers(target: Target, listener: Listener, count: int, kind: str) -> None:
    """Keep so many connections at one listener, none of which shows a token that is valid."""
    what = KINDS[kind]
    with selectors.DefaultSelector() as selector:
        everyone = [what(target, listener, selector) for _ in range(count)]
        try:
            for each in everyone:
                each.open()
            while not target.stopped.is_set():
                for key, ready in selector.select(0.1):
                    try:
                        key.data.go_on(ready)
                    except OSError:
                        key.data.open()
        finally:
            for each in everyone:
                each.close()
