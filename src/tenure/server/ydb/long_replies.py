"""Descriptions that are too long to be encoded at once.

In gRPC a description is one message. A long one is encoded and sent in chunks, as fast as its
client reads, so that the server has only the store's answer in memory, and no second copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from tenure.model import SemaphoreDescription
from tenure.server.ydb.messages import Response, coordination

LONGEST = 64 * 1024 * 1024
"""Maximum bytes of a message that YDB's clients accept."""
_AT_A_TIME = 4
_PIECE = 256 * 1024
_ENTRY = 64  # maximum bytes of a request without its data

_Result = Response.DescribeSemaphoreResult
_RESULT = Response.DESCRIPTOR.fields_by_name["describe_semaphore_result"].number
_DESCRIPTION = _Result.DESCRIPTOR.fields_by_name["semaphore_description"].number
_DATA = coordination.SemaphoreSession.DESCRIPTOR.fields_by_name["data"].number


def size_of(found: SemaphoreDescription, *, owners: bool) -> int:
    """Return an upper estimate of the bytes of a description."""
    listed = [*(found.owners if owners else ()), *found.waiters]
    entries = sum(len(each.data) + _ENTRY for each in listed)
    return 2 * len(found.name.encode()) + len(found.data) + entries + 2 * _ENTRY


class LongReply:
    """A description that is encoded while it is sent.

    Args:
        base: the reply without owners and waiters.
        entries: ``(field, message, data)`` of each owner and waiter, the message without its data.
    """

    def __init__(self, base: Any, entries: list[tuple[str, Any, bytes]]) -> None:
        self._base = base
        self._entries = entries

    def pieces(self) -> Iterator[bytes]:
        """Yield the gRPC message, framed, in chunks."""
        result = self._base.describe_semaphore_result
        description = result.semaphore_description.SerializeToString()
        rest = _Result()
        rest.CopyFrom(result)
        rest.ClearField("semaphore_description")
        fields = coordination.SemaphoreDescription.DESCRIPTOR.fields_by_name
        sizes = [_entry_size(message, data) for _, message, data in self._entries]
        inner = len(description) + sum(1 + _varint_size(size) + size for size in sizes)
        head = rest.SerializeToString() + _tag(_DESCRIPTION, inner)
        body = _tag(_RESULT, len(head) + inner) + head
        buffer = bytearray(b"\x00" + (len(body) + inner).to_bytes(4, "big") + body + description)
        for size, (field, message, data) in zip(sizes, self._entries, strict=True):
            buffer += _tag(fields[field].number, size) + message.SerializeToString()
            if data:
                buffer += _tag(_DATA, len(data)) + data
            if len(buffer) >= _PIECE:
                yield bytes(buffer)
                buffer.clear()
        yield bytes(buffer)


class LongReplies:
    """Limit of the long replies of one listener."""

    def __init__(self) -> None:
        self._replies: weakref.WeakSet[LongReply] = weakref.WeakSet()

    def why_not(self, size: int) -> str:
        """Return why another one of that size is not allowed, or nothing."""
        if size > LONGEST:
            return f"the description has about {size} bytes, and {LONGEST} is the maximum"
        if len(self._replies) >= _AT_A_TIME:
            return f"the server is sending {_AT_A_TIME} long descriptions already; try again"
        return ""

    def add(self, reply: LongReply) -> None:
        """Count a reply while it exists."""
        self._replies.add(reply)


def _entry_size(message: Any, data: bytes) -> int:
    size: int = message.ByteSize()
    return size + (1 + _varint_size(len(data)) + len(data) if data else 0)


def _tag(field: int, size: int) -> bytes:
    """Encode the tag of a field of so many bytes; all field numbers here are below 16."""
    return bytes([field << 3 | 2]) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_size(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
