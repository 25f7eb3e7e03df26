"""How messages lie in a stream of bytes: four bytes of length, big end first, then the message.

Both ends write with a `FrameWriter`, which puts many messages into one buffer, and cut what they
read with a `FrameReader`. A frame that is longer than the reader accepts is an error before any
of it has been kept, so that nobody is made to hold more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct as Layout

from msgspec import DecodeError, Struct
from msgspec.msgpack import Encoder

__all__ = ["HEADER_BYTES", "BadFrame", "FrameReader", "FrameTooLong", "FrameWriter"]

_LENGTH = Layout(">I")
HEADER_BYTES = _LENGTH.size


class BadFrame(DecodeError):
    """What arrives cannot be read on from here: the connection is of no more use."""


class FrameTooLong(BadFrame):
    """A frame of more bytes than the reader accepts is announced.

    Attributes:
        length: of the frame.
    """

    def __init__(self, length: int, largest: int) -> None:
        super().__init__(f"a message of {length} bytes was announced, and {largest} are the most")
        self.length = length


class FrameReader:
    """Cuts what arrives, in pieces of any size, into frames.

    Args:
        largest: the most bytes that a frame may have, without its length; it may be changed
            between two pieces.
    """

    __slots__ = ("_needed", "_rest", "largest")

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._rest = bytearray()  # what arrived of an unfinished frame
        self._needed = HEADER_BYTES  # how much of it there must be before it is looked at again

    @property
    def kept(self) -> int:
        """Bytes of a frame whose end has not arrived."""
        return len(self._rest)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
        """The frames that this piece completes, in order.

        To be read to its end before the next piece, unless the connection is given up. `largest`
        is read for every frame, so that who reads one may change it for the next.

        Raises:
            FrameTooLong: a frame is longer than `largest`; those before it have been given.
        """
        length = len(data) - HEADER_BYTES
        if (
            not self._rest
            and 0 <= length <= self.largest
            and _LENGTH.unpack_from(data)[0] == length
        ):
            return iter((memoryview(data)[HEADER_BYTES:],))  # one frame and no more, as most often
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
    """Puts messages, one frame each, into a buffer that is sent as a whole.

    Args:
        largest: the most bytes that a frame may have, without its length; it may be changed.
    """

    __slots__ = ("_buffer", "_encode", "largest")

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._buffer = bytearray()
        self._encode = Encoder().encode_into

    def __len__(self) -> int:
        """Bytes that wait to be taken."""
        return len(self._buffer)

    def add(self, message: Struct) -> int:
        """Put a message behind the others; returns how many bytes it takes.

        Raises:
            BadFrame: it is longer than `largest`; nothing is added.
            UnicodeEncodeError, OverflowError: it has text or a number that cannot be sent;
                nothing is added.
        """
        buffer = self._buffer
        before = len(buffer)
        start = before + HEADER_BYTES
        try:
            self._encode(message, buffer, start)
            length = len(buffer) - start
            if length > self.largest:
                raise BadFrame(f"a message of {length} bytes; {self.largest} are the most")
        except BaseException:
            del buffer[before:]
            raise
        _LENGTH.pack_into(buffer, before, length)
        return length + HEADER_BYTES

    def take(self) -> bytearray:
        """All that was put in since the last time; it belongs to the caller."""
        taken, self._buffer = self._buffer, bytearray()
        return taken
