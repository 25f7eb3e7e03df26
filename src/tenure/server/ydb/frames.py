"""Splitter of HTTP/2 input into slices of a few frames, with limits for frames.

h2 handles all frames of a chunk at once, and has no limit for frames that cost a client nothing:
settings, pings, resets, empty data. So the frames are counted before h2 gets them. Rules:

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

from collections.abc import Callable, Container

from h2.errors import ErrorCodes

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
