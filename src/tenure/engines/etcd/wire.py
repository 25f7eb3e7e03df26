"""The few messages that this engine sends to etcd, encoded by hand.

Protocol Buffers, as in etcd's ``rpc.proto`` and ``kv.proto``. The hot path is made of pieces that
are encoded once and joined, which no library of messages does; and no name is registered that
another package's messages would collide with. What comes back is in `tenure.engines.etcd.answers`.
"""

from __future__ import annotations

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
    "after",
    "authenticate",
    "created_at",
    "created_before",
    "delete",
    "exists",
    "get",
    "grant",
    "integer",
    "lease",
    "modified_at",
    "modified_before",
    "nested",
    "nothing_in",
    "octets",
    "put",
    "range_",
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

_EQUAL, _GREATER, _LESS = 0, 1, 2
_VERSION, _CREATE, _MOD = 0, 1, 2
_ASCENDING, _DESCENDING, _BY_CREATION = 1, 2, 2
_NO_PUTS = 0


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix, which does not end in 0xff."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


# Protocol Buffers


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


# What a transaction compares


def _compare(
    result: int, target: int, key: bytes, operand: bytes, end: bytes | None = None
) -> bytes:
    body = integer(1, result) + integer(2, target) + octets(3, key) + operand
    return octets(1, body if end is None else body + octets(64, end))


def version_is(key: bytes, number: int) -> bytes:
    """The key has been put so often since it was created."""
    return _compare(_EQUAL, _VERSION, key, integer(4, number))


def created_at(key: bytes, revision: int) -> bytes:
    """The key was created at this revision; 0: there is no such key."""
    return _compare(_EQUAL, _CREATE, key, integer(5, revision))


ABSENT = 0
"""The revision at which what does not exist was created."""


def exists(key: bytes) -> bytes:
    """Compare: the key exists."""
    return _compare(_GREATER, _CREATE, key, integer(5, 0))


def nothing_in(prefix: bytes) -> bytes:
    """Compare: no key has this prefix."""
    return _compare(_EQUAL, _CREATE, prefix, integer(5, 0), after(prefix))


def created_before(prefix: bytes, revision: int) -> bytes:
    """No key with this prefix was created at this revision or later."""
    return _compare(_LESS, _CREATE, prefix, integer(5, revision), after(prefix))


def modified_before(prefix: bytes, revision: int) -> bytes:
    """No key with this prefix was put at this revision or later."""
    return _compare(_LESS, _MOD, prefix, integer(6, revision), after(prefix))


def modified_at(key: bytes, revision: int) -> bytes:
    """The key was last put at this revision; 0: there is no such key."""
    return _compare(_EQUAL, _MOD, key, integer(6, revision))


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
    body = octets(1, key)
    if end:
        body += octets(2, end)
    if limit:
        body += integer(3, limit)
    if revision:
        body += integer(4, revision)
    if oldest_first or newest_first:
        body += integer(5, _DESCENDING if newest_first else _ASCENDING) + integer(6, _BY_CREATION)
    if keys_only:
        body += integer(8, 1)
    if count_only:
        body += integer(9, 1)
    if created_until:
        body += integer(13, created_until)
    return body


def get(request: bytes) -> bytes:
    """To read; `request` is what `range_` made."""
    return octets(1, request)


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """To write, under a lease if it is not 0."""
    body = octets(1, key) + octets(2, value)
    return octets(2, body + integer(3, lease) if lease else body)


def delete(key: bytes, end: bytes = b"") -> bytes:
    """To delete a key, or a range."""
    body = octets(1, key)
    return octets(3, body + octets(2, end) if end else body)


def nested(transaction: bytes) -> bytes:
    """To do a transaction inside another one."""
    return octets(4, transaction)


def txn(
    compares: tuple[bytes, ...],
    then: tuple[bytes, ...],
    otherwise: tuple[bytes, ...] = (),
) -> bytes:
    """If all of `compares` hold, do `then`, and `otherwise` if not."""
    return b"".join(
        (
            *compares,
            *[octets(2, each) for each in then],
            *[octets(3, each) for each in otherwise],
        )
    )


# Leases, watches, and authentication


def lease(number: int) -> bytes:
    """To revoke a lease, or keep it alive."""
    return integer(1, number)


def grant(number: int, seconds: int) -> bytes:
    """A LeaseGrantRequest."""
    return integer(1, seconds) + integer(2, number)


def time_to_live(number: int) -> bytes:
    """A LeaseTimeToLiveRequest."""
    return integer(1, number)


def watch(number: int, key: bytes, end: bytes, revision: int, *, puts: bool) -> bytes:
    """To begin a watch of what happens from that revision on."""
    body = octets(1, key)
    if end:
        body += octets(2, end)
    body += integer(3, revision)
    if not puts:
        body += integer(5, _NO_PUTS)
    return octets(1, body + integer(7, number))


def unwatch(number: int) -> bytes:
    """To end a watch."""
    return octets(2, integer(1, number))


def authenticate(user: str, password: str) -> bytes:
    """An AuthenticateRequest."""
    return octets(1, user.encode()) + octets(2, password.encode())
