"""Many connections of one machine that never authenticate, each with a megabyte of small input."""

from __future__ import annotations

import contextlib
import selectors
import socket

from hpack import Encoder

from tenure.wire.frames import FrameWriter
from tenure.wire.messages import VERSION, Hello, Ping
from tests.hostile.target import H2_PREFACE, Listener, Target, h2_frame

_MOST = 1 << 20  # bytes on each connection
_PIECE = 16 * 1024  # bytes of one write
_TOKEN = "a-token-that-is-not-valid"
_CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/Ydb.Coordination.V1.CoordinationService/Session"),
    (":authority", "here"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("x-ydb-auth-ticket", _TOKEN),
]


def _native() -> tuple[bytes, bytes]:
    writer = FrameWriter(1 << 20)
    writer.add(Hello(VERSION, VERSION, [], _TOKEN, b"attacker"))
    hello = bytes(writer.take())
    writer.add(Ping())
    return hello, bytes(writer.take())


def _ydb() -> tuple[bytes, bytes]:
    call = h2_frame(1, 4, 1, Encoder().encode(_CALL))
    return H2_PREFACE + h2_frame(4, 0, 0) + call, h2_frame(0, 0, 1, b"x")


_INPUT: dict[Listener, tuple[bytes, bytes]] = {
    "tenure": _native(),
    "ydb": _ydb(),
    "dflockd": (b"", b"auth\n_\n%s\n" % _TOKEN.encode()),
}


class _Stranger:
    """One connection at a time, opened again when it was closed."""

    def __init__(
        self, target: Target, listener: Listener, selector: selectors.BaseSelector
    ) -> None:
        self._address = ("127.0.0.1", target.port(listener))
        opening, unit = _INPUT[listener]
        self._input = memoryview(opening + unit * (_MOST // len(unit)))
        self._selector = selector
        self._sock: socket.socket | None = None
        self._at = 0

    def open(self) -> None:
        self.close()
        self._at = 0
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._address)
        self._sock = sock
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def go_on(self, ready: int) -> None:
        """Send more, and forget the answers. Raises `OSError` when it was cut off."""
        assert self._sock is not None
        with contextlib.suppress(BlockingIOError):
            if ready & selectors.EVENT_READ and not self._sock.recv(1 << 16):
                raise ConnectionResetError("the server has closed the connection")
            if ready & selectors.EVENT_WRITE:
                self._at += self._sock.send(self._input[self._at : self._at + _PIECE])
        if self._at == len(self._input):
            self._selector.modify(self._sock, selectors.EVENT_READ, self)


def strangers(target: Target, listener: Listener, count: int) -> None:
    """Keep so many connections at one listener, none of which shows a token that is valid."""
    with selectors.DefaultSelector() as selector:
        everyone = [_Stranger(target, listener, selector) for _ in range(count)]
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
