"""Answers and watch events of etcd, decoded by hand (`tenure.engines.etcd.wire` says why).

It becomes slotted objects with the few fields that are used. Other fields are skipped, except in a
key with its value, whose fields are all known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from tenure.errors import EngineError

__all__ = [
    "Answer",
    "EtcdLease",
    "KeyValue",
    "WatchAnswer",
    "WatchEvent",
    "read_answer",
    "read_lease",
    "read_range",
    "read_string",
    "read_watch",
]

P = ParamSpec("P")
T = TypeVar("T")

_HEADER, _SUCCEEDED = b"\x0a", b"\x10\x01"


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: (number, value)."""
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _long(data, at, tag)
        kind = tag & 7
        if kind == 0:
            number = data[at]
            at += 1
            if number >= 0x80:
                number, at = _long(data, at, number)
            yield tag >> 3, number
        elif kind == 2:
            size = data[at]
            at += 1
            if size >= 0x80:
                size, at = _long(data, at, size)
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            at += 8 if kind == 1 else 4


def _long(data: bytes, at: int, first: int) -> tuple[int, int]:
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


def _of_etcd(read: Callable[P, T]) -> Callable[P, T]:
    """Make an `EngineError` of whatever bytes that are no such message end in."""

    @wraps(read)
    def reads(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return read(*arguments, **named)
        except (
            AssertionError,
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise EngineError(
                "the server's answer is none of etcd's: is it an etcd server?"
            ) from error

    return reads


class KeyValue:
    """A key with its value, when it was created and last put, and how often since."""

    __slots__ = ("created", "key", "lease", "modified", "value", "version")

    def __init__(self, data: bytes) -> None:
        """Decode the message."""
        self.key = self.value = b""
        self.created = self.modified = self.version = self.lease = 0
        for field, value in _fields(data):
            setattr(self, _OF_KEY_VALUE[field], value)


_OF_KEY_VALUE = {
    1: "key",
    2: "created",
    3: "modified",
    4: "version",
    5: "value",
    6: "lease",
}


@dataclasses.dataclass(slots=True, eq=False)
class Answer:
    """The answer to a transaction, or to a part of one.

    Attributes:
        revision: of the store, when it was carried out.
        ok: whether everything that was compared held.
        parts: what each of the things that were done answered; decoded when it is asked for.
        rest: what they are decoded from.
        found: the keys that were read.
        count: how many there are (of a range), or were deleted.
        more: whether there are more than were asked for.
    """

    revision: int = 0
    ok: bool = False
    rest: bytes = b""
    found: list[KeyValue] = dataclasses.field(default_factory=list)
    count: int = 0
    more: bool = False
    _parts: list[Answer] | None = None

    @property
    @_of_etcd
    def parts(self) -> list[Answer]:
        """Answers to the parts of the transaction."""
        if self._parts is None:
            self._parts = [
                _read_part(value)
                for field, value in _fields(self.rest)
                if field == 3 and isinstance(value, bytes)
            ]
        return self._parts

    @property
    def first(self) -> KeyValue | None:
        """The first key that was read."""
        return self.found[0] if self.found else None


@_of_etcd
def read_answer(data: bytes) -> Answer:
    """A TxnResponse."""
    answer = Answer()
    if data[:1] == _HEADER and data[1] < 0x80:  # as it always is; the rest can wait
        start = 2 + data[1]
        answer.revision = _revision(data[2:start])
        answer.ok = data[start : start + 2] == _SUCCEEDED
        answer.rest = data[start:]
    else:
        for field, value in _fields(data):
            if field == 1:
                assert isinstance(value, bytes)
                answer.revision = _revision(value)
            elif field == 2:
                answer.ok = bool(value)
        answer.rest = data
    return answer


def _read_part(data: bytes) -> Answer:
    """A ResponseOp."""
    for kind, value in _fields(data):
        assert isinstance(value, bytes)
        if kind == 1:
            return read_range(value)
        if kind == 4:
            return read_answer(value)
        if kind == 3:
            answer = Answer()
            for field, number in _fields(value):
                if field == 2:
                    assert isinstance(number, int)
                    answer.count = number
            return answer
    return Answer()


@_of_etcd
def read_range(data: bytes) -> Answer:
    """A RangeResponse."""
    answer = Answer()
    for field, value in _fields(data):
        if field == 2:
            assert isinstance(value, bytes)
            answer.found.append(KeyValue(value))
        elif field == 1:
            assert isinstance(value, bytes)
            answer.revision = _revision(value)
        elif field == 3:
            answer.more = bool(value)
        elif field == 4:
            assert isinstance(value, int)
            answer.count = value
    return answer


def _revision(header: bytes) -> int:
    """Of all its fields, which are numbers, the third."""
    at = 0
    while at < len(header):
        field = header[at] >> 3
        number = header[at + 1]
        at += 2
        if number >= 0x80:
            number, at = _long(header, at, number)
        if field == 3:
            return number
    return 0


@dataclasses.dataclass(slots=True, eq=False)
class EtcdLease:
    """The number of a lease, the seconds that it still has, and those that it was granted."""

    number: int = 0
    left: int = 0
    granted: int = 0


@_of_etcd
def read_lease(data: bytes) -> EtcdLease:
    """A LeaseGrantResponse, LeaseKeepAliveResponse or LeaseTimeToLiveResponse."""
    lease = EtcdLease()
    for field, value in _fields(data):
        if isinstance(value, int):
            if field == 2:
                lease.number = value
            elif field == 3:
                lease.left = value - (1 << 64) if value >> 63 else value
            elif field == 4:
                lease.granted = value
    return lease


@_of_etcd
def read_string(data: bytes, wanted: int) -> str:
    """A field of text."""
    for field, value in _fields(data):
        if field == wanted:
            assert isinstance(value, bytes)
            return value.decode()
    return ""


class WatchEvent:
    """A key that was put, or deleted (then it has a key and a revision, and nothing else)."""

    __slots__ = ("deleted", "kv")

    def __init__(self, data: bytes) -> None:
        """Decode the message."""
        self.deleted = False
        for field, value in _fields(data):
            if field == 1:
                self.deleted = bool(value)
            elif field == 2:
                assert isinstance(value, bytes)
                self.kv = KeyValue(value)


@dataclasses.dataclass(slots=True, eq=False)
class WatchAnswer:
    """One message of a stream of watches."""

    number: int = 0
    revision: int = 0
    compacted: int = 0
    created: bool = False
    canceled: bool = False
    reason: str = ""
    events: list[WatchEvent] = dataclasses.field(default_factory=list)


@_of_etcd
def read_watch(data: bytes) -> WatchAnswer:
    """A WatchResponse."""
    answer = WatchAnswer()
    for field, value in _fields(data):
        if field == 11:
            assert isinstance(value, bytes)
            answer.events.append(WatchEvent(value))
        elif field == 1:
            assert isinstance(value, bytes)
            answer.revision = _revision(value)
        elif field == 2:
            assert isinstance(value, int)
            answer.number = value if value < 1 << 63 else value - (1 << 64)  # -1: no number
        elif field == 3:
            answer.created = bool(value)
        elif field == 4:
            answer.canceled = bool(value)
        elif field == 5:
            assert isinstance(value, int)
            answer.compacted = value
        elif field == 6:
            assert isinstance(value, bytes)
            answer.reason = value.decode()
    return answer
