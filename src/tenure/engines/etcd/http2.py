"""Client side of HTTP/2 without I/O: frames, header blocks, streams that receive events.

It implements the part of RFC 9113 that gRPC needs. The owner of a connection passes received data
to `receive`, and writes the result of `take` soon after `schedule` was called.

Rules:

* A stream *waits* while the peer allows no more streams. Then it is *open* until the peer ends it
  or either side resets it. It receives its headers, its data and its end, in this order.
* Data is passed on immediately, and the peer's window is extended. Outgoing data waits in its
  stream until the peer's windows have room.
* A violation ends the connection.
* After GOAWAY, or when the stream numbers are used up, the connection is `draining`: no stream
  begins, and streams that the peer processes are finished.

**Header blocks.** Neither side uses HPACK's dynamic table (RFC 7541), which our first settings
forbid. So a block has the same bytes on every connection, and is encoded and decoded only once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
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


_FRAME_SIZE = 1 << 14  # every peer accepts it, and this client accepts no more
_LARGEST = (1 << 31) - 1  # of windows, and of the numbers of streams


class Http2Stream:
    """A stream, as the base of a call.

    Attributes:
        head: its header block.
        pending: outgoing data.
        ends: whether nothing follows the pending data.
        number: the stream's number; 0 while it waits.
        window: bytes that may still be sent.
        room: bytes that may still be received.
        connection: the connection of a stream that waits or is open.
    """

    __slots__ = ("connection", "ends", "head", "number", "pending", "room", "window")

    def __init__(self, head: bytes, pending: bytes = b"", *, ends: bool = False) -> None:
        self.head = head
        self.pending = pending
        self.ends = ends
        self.number = 0
        self.window = 0
        self.room = ROOM
        self.connection: Http2Connection | None = None

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Send more data, or the end, as soon as the peer has room for it."""
        self.pending += data
        self.ends |= ends
        if self.connection is not None:
            self.connection.push(self)

    def reset(self, code: Trouble) -> None:
        """End the stream. Safe to call twice."""
        if self.connection is not None:
            self.connection.reset(self, code)

    def received_headers(self, fields: Fields, ended: bool) -> None:
        """Process headers or trailers."""
        raise NotImplementedError

    def received_data(self, data: bytes, ended: bool) -> None:
        """Process a part of the body."""
        raise NotImplementedError

    def lost(self, why: str, *, again: bool) -> None:
        """End without an answer. `again`: the peer has certainly not processed it."""
        raise NotImplementedError


