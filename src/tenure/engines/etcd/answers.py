"""Answers and watch events of etcd, decoded by hand (see `tenure.engines.etcd.wire`).

The decoders make slotted objects with the few fields that the engine reads. Other fields are
skipped, except those of a `KeyValue`, which are all known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from operator import index
from typing import Any, ParamSpec, TypeAlias, TypeVar

from tenure.engines._kit.reconnect import backoff
from tenure.engines.etcd.grpc import CallFailed, Code
from tenure.errors import AuthenticationFailed, EngineError, InvalidArgument, TenureError

T = TypeVar("T")

_MAY_PASS = frozenset(
    {
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
        Code.CANCELLED,
        Code.UNKNOWN,
        Code.INTERNAL,
        Code.ABORTED,
    }
)

_LONGEST_PAUSE = 0.5

_REFUSALS: tuple[tuple[tuple[str, ...], type[TenureError], str], ...] = (
    (
        ("user name",),
        AuthenticationFailed,
        (
            "{url} refused the account: {reason}. Use a user that may read and write all keys "
            "under the prefix"
        ),
    ),
    (
        ("space exceeded",),
        EngineError,
        (
            "{url} has no space left: {reason}. Nothing is granted until it is compacted and "
            "defragmented and the alarm is disarmed (etcdctl compact, defrag, alarm disarm)"
        ),
    ),
    (
        ("too large", "larger than max"),
        InvalidArgument,
        (
            "{url} refused a request of this size: {reason}. Store less data, or start the members "
            "with a larger --max-request-bytes"
        ),
    ),
    (
        ("too many operations",),
        EngineError,
        (
            "{url} accepts fewer operations in a transaction than its default, 128: {reason}. "
            "Start the members with a larger --max-txn-ops"
        ),
    ),
)
"""Parts of etcd's reasons, the error, and its message; the first matching row counts."""


class Lost(Exception):
    """A call without an answer. It may have been carried out, or may be carried out later."""


class Refused(Exception):
    """A call that was rejected, and not carried out.

    Attributes:
        code: the status.
        reason: etcd's message.
    """

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason

    @property
    def no_lease(self) -> bool:
        """True if the lease does not exist: it expired, or was revoked."""
        return "lease not found" in self.reason

    @property
    def compacted(self) -> bool:
        """True if the requested revision was compacted."""
        return self.code is Code.OUT_OF_RANGE


class StaleToken(Exception):
    """The token of the account is no longer valid."""


def failure(
    url: str, refused: Refused, *, node: str | None = None, name: str | None = None
) -> TenureError:
    """Return the program's error for a rejection."""
    reason = refused.reason
    of_account = refused.code in {Code.PERMISSION_DENIED, Code.UNAUTHENTICATED}
    kind: type[TenureError] = EngineError
    message = "{url} refused the request: {reason}"
    for parts, error, text in _REFUSALS:
        if of_account or any(part in reason for part in parts):
            kind, message = error, text
            break
    return kind(message.format(url=url, reason=reason), node=node, name=name)


def trouble_of(failed: CallFailed) -> Exception:
    """Classify a failed call as `Lost`, `Refused` or `StaleToken`."""
    code, reason = failed.code, " ".join(str(failed).split())
    if "invalid auth token" in reason or "auth store is old" in reason:
        return StaleToken(reason)
    if code in _MAY_PASS or "too many requests" in reason:
        return Lost(reason)
    return Refused(code, reason)


def pauses() -> Iterator[float]:
    """Return the seconds to wait after each unanswered attempt."""
    return (backoff(attempt, _LONGEST_PAUSE) for attempt in itertools.count())


P = ParamSpec("P")

