"""Frames and header blocks of HTTP/2, for a client.

Neither side uses HPACK's dynamic table (RFC 7541), which our first settings forbid. So a block has
the same bytes on every connection, and is encoded and decoded only once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeAlias

from hpack import Decoder, Encoder, NeverIndexedHeaderTuple
from hpack.exceptions import HPACKError

# Frame types, and their flags
DATA, HEADERS, _, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM = ACK = 0x01
END_HEADERS, PADDED, PRIORITY = 0x04, 0x08, 0x20

FIRST_WINDOW = (1 << 16) - 1
"""Initial flow control window, of a stream and of the connection."""
ROOM, ROOM_FOR_ALL = 1 << 24, 1 << 28
"""Bytes that the peer may send before its window is extended: on a stream, on all of them."""

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


def name_of(code: int) -> str:
    """Return the name of an error code."""
    return next((each.name for each in Trouble if each == code), f"error {code}")


class Violation(Exception):
    """Error: the peer has violated the protocol; the connection ends."""

    def __init__(self, code: Trouble, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """Encode a frame of a stream, or of the connection (0)."""
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


def number_in(payload: bytes, what: str) -> int:
    """Return the number that makes up a payload."""
    if len(payload) != NUMBER.size:
        raise Violation(Trouble.FRAME_SIZE_ERROR, f"{what} has a wrong size")
    number: int = NUMBER.unpack(payload)[0]
    return number


def content(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority."""
    if flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise Violation(Trouble.PROTOCOL_ERROR, "the padding is longer than its frame")
        payload = payload[1 : len(payload) - payload[0]]
    if flags & PRIORITY:
        if len(payload) < 5:
            raise Violation(Trouble.FRAME_SIZE_ERROR, "headers are too short")
        payload = payload[5:]
    return payload


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
"""Headers by name; of repeated ones, the last."""

LARGEST_BLOCK = 1 << 18
_MOST_KNOWN = 256


def head(path: str, authority: str, *, secure: bool, more: Iterable[tuple[str, str]]) -> bytes:
    """Return the header block of a POST.

    Args:
        path: the method's path.
        authority: the server's name.
        secure: whether the connection is encrypted.
        more: further headers, with names in lower case.
    """
    encoder = Encoder()
    encoder.header_table_size = 0
    indexed = [(":method", "POST"), (":scheme", "https" if secure else "http")]
    literal = ((":path", path), (":authority", authority), *more)
    return encoder.encode(
        [*indexed, *(NeverIndexedHeaderTuple(name, value) for name, value in literal)],
        huffman=False,
    )


class HeaderDecoder:
    """Decoder of the header blocks of one connection.

    Attributes:
        known: the headers of decoded blocks.
    """

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self.known: dict[bytes, Fields] = {}

    def decode(self, block: bytes) -> Fields:
        """Return the headers of a block."""
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError) as error:
            why = f"a header block cannot be decoded ({error})"
            raise Violation(Trouble.COMPRESSION_ERROR, why) from error
        if len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        fields = self.known[block] = {bytes(name): bytes(value) for name, value in headers}
        return fields
