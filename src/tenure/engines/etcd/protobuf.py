"""Protocol Buffers, as far as etcd's messages need them: numbers, and what has a length.

Encoders return bytes, to be joined. What is decoded may have fields of any kind; those of fixed
size, which no message has that is read here, are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["fields", "integer", "long", "octets", "varint"]


def varint(number: int) -> bytes:
    """A number, in as many bytes as it needs."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def integer(field: int, number: int) -> bytes:
    """A number, written even if it is zero."""
    return varint(field << 3) + varint(number)


def octets(field: int, value: bytes) -> bytes:
    """Bytes, a text or a message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: (number, value)."""
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = long(data, at, tag)
        kind = tag & 7
        if kind == 0:
            number = data[at]
            at += 1
            if number >= 0x80:
                number, at = long(data, at, number)
            yield tag >> 3, number
        elif kind == 2:
            size = data[at]
            at += 1
            if size >= 0x80:
                size, at = long(data, at, size)
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            at += 8 if kind == 1 else 4


def long(data: bytes, at: int, first: int) -> tuple[int, int]:
    """The rest of a number of several bytes."""
    number, shift = first & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
