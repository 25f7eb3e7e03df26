"""Attacks by reads: requests of a few bytes, whose answers cost the server much.

Each connection first makes the store large, and then reads the answers as fast as it can: a client
that does not read is not answered either.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

from hpack import Encoder

from tenure.server.ydb.messages import Request
from tenure.wire.frames import FrameWriter
from tenure.wire.messages import (
    VERSION,
    Attach,
    Describe,
    DescribeSemaphore,
    Enqueue,
    Hello,
    ListNodes,
    ListSemaphores,
    ListSessions,
)
from tests.hostile.target import H2_PREFACE, Listener, Target, h2_frame

_SESSIONS = 500  # of each connection
_REQUESTS = 500
_ALL = 2**64 - 1
_PIECE = 256  # requests of one write
_PAUSE = 0.01  # seconds between two connections of one thread


def lists(target: Target) -> None:
    """List thousands of sessions, semaphores and requests."""
    attach = (
        Attach(each, each, "new", "/default", 600.0, "x" * 900, b"key")
        for each in range(1, _SESSIONS + 1)
    )
    enqueue = (
        Enqueue(1000 + each, 1, each, "queue", _ALL, b"", None, True)
        for each in range(1, _REQUESTS + 1)
    )
    ask = (
        ListSessions(1, "/default"),
        ListSemaphores(1, "/default", True, True),
        Describe(1, "/default", "queue", True, True),
        ListNodes(1),
        DescribeSemaphore(1, 1, "queue", True, True),
    )
    _converse(target, "tenure", _native(_HELLO, *attach, *enqueue), _again(_native(*ask * 50)))


def resumes(target: Target) -> None:
    """Try to resume sessions that are not there, or are somebody else's."""
    attach = (
        Attach(each, each, "new", "/default", 600.0, "", b"key") for each in range(1, _SESSIONS + 1)
    )

    def guesses() -> Iterator[bytes]:
        for first in itertools.count(1000, _PIECE):
            yield _native(
                *(
                    Attach(
                        each, each, "resume", "/default", 9.0, "", b"guess", False, each % 20_000
                    )
                    for each in range(first, first + _PIECE)
                )
            )

    _converse(target, "tenure", _native(_HELLO, *attach), guesses())


def statistics(target: Target) -> None:
    """Ask for statistics of thousands of keys."""
    keys = b"".join(b"l\nkey%d\n0\n" % each for each in range(_REQUESTS))
    _converse(target, "dflockd", keys, _again(b"stats\n_\n_\n" * 1000))


def descriptions(target: Target) -> None:
    """Describe a semaphore with its long queue, over YDB's API."""
    _describe(target, lambda _: "queue")


def short_descriptions(target: Target) -> None:
    """Describe semaphores with one owner each, over YDB's API."""
    mine = threading.get_ident()
    _describe(target, lambda stream: f"{mine}-{stream}")


def _describe(target: Target, name: Callable[[int], str]) -> None:
    """Acquire the semaphore of each stream, and describe it as often as possible."""
    streams = range(1, 80, 2)
    start = Request.SessionStart(path="/local/default", timeout_millis=60_000)
    begin = Request(session_start=start)

    def acquire(stream: int) -> Request:
        acquire = Request.AcquireSemaphore(
            req_id=1, name=name(stream), count=_ALL, ephemeral=True, timeout_millis=_ALL
        )
        return Request(acquire_semaphore=acquire)

    def describe(stream: int) -> Request:
        describe = Request.DescribeSemaphore(
            req_id=2, name=name(stream), include_owners=True, include_waiters=True
        )
        return Request(describe_semaphore=describe)

    opening = b"".join(
        _open(each) + _say(each, begin) + _say(each, acquire(each)) for each in streams
    )
    asks = b"".join(_say(each, describe(each)) * 20 for each in streams)
    _converse(target, "ydb", _BEGIN + opening, _again(asks))


def attaches(target: Target) -> None:
    """Try to attach sessions that are not there, or are somebody else's, over YDB's API."""

    def guesses() -> Iterator[bytes]:
        for stream in itertools.count(1, 2):
            start = Request.SessionStart(
                path="/local/default", session_id=stream % 20_000 + 1, protection_key=b"guess"
            )
            yield _open(stream) + _say(stream, Request(session_start=start))

    _converse(target, "ydb", _BEGIN, guesses())


# Connections


def _converse(target: Target, listener: Listener, opening: bytes, units: Iterable[bytes]) -> None:
    """Send without end, and read as much as comes; when cut off, again."""
    endless = iter(units)
    while not target.stopped.is_set():
        with contextlib.suppress(OSError), target.connect(listener) as sock:
            sock.setblocking(False)
            rest = memoryview(opening)
            while not target.stopped.is_set():
                rest = rest or memoryview(next(endless))
                readable, writable, _ = select.select([sock], [sock], [], 0.2)
                if readable and not sock.recv(1 << 20):
                    break
                if writable:
                    rest = _send(sock, rest)
        target.stopped.wait(_PAUSE)


def _send(sock: socket.socket, rest: memoryview) -> memoryview:
    try:
        return rest[sock.send(rest) :]
    except BlockingIOError:
        return rest


def _again(unit: bytes) -> Iterator[bytes]:
    return itertools.repeat(unit)


_HELLO = Hello(VERSION, VERSION, [], "", b"a reader")


def _native(*messages: object) -> bytes:
    writer = FrameWriter(1 << 26)
    for each in messages:
        writer.add(each)  # type: ignore[arg-type]  # any message
    return bytes(writer.take())


_HUGE = 2**31 - 1
_BEGIN = (
    H2_PREFACE
    + h2_frame(4, 0, 0, struct.pack(">HI", 4, _HUGE))  # the window of each stream
    + h2_frame(8, 0, 0, struct.pack(">I", _HUGE - 65_535))  # and of all
)
_BLOCK = Encoder().encode(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/Ydb.Coordination.V1.CoordinationService/Session"),
        (":authority", "here"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
)


def _open(stream: int) -> bytes:
    return h2_frame(1, 4, stream, _BLOCK)


def _say(stream: int, request: Request) -> bytes:
    message = request.SerializeToString()
    return h2_frame(0, 0, stream, struct.pack(">BI", 0, len(message)) + message)