class Http2Connection:
    """Protocol state of one connection.

    Attributes:
        ready: whether the peer's settings have arrived.
        draining: whether no stream can begin.
        over: the reason why the connection has ended; empty while it is open.
        out: the output; `schedule` is called for it unless a write is `scheduled`.
        streams: the open streams by number.
        pongs: responses to the peer's pings, until `pong` is called.
    """

    def __init__(self, schedule: Callable[[], None]) -> None:
        """Start with the greeting; `schedule` makes the owner write soon."""
        self._schedule = schedule
        self.out: list[bytes] = []
        self.ready = self.draining = self.scheduled = False
        self.over = ""
        self.streams: dict[int, Http2Stream] = {}
        self.pongs = b""
        self._waiting: deque[Http2Stream] = deque()
        self._blocked: dict[Http2Stream, None] = {}
        self._next = 1
        # Limits of the peer, and the bytes that each side may still send.
        self._most_streams = _LARGEST
        self._frame_size = _FRAME_SIZE
        self._window = self._first_window = FIRST_WINDOW
        self._room = ROOM_FOR_ALL
        self._rest = b""  # of a frame
        self._unfinished: tuple[int, int, bytearray] | None = None  # flags, stream, header block
        self._decoder = HeaderDecoder()
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            DATA: self._on_data,
            HEADERS: self._on_headers,
            RST_STREAM: self._on_reset,
            SETTINGS: self._on_settings,
            PUSH_PROMISE: self._on_push_promise,
            PING: self._on_ping,
            GOAWAY: self._on_goaway,
            WINDOW_UPDATE: self._on_window_update,
            CONTINUATION: self._on_continuation,
        }
        self._put(GREETING)

    def take(self) -> bytes:
        """Return the bytes to write now."""
        self.scheduled = False
        out, self.out = self.out, []
        return b"".join(out)

    def _put(self, data: bytes) -> None:
        self.out.append(data)
        if not self.scheduled:
            self.scheduled = True
            self._schedule()

    def _send(self, kind: int, flags: int, number: int, payload: bytes = b"") -> None:
        size = len(payload)
        self._put(FRAME.pack(size >> 8, size & 0xFF, kind, flags, number) + payload)

    def begin(self, stream: Http2Stream) -> None:
        """Open a stream when the peer allows one more. Not when `draining` or `over`."""
        stream.connection = self
        if len(self.streams) >= self._most_streams:
            self._waiting.append(stream)
            return
        number = self._next
        stream.number, stream.window = number, self._first_window
        self.streams[number] = stream
        self._next = number + 2
        block, size = stream.head, self._frame_size
        for at in range(0, len(block), size):
            flags = END_HEADERS if at + size >= len(block) else 0
            kind = CONTINUATION if at else HEADERS
            self._send(kind, flags, number, block[at : at + size])
        if stream.pending or stream.ends:
            self.push(stream)
        if self._next > _LARGEST:
            self._lose("the numbers of its streams are used up", _LARGEST, again=True)

    def push(self, stream: Http2Stream) -> None:
        """Send the pending data, as far as there is room."""
        if not stream.number:
            return
        data, size, at = stream.pending, len(stream.pending), 0
        while True:
            part = min(size - at, self._frame_size, self._window, stream.window)
            if part <= 0 < size - at:
                stream.pending = data[at:]
                self._blocked[stream] = None
                return
            stream.window -= part
            self._window -= part
            flags = END_STREAM if stream.ends and at + part == size else 0
            self._send(DATA, flags, stream.number, data[at : at + part])
            at += part
            if at == size:
                stream.pending = b""
                self._blocked.pop(stream, None)
                return

    def reset(self, stream: Http2Stream, code: Trouble) -> None:
        """End a stream, and inform the peer if it knows the stream."""
        if stream.number:
            self._send(RST_STREAM, 0, stream.number, NUMBER.pack(code))
        else:
            self._waiting.remove(stream)
        self._forget(stream)

    def pong(self) -> None:
        """Answer the peer's pings."""
        if self.pongs:
            self._put(self.pongs)
            self.pongs = b""

    def ping(self) -> None:
        """Send a ping, to check that the peer is alive."""
        self._send(PING, 0, 0, bytes(8))

    def close(self, why: str, code: Trouble = Trouble.NO_ERROR) -> None:
        """Inform the peer of the end, and fail all streams. Safe to call twice."""
        if not self.over:
            self._send(GOAWAY, 0, 0, NUMBER.pack(0) + NUMBER.pack(code) + why.encode())
            self.fail(why)

    def fail(self, why: str) -> None:
        """Fail all streams: the connection is lost. Safe to call twice."""
        if not self.over:
            self.over = why
            self._lose(why, 0, again=False)

    # Streams

    def _begin_waiting(self) -> None:
        while self._waiting and len(self.streams) < self._most_streams:
            self.begin(self._waiting.popleft())

    def _forget(self, stream: Http2Stream) -> None:
        stream.connection = None
        self.streams.pop(stream.number, None)
        self._blocked.pop(stream, None)
        if self._waiting:
            self._begin_waiting()

    def _ended(self, stream: Http2Stream) -> None:
        """Forget a stream that the peer has ended; reset it if our side is not complete."""
        if not stream.ends or stream.pending:
            self.reset(stream, Trouble.CANCEL)
        else:
            self._forget(stream)

    def _lose(self, why: str, last: int, *, again: bool) -> None:
        """Fail the streams that wait, and those above a number; begin no more."""
        self.draining = True
        lost = [each for number, each in self.streams.items() if number > last]
        lost += self._waiting
        self._waiting.clear()
        for stream in lost:
            self._forget(stream)
        for stream in lost:
            stream.lost(why, again=again or not stream.number)

    # Receiving

    def receive(self, data: bytes) -> None:
        """Process received data, which may begin and end within a frame."""
        data = self._rest + data
        at, end = 0, len(data)
        try:
            while not self.over and end - at >= FRAME.size:
                high, low, kind, flags, number = FRAME.unpack_from(data, at)
                size = high << 8 | low
                if not (self.ready or kind == SETTINGS):
                    raise Violation(Trouble.PROTOCOL_ERROR, "it does not begin with its settings")
                if size > _FRAME_SIZE:
                    raise Violation(Trouble.FRAME_SIZE_ERROR, f"frame of kind {kind} is too large")
                start = at + FRAME.size
                if end - start < size:
                    break
                at = start + size
                if self._unfinished is not None and kind != CONTINUATION:
                    raise Violation(Trouble.PROTOCOL_ERROR, "a header block is not continued")
                if kind in self._handlers:
                    self._handlers[kind](flags, number & _LARGEST, data[start:at])
        except Violation as violation:
            self.close(f"the peer violated HTTP/2: {violation}", violation.code)
        self._rest = b"" if self.over else data[at:]

    def _stream(self, number: int, what: str) -> Http2Stream | None:
        """Return a stream; ``None`` if it has ended."""
        stream = self.streams.get(number)
        if stream is None and (number % 2 == 0 or number >= self._next):
            why = f"{what} on stream {number}, which does not exist"
            raise Violation(Trouble.PROTOCOL_ERROR, why)
        return stream

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._stream(number, "data")
        size = len(payload)
        self._room -= size
        if self._room < ROOM_FOR_ALL // 2:
            self._room = self._reopened(0, self._room, ROOM_FOR_ALL)
        if stream is None:
            return
        ended = bool(flags & END_STREAM)
        stream.room -= size
        if stream.room < ROOM // 2 and not ended:
            stream.room = self._reopened(number, stream.room, ROOM)
        if flags & PADDED:
            payload = content(PADDED, payload)
        if ended:
            self._ended(stream)
        stream.received_data(payload, ended)

    def _reopened(self, number: int, left: int, room: int) -> int:
        """Extend a window of the peer; return its size."""
        if left < 0:
            raise Violation(Trouble.FLOW_CONTROL_ERROR, "there is more data than was allowed")
        self._send(WINDOW_UPDATE, 0, number, NUMBER.pack(room - left))
        return room

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & (PADDED | PRIORITY):
            payload = content(flags, payload)
        if flags & END_HEADERS:
            self._received_block(flags, number, payload)
        else:
            self._unfinished = flags, number, bytearray(payload)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._unfinished is None or self._unfinished[1] != number:
            raise Violation(Trouble.PROTOCOL_ERROR, "a continuation of no header block")
        first_flags, _, block = self._unfinished
        block += payload
        if len(block) > LARGEST_BLOCK:
            raise Violation(Trouble.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & END_HEADERS:
            self._unfinished = None
            self._received_block(first_flags, number, bytes(block))

    def _received_block(self, flags: int, number: int, block: bytes) -> None:
        fields = self._decoder.known.get(block) or self._decoder.decode(block)
        stream = self._stream(number, "headers")
        if stream is not None:
            ended = bool(flags & END_STREAM)
            if ended:
                self._ended(stream)
            stream.received_headers(fields, ended)

    def _on_reset(self, _: int, number: int, payload: bytes) -> None:
        code = number_in(payload, "a reset")
        stream = self._stream(number, "a reset")
        if stream is not None:
            self._forget(stream)
            why = f"the peer ended the request ({name_of(code)})"
            stream.lost(why, again=code == Trouble.REFUSED_STREAM)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "settings")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise Violation(Trouble.FRAME_SIZE_ERROR, "settings have a wrong size")
        if flags & ACK:
            return
        for setting in SETTING.iter_unpack(payload):
            self._set(*setting)
        self.ready = True
        self._send(SETTINGS, ACK, 0)
        self._begin_waiting()
        for stream in list(self._blocked):
            self.push(stream)

    def _set(self, name: int, value: int) -> None:
        if name == Setting.MAX_CONCURRENT_STREAMS:
            self._most_streams = value
        elif name == Setting.INITIAL_WINDOW_SIZE:
            if value > _LARGEST:
                raise Violation(Trouble.FLOW_CONTROL_ERROR, "a window is too large")
            for stream in self.streams.values():
                stream.window += value - self._first_window
            self._first_window = value
        elif name == Setting.MAX_FRAME_SIZE:
            if not _FRAME_SIZE <= value < 1 << 24:
                raise Violation(Trouble.PROTOCOL_ERROR, "frames have a wrong size")
            self._frame_size = value

    def _on_push_promise(self, *_: object) -> None:
        raise Violation(Trouble.PROTOCOL_ERROR, "a push, which our settings forbid")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "a ping")
        if len(payload) != 8:
            raise Violation(Trouble.FRAME_SIZE_ERROR, "a ping has a wrong size")
        if not flags & ACK:
            self.pongs += frame(PING, ACK, 0, payload)

    def _on_goaway(self, _: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "the end")
        last, code = (number_in(payload[at : at + 4], "the end") for at in (0, 4))
        reason = payload[8:].decode("utf-8", "replace")
        why = f"the peer is leaving ({name_of(code)}{': ' if reason else ''}{reason})"
        self._lose(why, last & _LARGEST, again=True)

    def _on_window_update(self, _: int, number: int, payload: bytes) -> None:
        size = number_in(payload, "a window") & _LARGEST
        if not number:
            self._window += size
            window, blocked = self._window, list(self._blocked)
        elif (stream := self._stream(number, "a window")) is not None:
            stream.window += size
            window, blocked = stream.window, [stream] if stream in self._blocked else []
        else:
            return
        if not size or window > _LARGEST:
            raise Violation(Trouble.FLOW_CONTROL_ERROR, "a window has a wrong size")
        for each in blocked:
            self.push(each)

    def _of_connection(self, number: int, what: str) -> None:
        if number:
            raise Violation(Trouble.PROTOCOL_ERROR, f"{what} on stream {number}")
