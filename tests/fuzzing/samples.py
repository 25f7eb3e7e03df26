"""Well-formed inputs to begin with."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hpack import Encoder
from msgspec import Struct

from tenure.engines.etcd.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    NUMBER,
    PING,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from tenure.engines.etcd.wire import integer, octets
from tenure.wire.frames import FrameWriter
from tenure.wire.messages import ClientMessage, ServerMessage

# The native protocol: one of each message


def framed(*messages: Struct) -> bytes:
    """The bytes of messages, one after the other."""
    writer = FrameWriter(1 << 20)
    for message in messages:
        writer.add(message)
    return bytes(writer.take())


def _sample(hint: Any) -> Any:
    """A plain value of a type."""
    if hasattr(hint, "__metadata__"):  # Annotated
        return _sample(hint.__origin__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin is Union or isinstance(hint, UnionType):
        return _sample(next(each for each in arguments if each is not type(None)))
    if origin is tuple and Ellipsis not in arguments:
        return tuple(map(_sample, arguments))
    if origin is not None:
        return origin(map(_sample, arguments[:1]))
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints = get_type_hints(hint, include_extras=True)
        return hint(**{name: _sample(hints[name]) for name in hint.__struct_fields__})
    return {int: 7, float: 1.5, str: "/default", bytes: b"key", bool: True}[hint]


CLIENT_MESSAGES = tuple(framed(_sample(kind)) for kind in get_args(ClientMessage))
SERVER_MESSAGES = tuple(framed(_sample(kind)) for kind in get_args(ServerMessage))


# etcd: what its server says

_KEY_VALUE = b"".join(
    (octets(1, b"tenure/key"), *(integer(field, 300) for field in (2, 3, 4, 6)), octets(5, b"v"))
)
_HEADER = octets(1, integer(1, 2**63) + integer(3, 1234))
_RANGE = _HEADER + octets(2, _KEY_VALUE) + octets(2, _KEY_VALUE) + integer(4, 2)

ETCD_ANSWERS = (
    _RANGE,
    _HEADER + integer(2, 1) + octets(3, octets(1, _RANGE)) + octets(3, octets(2, _HEADER)),
    _HEADER + integer(2, 77) + integer(3, 30) + octets(4, b"no such lease"),
    _HEADER + integer(2, 5) + octets(11, integer(1, 1) + octets(2, _KEY_VALUE)),
)


def _http2() -> tuple[bytes, ...]:
    encoder = Encoder()
    encoder.header_table_size = 0
    head = encoder.encode([(":status", "200"), ("content-type", "application/grpc")], huffman=False)
    end = encoder.encode([("grpc-status", "0"), ("grpc-message", "well")], huffman=True)
    answer = b"\0" + len(_RANGE).to_bytes(4, "big") + _RANGE
    settings = frame(SETTINGS, 0, 0, SETTING.pack(3, 100) + SETTING.pack(4, 65535))
    begun = settings + frame(SETTINGS, 1, 0, b"") + frame(HEADERS, END_HEADERS, 1, head)
    ended = frame(HEADERS, END_HEADERS | END_STREAM, 1, end)
    return (
        begun + frame(DATA, 0, 1, answer) + ended,
        settings + frame(PING, 0, 0, bytes(8)) + frame(RST_STREAM, 0, 3, NUMBER.pack(7)),
        begun + frame(WINDOW_UPDATE, 0, 0, NUMBER.pack(1 << 20)) + ended,
        settings + frame(GOAWAY, 0, 0, NUMBER.pack(1) + NUMBER.pack(0) + b"bye"),
        settings + frame(HEADERS, 0, 1, head[:4]) + frame(9, END_HEADERS, 1, head[4:]),
    )


HTTP2_ANSWERS = _http2()
