"""What HTTP/2 is made of: frames, the codes of errors, and the header block of a request.

Nothing is put into a table (RFC 7541), so that a block means the same on every connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

__all__ = [
    "ACK",
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "FRAME",
    "GOAWAY",
    "HEADERS",
    "NUMBER",
    "PADDED",
    "PING",
    "PRIORITY",
    "RST_STREAM",
    "SETTING",
    "SETTINGS",
    "WINDOW_UPDATE",
    "Setting",
    "Trouble",
    "Violation",
    "called",
    "frame",
    "head",
    "number_in",
    "without_padding",
]

DATA, HEADERS, _, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM = ACK = 0x01
END_HEADERS, PADDED, PRIORITY = 0x04, 0x08, 0x20

FRAME = struct.Struct(">HBBBL")
SETTING = struct.Struct(">HL")
NUMBER = struct.Struct(">L")


class Setting(IntEnum):
    """What a peer says of itself."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Trouble(IntEnum):
    """Why a stream or a connection ends, as RFC 9113 (section 7) has it."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def called(code: int) -> str:
    """The name of a code."""
    return next((each.name for each in Trouble if each == code), f"error {code}")


class Violation(Exception):
    """The peer has said what it must not; the connection ends."""

    def __init__(self, code: Trouble, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """One frame, on a stream, or on all of them (0)."""
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


# Header blocks

_KNOWN = {":authority": 1, ":path": 4, "content-type": 31, "user-agent": 58}
_NO_TABLE, _POST, _HTTP, _HTTPS = b"\x20", b"\x83", b"\x86", b"\x87"
_NEVER_INDEXED = 0x10


def head(path: str, authority: str, *, secure: bool, more: Iterable[tuple[str, str]]) -> bytes:
    """The header block of a POST: the same on every connection, and in no table on the way.

    Args:
        more: further headers, their names in lower case.
    """
    block = _NO_TABLE + _POST + (_HTTPS if secure else _HTTP)
    for name, value in ((":path", path), (":authority", authority), *more):
        known = _KNOWN.get(name, 0)
        block += _integer(known, 4, _NEVER_INDEXED)
        block += _text(value) if known else _text(name) + _text(value)
    return block


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _integer(len(encoded), 7) + encoded


def _integer(number: int, bits: int, prefix: int = 0) -> bytes:
    most = (1 << bits) - 1
    if number < most:
        return bytes((prefix | number,))
    out, number = bytearray((prefix | most,)), number - most
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number_in(payload: bytes, what: str) -> int:
    """The one number that a frame says."""
    if len(payload) != NUMBER.size:
        raise Violation(Trouble.FRAME_SIZE_ERROR, f"{what} has a wrong size")
    number: int = NUMBER.unpack(payload)[0]
    return number


def without_padding(payload: bytes) -> bytes:
    """What a frame says that is padded."""
    if not payload or payload[0] >= len(payload):
        raise Violation(Trouble.PROTOCOL_ERROR, "there is more padding than there is room")
    return payload[1 : len(payload) - payload[0]]