_HEADER, _SUCCEEDED = b"\x0a", b"\x10\x01"


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Return the fields of a message: the number, and the value as an integer or bytes."""
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
    """Decode the rest of a number of several bytes."""
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


_Fields: TypeAlias = Mapping[int, tuple[str, Callable[[Any], Any]]]
"""By field number: the attribute that it sets, or is appended to, and its decoder."""


def _decode(into: T, data: bytes, fields: _Fields) -> T:
    """Set the attributes of a message."""
    for number, value in _fields(data):
        if number in fields:
            name, decode = fields[number]
            present = getattr(into, name)
            if isinstance(present, list):
                present.append(decode(value))
            else:
                setattr(into, name, decode(value))
    return into


def _signed(number: int) -> int:
    return index(number) - (1 << 64) if number >> 63 else index(number)


def _checked(read: Callable[P, T]) -> Callable[P, T]:
    """Raise `EngineError` for bytes that are not such a message."""

    @wraps(read)
    def reads(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return read(*arguments, **named)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                "an answer cannot be decoded. Check that the URL names etcd servers"
            ) from error

    return reads


class KeyValue:
    """A key with its value, its create and modification revisions, and its version."""

    __slots__ = ("created", "key", "lease", "modified", "value", "version")

    def __init__(self, data: bytes) -> None:
        self.key = self.value = b""
        self.created = self.modified = self.version = self.lease = 0
        for field, value in _fields(data):
            setattr(self, _OF_KEY_VALUE[field], value)


_OF_KEY_VALUE = ("", "key", "created", "modified", "version", "value", "lease")


@dataclasses.dataclass(slots=True, eq=False)
class Answer:
    """The answer to a transaction, or to a part of one.

    Attributes:
        revision: the store's revision at the transaction.
        ok: whether all comparisons held.
        parts: the answers to its operations; decoded when they are first read.
        rest: the encoded parts.
        found: the keys that were read.
        count: number of keys in the range, or deleted.
        more: whether the limit of the request omitted some.
    """

    revision: int = 0
    ok: bool = False
    rest: bytes = b""
    found: list[KeyValue] = dataclasses.field(default_factory=list)
    count: int = 0
    more: bool = False
    _parts: list[Answer] | None = None

    @property
    def parts(self) -> list[Answer]:
        """Answers to the parts of the transaction."""
        if self._parts is None:
            self._parts = _read_parts(self.rest)
        return self._parts

    @property
    def first(self) -> KeyValue | None:
        """The first key that was read."""
        return self.found[0] if self.found else None


@_checked
def read_answer(data: bytes) -> Answer:
    """Decode a TxnResponse."""
    if data[:1] != _HEADER or data[1] >= 0x80:  # etcd sends it otherwise
        return _decode(Answer(rest=data), data, {1: ("revision", _revision), 2: ("ok", bool)})
    start = 2 + data[1]
    ok = data[start : start + 2] == _SUCCEEDED
    return Answer(_revision(data[2:start]), ok, data[start:])


@_checked
def read_range(data: bytes) -> Answer:
    """Decode a RangeResponse."""
    return _decode(Answer(), data, _RANGE)


def _read_deleted(data: bytes) -> Answer:
    return _decode(Answer(), data, {2: ("count", index)})


@_checked
def _read_parts(data: bytes) -> list[Answer]:
    """Decode the ResponseOps of a TxnResponse."""
    return [
        _PARTS[kind](part)
        for field, response in _fields(data)
        if field == 3
        for kind, part in _fields(response)
    ]


def _revision(header: bytes) -> int:
    """Return the third field of a header, whose fields are all numbers."""
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


_RANGE: _Fields = {
    1: ("revision", _revision),
    2: ("found", KeyValue),
    3: ("more", bool),
    4: ("count", index),
}
_PARTS: Mapping[int, Callable[[Any], Answer]] = {
    1: read_range,
    2: lambda _: Answer(),
    3: _read_deleted,
    4: read_answer,
}


@dataclasses.dataclass(slots=True, eq=False)
class EtcdLease:
    """A lease: its number, the remaining seconds, and the granted seconds."""

    number: int = 0
    left: int = 0
    granted: int = 0


@_checked
def read_lease(data: bytes) -> EtcdLease:
    """Decode a LeaseKeepAliveResponse or LeaseTimeToLiveResponse."""
    fields: _Fields = {2: ("number", index), 3: ("left", _signed), 4: ("granted", index)}
    return _decode(EtcdLease(), data, fields)


@_checked
def read_string(data: bytes, number: int) -> str:
    """Decode one field of text."""
    found = [value for field, value in _fields(data) if field == number]
    return bytes.decode(found[0]) if found else ""


class WatchEvent:
    """A key that was put, or deleted (then only with its key and revision)."""

    __slots__ = ("deleted", "kv")

    def __init__(self, data: bytes) -> None:
        self.deleted = False
        for field, value in _fields(data):
            if field == 1:
                self.deleted = bool(value)
            elif field == 2:
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


_WATCH: _Fields = {
    1: ("revision", _revision),
    2: ("number", _signed),  # -1: no number
    3: ("created", bool),
    4: ("canceled", bool),
    5: ("compacted", index),
    6: ("reason", bytes.decode),
    11: ("events", WatchEvent),
}


@_checked
def read_watch(data: bytes) -> WatchAnswer:
    """Decode a WatchResponse."""
    return _decode(WatchAnswer(), data, _WATCH)
