"""The few messages of etcd's API that this engine speaks, encoded and decoded by hand.

Protocol Buffers, as in etcd's ``rpc.proto`` and ``kv.proto``. The hot path is made of pieces that
are encoded once and joined, which no library of messages does; and no name is registered that
another package's messages would collide with. Encoders return bytes; what is decoded are slotted
objects with the few fields that are used. Unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = [
    "ABSENT",
    "AUTHENTICATE",
    "KEEP_ALIVE",
    "LEASE_GRANT",
    "LEASE_REVOKE",
    "RANGE",
    "STATUS",
    "TIME_TO_LIVE",
    "TXN",
    "WATCH",
    "Answer",
    "Event",
    "KeyValue",
    "Lease",
    "WatchAnswer",
    "after",
    "authenticate",
    "created_at",
    "created_before",
    "delete",
    "exists",
    "get",
    "grant",
    "lease",
    "modified_at",
    "modified_before",
    "nested",
    "nothing_in",
    "put",
    "range_",
    "read_answer",
    "read_lease",
    "read_range",
    "read_string",
    "read_watch",
    "time_to_live",
    "txn",
    "unwatch",
    "version_is",
    "watch",
]

RANGE = "/etcdserverpb.KV/Range"
TXN = "/etcdserverpb.KV/Txn"
LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
TIME_TO_LIVE = "/etcdserverpb.Lease/LeaseTimeToLive"
WATCH = "/etcdserverpb.Watch/Watch"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"
STATUS = "/etcdserverpb.Maintenance/Status"

_HEADER, _SUCCEEDED = b"\x0a", b"\x10\x01"
_EQUAL, _GREATER, _LESS = 0, 1, 2
_VERSION, _CREATE, _MOD = 0, 1, 2
_ASCENDING, _DESCENDING, _BY_CREATION = 1, 2, 2
_NO_PUTS = 0


# Encoding


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _int(field: int, number: int) -> bytes:
    """A number, written even if it is zero."""
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix, which does not end in 0xff."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


# What a transaction compares


def _compare(
    result: int, target: int, key: bytes, operand: bytes, end: bytes | None = None
) -> bytes:
    body = _int(1, result) + _int(2, target) + _bytes(3, key) + operand
    return _bytes(1, body if end is None else body + _bytes(64, end))


def version_is(key: bytes, number: int) -> bytes:
    """The key has been put so often since it was created."""
    return _compare(_EQUAL, _VERSION, key, _int(4, number))


def created_at(key: bytes, revision: int) -> bytes:
    """The key was created at this revision; 0: there is no such key."""
    return _compare(_EQUAL, _CREATE, key, _int(5, revision))


ABSENT = 0
"""The revision at which what does not exist was created."""


def exists(key: bytes) -> bytes:
    """There is such a key."""
    return _compare(_GREATER, _CREATE, key, _int(5, 0))


def nothing_in(prefix: bytes) -> bytes:
    """There is no key with this prefix."""
    return _compare(_EQUAL, _CREATE, prefix, _int(5, 0), after(prefix))


def created_before(prefix: bytes, revision: int) -> bytes:
    """No key with this prefix was created at this revision or later."""
    return _compare(_LESS, _CREATE, prefix, _int(5, revision), after(prefix))


def modified_before(prefix: bytes, revision: int) -> bytes:
    """No key with this prefix was put at this revision or later."""
    return _compare(_LESS, _MOD, prefix, _int(6, revision), after(prefix))


def modified_at(key: bytes, revision: int) -> bytes:
    """The key was last put at this revision; 0: there is no such key."""
    return _compare(_EQUAL, _MOD, key, _int(6, revision))


# What a transaction does


def range_(
    key: bytes,
    end: bytes = b"",
    *,
    limit: int = 0,
    revision: int = 0,
    oldest_first: bool = False,
    newest_first: bool = False,
    created_until: int = 0,
    keys_only: bool = False,
    count_only: bool = False,
) -> bytes:
    """A RangeRequest. `created_until`: only keys that were created at that revision or before."""
    body = _bytes(1, key)
    if end:
        body += _bytes(2, end)
    if limit:
        body += _int(3, limit)
    if revision:
        body += _int(4, revision)
    if oldest_first or newest_first:
        body += _int(5, _DESCENDING if newest_first else _ASCENDING) + _int(6, _BY_CREATION)
    if keys_only:
        body += _int(8, 1)
    if count_only:
        body += _int(9, 1)
    if created_until:
        body += _int(13, created_until)
    return body


def get(request: bytes) -> bytes:
    """To read; `request` is what `range_` made."""
    return _bytes(1, request)


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """To write, under a lease if it is not 0."""
    body = _bytes(1, key) + _bytes(2, value)
    return _bytes(2, body + _int(3, lease) if lease else body)


def delete(key: bytes, end: bytes = b"") -> bytes:
    """To delete a key, or a range."""
    body = _bytes(1, key)
    return _bytes(3, body + _bytes(2, end) if end else body)


def nested(transaction: bytes) -> bytes:
    """To do a transaction inside another one."""
    return _bytes(4, transaction)


def txn(
    compares: tuple[bytes, ...],
    then: tuple[bytes, ...],
    otherwise: tuple[bytes, ...] = (),
) -> bytes:
    """If all of `compares` hold, do `then`, and `otherwise` if not."""
    return b"".join(
        (
            *compares,
            *[_bytes(2, each) for each in then],
            *[_bytes(3, each) for each in otherwise],
        )
    )


# Leases, watches, and who asks


def lease(number: int) -> bytes:
    """To revoke a lease, or keep it alive."""
    return _int(1, number)


def grant(number: int, seconds: int) -> bytes:
    """A LeaseGrantRequest."""
    return _int(1, seconds) + _int(2, number)


def time_to_live(number: int) -> bytes:
    """A LeaseTimeToLiveRequest."""
    return _int(1, number)


def watch(number: int, key: bytes, end: bytes, revision: int, *, puts: bool) -> bytes:
    """To begin a watch of what happens from that revision on."""
    body = _bytes(1, key)
    if end:
        body += _bytes(2, end)
    body += _int(3, revision)
    if not puts:
        body += _int(5, _NO_PUTS)
    return _bytes(1, body + _int(7, number))


def unwatch(number: int) -> bytes:
    """To end a watch."""
    return _bytes(2, _int(1, number))


def authenticate(user: str, password: str) -> bytes:
    """An AuthenticateRequest."""
    return _bytes(1, user.encode()) + _bytes(2, password.encode())


# Decoding


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


class KeyValue:
    """A key with its value, when it was created and last put, and how often since."""

    __slots__ = ("created", "key", "lease", "modified", "value", "version")

    def __init__(self, data: bytes) -> None:
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


class Answer:
    """What a transaction, or a part of one, answers.

    Attributes:
        revision: of the store, when it was carried out.
        ok: whether everything that was compared held.
        parts: what each of the things that were done answered; decoded when it is asked for.
        rest: what they are decoded from.
        found: the keys that were read.
        count: how many there are (of a range), or were deleted.
        more: whether there are more than were asked for.
    """

    __slots__ = ("_parts", "count", "found", "more", "ok", "rest", "revision")

    def __init__(self) -> None:
        self.revision = 0
        self.ok = False
        self.rest = b""
        self._parts: list[Answer] | None = None
        self.found: list[KeyValue] = []
        self.count = 0
        self.more = False

    @property
    def parts(self) -> list[Answer]:
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


class Lease:
    """What is answered about a lease: its number, the seconds that it still has, and had."""

    __slots__ = ("granted", "left", "number")

    def __init__(self) -> None:
        self.number = 0
        self.left = 0
        self.granted = 0


def read_lease(data: bytes) -> Lease:
    """A LeaseGrantResponse, LeaseKeepAliveResponse or LeaseTimeToLiveResponse."""
    lease = Lease()
    for field, value in _fields(data):
        if isinstance(value, int):
            if field == 2:
                lease.number = value
            elif field == 3:
                lease.left = value - (1 << 64) if value >> 63 else value
            elif field == 4:
                lease.granted = value
    return lease


def read_string(data: bytes, wanted: int) -> str:
    """A field of text."""
    for field, value in _fields(data):
        if field == wanted:
            assert isinstance(value, bytes)
            return value.decode()
    return ""


class Event:
    """A key that was put, or deleted (then it has a key and a revision, and nothing else)."""

    __slots__ = ("deleted", "kv")

    def __init__(self, data: bytes) -> None:
        self.deleted = False
        for field, value in _fields(data):
            if field == 1:
                self.deleted = bool(value)
            elif field == 2:
                assert isinstance(value, bytes)
                self.kv = KeyValue(value)


class WatchAnswer:
    """One message of a stream of watches."""

    __slots__ = ("canceled", "compacted", "created", "events", "number", "reason", "revision")

    def __init__(self) -> None:
        self.number = self.revision = self.compacted = 0
        self.created = self.canceled = False
        self.reason = ""
        self.events: list[Event] = []


def read_watch(data: bytes) -> WatchAnswer:
    """A WatchResponse."""
    answer = WatchAnswer()
    for field, value in _fields(data):
        if field == 11:
            assert isinstance(value, bytes)
            answer.events.append(Event(value))
        elif field == 1:
            assert isinstance(value, bytes)
            answer.revision = _revision(value)
        elif field == 2:
            assert isinstance(value, int)
            answer.number = value if value < 1 << 63 else value - (1 << 64)  # -1 is none
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
