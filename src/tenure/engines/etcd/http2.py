"""HTTP/2, the client's half, without I/O: bytes in, bytes out, and streams that receive events.

As much of RFC 9113 as gRPC needs, made for requests of a few known shapes that are sent very often.
A connection owns all its state. Its owner passes it what was read (`receive`), and writes what
`take` returns soon after `speak` was called. `tenure.engines.etcd.calls` has the life of a stream.

Rules:

* Data is passed on at once, and the peer's window opened again: each caller has room for its
  answer.
* What does not fit into the peer's windows waits in its stream until there is room.
* A violation ends the connection, with a reason. Of a stream that is lost, `again` says that the
  peer has surely not acted upon it.
* After GOAWAY, or when the numbers are used up, nothing new begins (`draining`); what is open, and
  below the peer's last number, goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tenure.engines.etcd.calls import GrpcCall
from tenure.engines.etcd.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FRAME,
    GOAWAY,
    GREETING,
    HEADERS,
    NUMBER,
    PADDED,
    PING,
    PRIORITY,
    ROOM,
    ROOM_FOR_ALL,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    Blocks,
    Heard,
    Setting,
    Trouble,
    Violation,
    called,
    frame,
    number_in,
    without_padding,
)

__all__ = ["Http2Connection"]

_FRAME_SIZE = 1 << 14  # what every peer takes, and the most that is taken here
_LARGEST_FRAME = (1 << 24) - 1
_LARGEST = (1 << 31) - 1  # of windows, and of the numbers of streams
_SHAPE = END_HEADERS | PADDED | PRIORITY


class Http2Connection:
    """One connection.

    Args:
        speak: called when there is something to be written, until it is taken.

    Attributes:
        ready: the peer has said what it allows.
        draining: it takes no more streams.
        over: why it is over; empty while it is not.
        out: what is to be written; if it is `awaited`, `speak` is not called until it is taken.
        streams: those that are open, by their numbers.
        owed: the answers to the peer's pings, until `pong` is called.
    """

    def __init__(self, speak: Callable[[], None]) -> None:
        """Start before the greeting, without streams."""
        self._speak = speak
        self.out: list[bytes] = []
        self.ready = self.draining = self.awaited = False
        self.over = ""
        self.streams: dict[int, GrpcCall] = {}
        self.owed = b""
        self._waiting: deque[GrpcCall] = deque()
        self._blocked: dict[GrpcCall, None] = {}
        self._next = 1
        # What the peer allows, and what it may send.
        self._most_streams = _LARGEST
        self._first_window = FIRST_WINDOW
        self._frame_size = _FRAME_SIZE
        self._window = FIRST_WINDOW
        self._room = ROOM_FOR_ALL
        self._rest = bytearray()
        self._wanted = FRAME.size
        self._blocks = Blocks()
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            lambda *_: None,  # PRIORITY orders answers, and we send none
            self._on_reset,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )
        self._put(GREETING)

    def take(self) -> bytes:
        """Return the bytes to be written now."""
        self.awaited = False
        out, self.out = self.out, []
        return b"".join(out)

    def _put(self, data: bytes) -> None:
        self.out.append(data)
        if not self.awaited:
            self.awaited = True
            self._speak()

    def _send(self, kind: int, flags: int, number: int, payload: bytes = b"") -> None:
        size = len(payload)
        self._put(FRAME.pack(size >> 8, size & 0xFF, kind, flags, number) + payload)

    def begin(self, stream: GrpcCall) -> None:
        """Open a stream, as soon as the peer allows one more. Not when `draining` or `over`."""
        stream.connection = self
        if len(self.streams) >= self._most_streams:
            self._waiting.append(stream)
            return
        number = self._next
        stream.number, stream.window = number, self._first_window
        self.streams[number] = stream
        self._next = number + 2
        block = stream.head
        if len(block) <= self._frame_size:
            self._send(HEADERS, END_HEADERS, number, block)
        else:
            kind, size = HEADERS, self._frame_size
            for at in range(0, len(block), size):
                flags = END_HEADERS if at + size >= len(block) else 0
                self._send(kind, flags, number, block[at : at + size])
                kind = CONTINUATION
        if stream.pending or stream.ends:
            self.push(stream)
        if self._next > _LARGEST:
            self._drain("the numbers of its streams are used up", _LARGEST)

    def push(self, stream: GrpcCall) -> None:
        """Send what is pending, as far as there is room."""
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
            is_last = stream.ends and at + part == size
            self._send(DATA, END_STREAM if is_last else 0, stream.number, data[at : at + part])
            at += part
            if at == size:
                stream.pending = b""
                self._blocked.pop(stream, None)
                return

    def reset(self, stream: GrpcCall, code: Trouble) -> None:
        """End a stream, and tell the peer, if it knows of it."""
        if stream.number:
            self._send(RST_STREAM, 0, stream.number, NUMBER.pack(code))
        else:
            self._waiting.remove(stream)
        self._forget(stream)

    def pong(self) -> None:
        """Answer the peer's pings."""
        if self.owed:
            self._put(self.owed)
            self.owed = b""

    def ping(self) -> None:
        """Have the peer show that it is there."""
        self._send(PING, 0, 0, bytes(8))

    def close(self, why: str, code: Trouble = Trouble.NO_ERROR) -> None:
        """Tell the peer that it is over, and fail all streams. Safe to call twice."""
        if not self.over:
            self._send(GOAWAY, 0, 0, NUMBER.pack(0) + NUMBER.pack(code) + why.encode())
            self.fail(why)

    def fail(self, why: str) -> None:
        """Fail all streams: the connection is lost. Safe to call twice."""
        if not self.over:
            self.over = why
            self.draining = True
            waiting, streams = list(self._waiting), list(self.streams.values())
            self._waiting.clear()
            self.streams.clear()
            self._blocked.clear()
            for stream in (*streams, *waiting):
                stream.connection = None
            for stream in streams:
                stream.lost(why, again=False)
            for stream in waiting:
                stream.lost(why, again=True)

    # What streams there are

    def _forget(self, stream: GrpcCall) -> None:
        stream.connection = None
        self.streams.pop(stream.number, None)
        self._blocked.pop(stream, None)
        while self._waiting and len(self.streams) < self._most_streams:
            self.begin(self._waiting.popleft())

    def _ended(self, stream: GrpcCall) -> None:
        """The peer has ended it; if it does not know how our side ends, it need not."""
        if not stream.ends or stream.pending:
            self._send(RST_STREAM, 0, stream.number, NUMBER.pack(Trouble.CANCEL))
        self._forget(stream)

    def _drain(self, why: str, last: int) -> None:
        self.draining = True
        waiting = list(self._waiting)
        self._waiting.clear()
        undone = [each for number, each in self.streams.items() if number > last]
        for stream in (*undone, *waiting):
            self._forget(stream)
        for stream in (*undone, *waiting):
            stream.lost(why, again=True)

    # What is read

    def receive(self, data: bytes) -> None:
        """Understand what was read, however it is cut into pieces."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        at, end = 0, len(data)
        try:
            while not self.over:
                self._wanted = FRAME.size
                if end - at < FRAME.size:
                    break
                high, low, kind, flags, number = FRAME.unpack_from(data, at)
                size = high << 8 | low
                if size > _FRAME_SIZE or not (self.ready or kind == SETTINGS):
                    raise self._strange(kind)
                self._wanted += size
                if end - at < self._wanted:
                    break
                start, at = at + FRAME.size, at + self._wanted
                if self._blocks.unfinished and kind != CONTINUATION:
                    raise Violation(Trouble.PROTOCOL_ERROR, "a header block is not continued")
                if kind < len(self._handlers):  # and others are ignored
                    self._handlers[kind](flags, number & _LARGEST, data[start:at])
        except Violation as violation:
            self.close(f"the peer does not speak HTTP/2 properly: {violation}", violation.code)
        if at < end and not self.over:
            self._rest += data[at:]

    def _strange(self, kind: int) -> Violation:
        if self.ready:
            return Violation(Trouble.FRAME_SIZE_ERROR, f"a frame of kind {kind} is too large")
        return Violation(Trouble.PROTOCOL_ERROR, "it does not begin with its settings")

    def _stream(self, number: int, what: str) -> GrpcCall | None:
        """The one that is meant; ``None`` if it is over already."""
        stream = self.streams.get(number)
        if stream is None and (number % 2 == 0 or number >= self._next):
            raise Violation(Trouble.PROTOCOL_ERROR, f"{what} on stream {number}, which is not")
        return stream

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        stream = self._stream(number, "data")
        size = len(payload)
        self._room -= size
        if self._room < ROOM_FOR_ALL // 2:
            self._room += self._more_room(0, ROOM_FOR_ALL - self._room, self._room)
        if stream is None:
            return
        ended = bool(flags & END_STREAM)
        stream.room -= size
        if stream.room < ROOM // 2 and not ended:
            stream.room += self._more_room(number, ROOM - stream.room, stream.room)
        if flags & PADDED:
            payload = without_padding(payload)
        if ended:
            self._ended(stream)
        stream.heard_data(payload, ended)

    def _more_room(self, number: int, size: int, left: int) -> int:
        if left < 0:
            raise Violation(Trouble.FLOW_CONTROL_ERROR, "there is more data than was allowed")
        self._send(WINDOW_UPDATE, 0, number, NUMBER.pack(size))
        return size

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        known = self._blocks.known.get(payload) if flags & _SHAPE == END_HEADERS else None
        self._heard_block(
            self._blocks.begin(flags, number, payload) if known is None else (flags, number, known)
        )

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._heard_block(self._blocks.go_on(flags, number, payload))

    def _heard_block(self, heard: Heard | None) -> None:
        if heard is not None:
            flags, number, fields = heard
            stream = self._stream(number, "headers")
            if stream is not None:
                ended = bool(flags & END_STREAM)
                if ended:
                    self._ended(stream)
                stream.heard_headers(fields, ended)

    def _on_reset(self, _: int, number: int, payload: bytes) -> None:
        code = number_in(payload, "a reset")
        stream = self._stream(number, "a reset")
        if stream is not None:
            self._forget(stream)
            why = f"the peer ended the request ({called(code)})"
            stream.lost(why, again=code == Trouble.REFUSED_STREAM)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        self._for_all(number, "settings")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise Violation(Trouble.FRAME_SIZE_ERROR, "settings have a wrong size")
        if flags & ACK:
            return
        for name, value in SETTING.iter_unpack(payload):
            self._set(name, value)
        self.ready = True
        self._send(SETTINGS, ACK, 0, b"")
        while self._waiting and len(self.streams) < self._most_streams:
            self.begin(self._waiting.popleft())
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
            if not _FRAME_SIZE <= value <= _LARGEST_FRAME:
                raise Violation(Trouble.PROTOCOL_ERROR, "frames have a wrong size")
            self._frame_size = value

    def _on_push_promise(self, *_: object) -> None:
        raise Violation(Trouble.PROTOCOL_ERROR, "it pushes, which it was told not to")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        self._for_all(number, "a ping")
        if len(payload) != 8:
            raise Violation(Trouble.FRAME_SIZE_ERROR, "a ping has a wrong size")
        if not flags & ACK:
            self.owed += frame(PING, ACK, 0, payload)

    def _on_goaway(self, _: int, number: int, payload: bytes) -> None:
        self._for_all(number, "an end")
        last, code = number_in(payload[:4], "an end"), number_in(payload[4:8], "an end")
        words = payload[8:].decode("utf-8", "replace")
        why = f"the peer is leaving ({called(code)}{': ' if words else ''}{words})"
        self._drain(why, last & _LARGEST)

    def _on_window_update(self, _: int, number: int, payload: bytes) -> None:
        size = number_in(payload, "a window") & _LARGEST
        stream = self._stream(number, "a window") if number else None
        if stream is not None:
            stream.window += size
        elif number:
            return  # of a stream that is over
        else:
            self._window += size
        window = self._window if stream is None else stream.window
        if not size or window > _LARGEST:
            raise Violation(Trouble.FLOW_CONTROL_ERROR, "a window has a wrong size")
        for blocked in list(self._blocked) if stream is None else [stream]:
            if blocked in self._blocked:
                self.push(blocked)

    def _for_all(self, number: int, what: str) -> None:
        if number:
            raise Violation(Trouble.PROTOCOL_ERROR, f"{what} is said of stream {number}")
