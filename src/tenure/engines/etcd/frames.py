"""Parts of HTTP/2 for the client's half: frames and header blocks.

Neither side puts anything into a table of headers (RFC 7541): the settings tell the peer so before
it can have sent anything. So the bytes of a block mean the same on every connection: a block that
is sent is made once, and one that arrives again is not decoded again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeAlias

from hpack import Decoder
from hpack.exceptions import HPACKError

__all__ = [
    "ACK",
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "FIRST_WINDOW",
    "FRAME",
    "GOAWAY",
    "GREETING",
    "HEADERS",
    "NUMBER",
    "PADDED",
    "PING",
    "PRIORITY",
    "ROOM",
    "ROOM_FOR_ALL",
    "RST_STREAM",
    "SETTING",
    "SETTINGS",
    "WINDOW_UPDATE",
    "Blocks",
    "Fields",
    "Heard",
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

FIRST_WINDOW = (1 << 16) - 1
"""Bytes that a peer may send at first, on a stream or on all of them."""
ROOM, ROOM_FOR_ALL = 1 << 24, 1 << 28
"""Bytes that the peer may send before its window is opened again: on a stream, on all of them."""

FRAME = struct.Struct(">HBBBL")
SETTING = struct.Struct(">HL")
NUMBER = struct.Struct(">L")


class Setting(IntEnum):
    """A setting of a peer."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Trouble(IntEnum):
    """Error codes of RFC 9113, section 7."""

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
        """Keep the error code and the reason."""
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """One frame, on a stream, or on all of them (0)."""
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


def number_in(payload: bytes, what: str) -> int:
    """The one number that a frame says."""
    if len(payload) != NUMBER.size:
        raise Violation(Trouble.FRAME_SIZE_ERROR, f"{what} has a wrong size")
    number: int = NUMBER.unpack(payload)[0]
    return number


def without_padding(payload: bytes) -> bytes:
    """Remove a frame's padding."""
    if not payload or payload[0] >= len(payload):
        raise Violation(Trouble.PROTOCOL_ERROR, "there is more padding than there is room")
    return payload[1 : len(payload) - payload[0]]


GREETING = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        frame(
            SETTINGS,
            0,
            0,
            SETTING.pack(Setting.HEADER_TABLE_SIZE, 0)
            + SETTING.pack(Setting.ENABLE_PUSH, 0)
            + SETTING.pack(Setting.INITIAL_WINDOW_SIZE, ROOM),
        ),
        frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(ROOM_FOR_ALL - FIRST_WINDOW)),
    )
)
"""The first bytes of a connection."""


# Header blocks

Fields: TypeAlias = Mapping[bytes, bytes]
"""Headers by their names; of one that comes twice, the last."""

Heard: TypeAlias = tuple[int, int, Fields]
"""Of a whole block: the flags of its first frame, its stream, and what it says."""

_LARGEST = 1 << 18
_MOST = 256
"""How many blocks are remembered, with what they say."""

_KNOWN = {":authority": 1, ":path": 4, "content-type": 31, "user-agent": 58}
_NO_TABLE, _POST, _HTTP, _HTTPS = b"\x20", b"\x83", b"\x86", b"\x87"
_NEVER_INDEXED = 0x10


def head(path: str, authority: str, *, secure: bool, more: Iterable[tuple[str, str]]) -> bytes:
    """Return the header block of a POST.

    Args:
        path: the method's path.
        authority: the server's name, as the call has it.
        secure: the connection is encrypted.
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


class Blocks:
    """Those that are heard on one connection.

    Attributes:
        known: what blocks say that have come before.
        unfinished: only its continuation may follow.
    """

    def __init__(self) -> None:
        """Start without known blocks and without a table."""
        self._decoder = Decoder()
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self.known: dict[bytes, Fields] = {}
        self._flags = self._number = 0
        self._so_far = bytearray()
        self.unfinished = False

    def begin(self, flags: int, number: int, payload: bytes) -> Heard | None:
        """HEADERS; ``None`` if the block goes on in another frame."""
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise Violation(Trouble.FRAME_SIZE_ERROR, "headers are too short")
            payload = payload[5:]
        if flags & END_HEADERS:
            return flags, number, self._understood(payload)
        self._flags, self._number, self._so_far = flags, number, bytearray(payload)
        self.unfinished = True
        return None

    def go_on(self, flags: int, number: int, payload: bytes) -> Heard | None:
        """CONTINUATION."""
        if not self.unfinished or self._number != number:
            raise Violation(Trouble.PROTOCOL_ERROR, "what is continued is no header block")
        self._so_far += payload
        if len(self._so_far) > _LARGEST:
            raise Violation(Trouble.ENHANCE_YOUR_CALM, "a header block is too large")
        if not flags & END_HEADERS:
            return None
        self.unfinished = False
        return self._flags, number, self._understood(bytes(self._so_far))

    def _understood(self, block: bytes) -> Fields:
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError) as error:
            why = f"a header block means nothing ({error})"
            raise Violation(Trouble.COMPRESSION_ERROR, why) from error
        fields = {bytes(name): bytes(value) for name, value in headers}
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[block] = fields
        return fields
