"""What HTTP/2 is made of: frames, settings, and the codes of errors."""

from __future__ import annotations

import struct
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
