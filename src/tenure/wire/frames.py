"""Framing of messages: four bytes of length in big-endian order, then the message.

Both ends write with a `FrameWriter`, which collects messages in one buffer, and read with a
`FrameReader`. Too long a frame is rejected before its message is buffered, which bounds the memory
that a peer can make the reader use.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout

from msgspec import DecodeError, Struct
from msgspec.msgpack import Encoder

_LENGTH = Layout(">I")
HEADER_BYTES = _LENGTH.size


class BadFrame(DecodeError):
    """Unreadable or oversized frame: a connection that receives one is unusable."""


class FrameTooLong(BadFrame):
    """Announced frame that is longer than the reader accepts.

    Attributes:
        length: bytes of the announced message.
    """

    def __init__(self, length: int, largest: int) -> None:
        super().__init__(f"a message of {length} bytes was announced; {largest} are the maximum")
        self.length = length


class FrameReader:
    """Splitter of received data, in chunks of any size, into frames.

    Args:
        largest: maximum bytes of a frame, without its length; it may be changed between two chunks.
    """

    __slots__ = ("_needed", "_rest", "largest")

    def __init__(self, largest: int) -> None:
        """Start without bytes; a frame has at most `largest`."""
        self.largest = largest
        self._rest = bytearray()  # received bytes of an unfinished frame
        self._needed = HEADER_BYTES  # bytes of it that must arrive before it is parsed again

    @property
    def kept(self) -> int:
        """Number of buffered bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """Return the frames that this chunk completes, in order.

        The caller reads the iterator to its end before feeding the next chunk, unless it drops the
        connection. `largest` is read for every frame, so the caller may change it between two.

        Raises:
            FrameTooLong: a frame is longer than `largest`; the frames before it have been returned.
        """
        length = len(data) - HEADER_BYTES
        if (
            not self._rest
            and 0 <= length <= self.largest
            and _LENGTH.unpack_from(data)[0] == length
        ):
            return iter((memoryview(data)[HEADER_BYTES:],))  # the common case: exactly one frame
        return self._cut(data)

    def _cut(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._needed:
                return
            data, self._rest = rest, bytearray()
        view = memoryview(data)
        here, end = 0, len(view)
        needed = HEADER_BYTES
        while end - here >= HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(view, here)
            if length > self.largest:
                raise FrameTooLong(length, self.largest)
            needed = HEADER_BYTES + length
            if end - here < needed:
                break
            yield view[here + HEADER_BYTES : here + needed]
            here += needed
            needed = HEADER_BYTES
        if here < end:
            self._rest = bytearray(view[here:])
            self._needed = needed


class FrameWriter:
    """Buffer of outgoing messages, one frame each, that is sent as a whole.

    Args:
        largest: maximum bytes of a frame, without its length; it may be changed.
    """

    __slots__ = ("_buffer", "_encode", "largest")

    def __init__(self, largest: int) -> None:
        """Start with an empty buffer of at most `largest` bytes."""
        self.largest = largest
        self._buffer = bytearray()
        self._encode = Encoder().encode_into

    def __len__(self) -> int:
        """Return the number of buffered bytes."""
        return len(self._buffer)

    def add(self, message: Struct) -> int:
        """Append a message; return the size of its frame in bytes.

        Raises:
            BadFrame: the frame is longer than `largest`; nothing is added.
            UnicodeEncodeError, OverflowError: it contains text or a number that cannot be encoded;
                nothing is added.
        """
        buffer = self._buffer
        before = len(buffer)
        start = before + HEADER_BYTES
        try:
            self._encode(message, buffer, start)
            length = len(buffer) - start
            if length > self.largest:
                raise BadFrame(f"a message of {length} bytes; {self.largest} are the maximum")
        except BaseException:
            del buffer[before:]
            raise
        _LENGTH.pack_into(buffer, before, length)
        return length + HEADER_BYTES

    def take(self) -> bytearray:
        """Remove and return all buffered bytes; the returned buffer belongs to the caller."""
        taken, self._buffer = self._buffer, bytearray()
        return taken
