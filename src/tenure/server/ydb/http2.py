"""HTTP/2 of one connection, handled in slices within its share of the loop's iteration.

h2 and `grpclib.protocol` implement HTTP/2, including its flow control. Rules:

* Input is handled in slices of a few frames, within the connection's
  share (`tenure.server.budget`). The rest waits, and so does a call whose frame had more messages
  than the share allows.
* Reading is paused while input waits, and while the client does not read.
* **A stranger**, whose client has made no authenticated call, is read until its first call is
  decided, and up to `_STRANGERS_BYTES`. After `stop_reading` nothing more is handled.

**Frames** (`FrameScanner`). h2 handles all frames of a chunk at once, and has no limit for frames
that cost a client nothing: settings, pings, resets, empty data. So the frames are counted before h2
gets them. Rules:

* A slice has up to `_SLICE` frames, and ends with the first one that opens a call.
* A client may send `CONTROL_BURST` control frames, and then `CONTROL_RATE` per second. In addition
  it may send one for each frame with a message that it sends to a call, and `_PER_ANSWER` for each
  frame with headers or data that it gets: clients acknowledge each answer, even if several are in
  one frame, and measure the connection with pings while they read. Data for a stream without a call
  counts as a control frame.
* Before its first authenticated call, it may send `_STRANGERS_BURST` control frames.
* A header block has at most `_HEADER_BYTES` bytes in `_CONTINUATIONS` further frames.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

from grpclib.config import Configuration
from grpclib.protocol import AbstractHandler, EventsProcessor, H2Protocol
from grpclib.protocol import Connection as Http2Connection
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import PingReceived
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting
from tenure.server.meter import Traffic

if TYPE_CHECKING:
    from tenure.server.ydb.calls import GrpcCall


CONTROL_BURST, CONTROL_RATE = 1000, 100
"""Control frames that a client may send at once, and per second."""

_STRANGERS_BURST = 32
_PER_ANSWER = 2
_MESSAGE = 5  # bytes of the shortest message of a call
_SLICE = 8
_PREFACE, _HEADER = 24, 9  # bytes, as HTTP/2 defines them
_LONGEST = 16384  # bytes of one frame
_HEADER_BYTES = 32 * 1024
_CONTINUATIONS = 8
_SETTINGS_BYTES = 32 * 6  # of one frame: 32 settings

_DATA, _HEADERS, _SETTINGS, _CONTINUATION = 0, 1, 4, 9
_END_STREAM, _PADDED = 1, 8


class BadFrame(Exception):
    """Error: a frame that ends its connection, with this code of HTTP/2."""

    def __init__(self, code: ErrorCodes, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class FrameScanner:
    """Finds the ends of the frames of one connection, and counts them.

    Args:
        now: reads the clock, in seconds.
        streams: the streams on which calls are served, by number.
    """

    __slots__ = (
        "_at",
        "_burst",
        "_continuations",
        "_control",
        "_header",
        "_header_bytes",
        "_now",
        "_skip",
        "_streams",
    )

    def __init__(self, now: Callable[[], float], streams: Container[int]) -> None:
        self._now = now
        self._streams = streams
        self._skip = _PREFACE  # bytes until the next frame
        self._header = b""  # of a frame, while it has not come whole
        self._header_bytes = 0  # of a block that has not ended
        self._continuations = 0
        self._burst = float(_STRANGERS_BURST)
        self._control = self._burst
        self._at = now()

    def greeted(self) -> None:
        """Allow the whole burst: the client has made an authenticated call."""
        if self._burst < CONTROL_BURST:
            self._control += CONTROL_BURST - self._burst
            self._burst = float(CONTROL_BURST)

    def answered(self) -> None:
        """Record that a frame with headers or data was sent to the client."""
        self._allow(_PER_ANSWER)

    def _allow(self, more: int) -> None:
        if self._control < self._burst:
            self._control += more

    def cut(self, data: bytes, start: int) -> int:
        """Return the end of the slice that begins at `start`.

        Raises:
            BadFrame: it contains a frame that the client may not send.
        """
        at, end = start, len(data)
        frames = 0
        while at < end:
            if self._skip:
                step = min(self._skip, end - at)
                at += step
                self._skip -= step
            elif frames >= _SLICE:
                break
            else:
                header = self._header + data[at : at + _HEADER - len(self._header)]
                at += len(header) - len(self._header)
                if len(header) < _HEADER:
                    self._header = header
                    break
                self._header = b""
                self._skip = int.from_bytes(header[:3], "big")
                frames += self._count(header)
        return at

    def _count(self, header: bytes) -> int:
        """Check a frame by its header; return the number of ordinary frames that it counts as."""
        length, kind, flags = self._skip, header[3], header[4]
        if length > _LONGEST:
            raise BadFrame(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if kind in {_HEADERS, _CONTINUATION}:
            self._count_block(length, kind)
            return _SLICE
        if kind == _DATA and int.from_bytes(header[5:], "big") in self._streams:
            if length and not flags & _PADDED:
                self._allow(length >= _MESSAGE)
                return 1
            if flags & _END_STREAM:
                return 1
        if kind == _SETTINGS and length > _SETTINGS_BYTES:
            raise BadFrame(ErrorCodes.ENHANCE_YOUR_CALM, f"settings of {length} bytes")
        if self._control < 1.0:
            now = self._now()
            accrued = (now - self._at) * CONTROL_RATE
            self._control = min(self._control + accrued, self._burst)
            self._at = now
            if self._control < 1.0:
                raise BadFrame(
                    ErrorCodes.ENHANCE_YOUR_CALM,
                    f"more than {self._burst:g} control frames, and {CONTROL_RATE} a second",
                )
        self._control -= 1.0
        return 1

    def _count_block(self, length: int, kind: int) -> None:
        if kind == _HEADERS:
            self._header_bytes = self._continuations = 0
        else:
            self._continuations += 1
        self._header_bytes += length
        if self._header_bytes > _HEADER_BYTES or self._continuations > _CONTINUATIONS:
            raise BadFrame(ErrorCodes.ENHANCE_YOUR_CALM, "a header block that is too long")


_HEADER_LIST = 16 * 1024  # bytes of a call's headers, with 32 more for each
_STRANGERS_BYTES = 64 * 1024  # that are handled before an authenticated call
_KEEP_ALIVE = (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3))
_CONFIG = Configuration().__for_server__()
_H2_CONFIG = H2Configuration(client_side=False, header_encoding="ascii")


class Http2Protocol(H2Protocol):
    """Bytes of a connection.

    Args:
        handler: the handler of its calls.
        greeting: its entry among the server's connections.

    Attributes:
        share: its share of the loop's iteration.
        pings: number of answered pings.
        is_open: false once either end has closed it.
    """

    http2: _Connection
    h2: _State
    _transport: asyncio.Transport

    def __init__(self, handler: AbstractHandler, greeting: Greeting) -> None:
        """Start closed; `start_http2` begins."""
        super().__init__(handler, _CONFIG, _H2_CONFIG)
        self.share = greeting.share(self.go_on)
        self.pings = 0
        self.is_open = False
        self._unread = b""  # received, and from `_unread_at` on not handled
        self._unread_at = 0
        self._strangers_bytes: int | None = _STRANGERS_BYTES  # that may still be handled
        self._greeting = greeting
        self._postponed: dict[GrpcCall, None] = {}  # calls that go on with the next share
        self._reading = True
        self._blocked = False  # the client does not read

    def start_http2(self, transport: asyncio.Transport, *, streams: int, window: int) -> None:
        """Begin, on a connection that has been made.

        Args:
            transport: the transport of the connection.
            streams: maximum number of open streams.
            window: bytes that the client may send on each stream without an acknowledgement.
        """
        self._transport = transport
        self.is_open = True
        _keep_alive(transport.get_extra_info("socket"))
        self.h2 = _State(config=_H2_CONFIG)
        self.h2.traffic = self._greeting.traffic
        self.h2.decoder.max_header_list_size = _HEADER_LIST
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: streams,
                SettingCodes.INITIAL_WINDOW_SIZE: window,
                SettingCodes.MAX_HEADER_LIST_SIZE: _HEADER_LIST,
            },
        )
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(2 * window)
        self.connection = self.http2 = _Connection(self.h2, transport, config=_CONFIG)
        self.processor = EventsProcessor(self.handler, self.http2)
        self._scanner = FrameScanner(self.share.now, self.processor.streams)
        self.http2.answered = self._scanner.answered
        self.http2.flush()
        self.http2.initialize()
        self._known_events = frozenset(self.processor.processors)

    @abstractmethod
    def bad_input(self, reason: str, data: bytes) -> None:
        """Record why the connection will be closed.

        Args:
            reason: the reason.
            data: the wrong input, from its beginning.
        """

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Record a defect, for which the connection will be closed."""

    @property
    @abstractmethod
    def undecided(self) -> bool:
        """True if input waits until a stranger's call is admitted or refused."""

    @abstractmethod
    def count_unread(self, size: int) -> None:
        """Count the bytes that wait; end the connection if they are too many."""

    # Input

    def data_received(self, data: bytes) -> None:
        """Handle the bytes, within the connection's share of the iteration."""
        if not self.is_open:
            return
        self._greeting.traffic.received += len(data)
        if self._greeting.refused:
            self._greeting.forget(len(data))
            self._settle_reading()
            return
        if self._unread or self.undecided or not self.share.begin(len(data)):
            self._keep(self._unread[self._unread_at :] + data, 0)
            return
        self._handle(data, 0)
        self.share.end()

    def _keep(self, data: bytes, at: int) -> None:
        """Handle the rest of `data` later."""
        self._unread, self._unread_at = data, at
        if not self.undecided:
            self.share.queue()
        self._settle_reading()
        self.count_unread(len(data) - at)

    def admitted(self) -> None:
        """Treat the client no longer as a stranger."""
        self._strangers_bytes = None
        self._scanner.greeted()
        self.decided()

    def decided(self) -> None:
        """Continue with input that waited for a decision."""
        if self._unread and not self.undecided:
            self.share.queue()
        self._settle_reading()

    def stop_reading(self) -> None:
        """Handle nothing more: the client is refused."""
        self._greeting.refuse(len(self._unread) - self._unread_at)
        self._drop_unread()
        self._settle_reading()

    def _drop_unread(self) -> None:
        self._unread, self._unread_at = b"", 0
        self.count_unread(0)

    def go_on(self) -> None:
        """Continue with waiting input, within the share."""
        while self._postponed and self.is_open:
            call = next(iter(self._postponed))
            del self._postponed[call]
            call.more()
            if self.share.used_up:
                self.share.queue()
                return
        if self._unread and self.is_open and not self._blocked and not self.undecided:
            data, at = self._unread, self._unread_at
            self._drop_unread()
            self._handle(data, at)
            self._settle_reading()

    def _handle(self, data: bytes, at: int) -> None:
        """Handle slices, as far as the share allows; what they cause is one write."""
        self._handle_slices(data, at)
        if self.is_open:
            self.http2.flush()

    def _handle_slices(self, data: bytes, at: int) -> None:
        start, end = at, len(data)
        while at < end and self.is_open and not self._greeting.refused:
            if at > start and (self._blocked or self.undecided or self.share.used_up):
                self._keep(data, at)
                return
            begins = at
            try:
                at = self._scanner.cut(data, begins)
                self._count_strangers_bytes(at - begins)
                self._feed(data[begins:at])
            except BadFrame as error:
                self.h2.close_connection(error.code)
                self._end_badly(str(error), data[begins:])
            except (H2Error, ValueError) as error:  # the second from headers that are not ASCII
                self._end_badly(str(error), data[begins:])
            except Exception as error:
                self.failed(error)
                self.h2.close_connection(ErrorCodes.INTERNAL_ERROR)
                self._close("a defect of the server")

    def _count_strangers_bytes(self, size: int) -> None:
        if self._strangers_bytes is not None:
            self._strangers_bytes -= size
            if self._strangers_bytes < 0:
                reason = f"more than {_STRANGERS_BYTES} bytes without an authenticated call"
                raise BadFrame(ErrorCodes.ENHANCE_YOUR_CALM, reason)

    def _feed(self, data: bytes) -> None:
        for event in self.http2.feed(data):
            if type(event) in self._known_events:
                self.processor.process(event)
                self.pings += type(event) is PingReceived

    def _end_badly(self, reason: str, data: bytes) -> None:
        self.bad_input(reason, data)
        self._close("protocol error")

    def _close(self, reason: str) -> None:
        self.http2.flush()  # reports it to the client
        self.processor.close(reason)

    # Waiting input

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Let the client send so many more bytes on a stream."""
        self.http2.ack(stream_id, size)

    def postpone(self, calls: Iterable[GrpcCall]) -> None:
        """Let calls continue in a later iteration."""
        if self.is_open:
            self._postponed.update(dict.fromkeys(calls))
            self.share.queue()

    def pause_writing(self) -> None:
        """Stop reading, because the client does not read."""
        super().pause_writing()
        self._blocked = True
        self._settle_reading()

    def resume_writing(self) -> None:
        """Continue with received input."""
        super().resume_writing()
        self._blocked = False
        if self._unread:
            self.share.queue()
        self._settle_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop input that has not been handled."""
        self.is_open = False
        self.share.close()
        self._drop_unread()
        self._postponed.clear()
        super().connection_lost(exc)

    def _settle_reading(self) -> None:
        """Resume reading if nothing waits and the client reads."""
        reading = not (self._unread or self._blocked or self.undecided)
        reading = reading and self._greeting.may_read
        if reading is not self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()


class _State(H2Connection):
    """h2's state of a connection, with bounds on what a client can make it store.

    Attributes:
        traffic: the listener's counts.
    """

    MAX_CLOSED_STREAMS = 4096
    traffic: Traffic

    def data_to_send(self, amount: int | None = None) -> bytes:
        data: bytes = super().data_to_send(amount)
        self.traffic.sent += len(data)
        return data


class _Connection(Http2Connection):
    """grpclib's part of a connection, which records what the client has to acknowledge."""

    answered: Callable[[], None]

    def headers_send_process(self) -> None:
        super().headers_send_process()
        self.answered()

    def data_send_process(self) -> None:
        super().data_send_process()
        self.answered()


def refusal(error: LimitReached) -> bytes:
    """Return the reply to a client that is rejected before it has sent anything."""
    reason = (0).to_bytes(4, "big") + ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4, "big")
    reason += str(error).encode()
    settings = b"\0\0\0\x04\0" + bytes(4)
    return settings + len(reason).to_bytes(3, "big") + b"\x07\0" + bytes(4) + reason


def _keep_alive(sock: socket.socket | None) -> None:
    """Let the system detect silent disconnects, and send small packets at once."""
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEP_ALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            sock.setsockopt(level, option, value)
