"""Messages to etcd, encoded by hand.

They are the Protocol Buffers of etcd's ``rpc.proto`` and ``kv.proto``. The hot path joins parts
that are encoded once, which message libraries do not support. No names are registered that could
collide with the messages of another package. `tenure.engines.etcd.answers` decodes.
"""

from __future__ import annotations

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
    """Return the end of the range of all keys with a prefix that does not end in 0xff."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


# Protocol Buffers


def varint(number: int) -> bytes:
    """Encode a number in as many bytes as it needs."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def integer(field: int, number: int) -> bytes:
    """Encode a field of a number, even if it is zero."""
    return varint(field << 3) + varint(number)


def octets(field: int, value: bytes) -> bytes:
    """Encode a field of bytes, a text or a message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


# Comparisons of a transaction


def _compare(result: int, target: int, key: bytes, number: int, end: bytes | None = None) -> bytes:
    body = integer(1, result) + integer(2, target) + octets(3, key) + integer(4 + target, number)
    return octets(1, body if end is None else body + octets(64, end))


def version_is(key: bytes, number: int) -> bytes:
    """Compare: the key was put that many times since its creation."""
    return _compare(_EQUAL, _VERSION, key, number)


def created_at(key: bytes, revision: int) -> bytes:
    """Compare: the key was created at this revision; 0: it does not exist."""
    return _compare(_EQUAL, _CREATE, key, revision)


ABSENT = 0
"""The create revision of a key that does not exist."""


def exists(key: bytes) -> bytes:
    """Compare: the key exists."""
    return _compare(_GREATER, _CREATE, key, 0)


def nothing_in(prefix: bytes) -> bytes:
    """Compare: no key has this prefix."""
    return _compare(_EQUAL, _CREATE, prefix, 0, after(prefix))


def created_before(prefix: bytes, revision: int) -> bytes:
    """Compare: no key with this prefix was created at this revision or later."""
    return _compare(_LESS, _CREATE, prefix, revision, after(prefix))


def modified_before(prefix: bytes, revision: int) -> bytes:
    """Compare: no key with this prefix was put at this revision or later."""
    return _compare(_LESS, _MOD, prefix, revision, after(prefix))


def modified_at(key: bytes, revision: int) -> bytes:
    """Compare: the key was last put at this revision; 0: it does not exist."""
    return _compare(_EQUAL, _MOD, key, revision)


# Operations of a transaction


def range_(key: bytes) -> bytes:
    """Encode a RangeRequest for one key."""
    return octets(1, key)


def get(
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
    """Encode a read of a key, or of a range in an order of creation.

    Args:
        key: the key, or the beginning of the range.
        end: the end of the range.
        limit: maximum number of keys; 0: all.
        revision: the revision to read at; 0: the newest.
        oldest_first: whether to sort in the order of creation.
        newest_first: whether to sort in the reverse order of creation.
        created_until: the last create revision of the keys to read; 0: any.
        keys_only: whether to omit the values.
        count_only: whether to omit the keys.
    """
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
    return octets(1, body)


def get_all(prefix: bytes, *, keys_only: bool = False, count_only: bool = False) -> bytes:
    """Encode a read of all keys with a prefix."""
    return get(prefix, after(prefix), keys_only=keys_only, count_only=count_only)


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """Encode a write, under a lease if it is not 0."""
    body = octets(1, key) + octets(2, value)
    return octets(2, body + integer(3, lease) if lease else body)


def delete(key: bytes, end: bytes = b"") -> bytes:
    """Encode the deletion of a key, or of a range."""
    body = octets(1, key)
    return octets(3, body + octets(2, end) if end else body)


def nested(transaction: bytes) -> bytes:
    """Encode a transaction as an operation of another one."""
    return octets(4, transaction)


def txn(
    compares: tuple[bytes, ...],
    then: tuple[bytes, ...],
    otherwise: tuple[bytes, ...] = (),
) -> bytes:
    """Encode a transaction: `then` if all of `compares` hold, else `otherwise`."""
    return b"".join(
        (
            *compares,
            *[octets(2, each) for each in then],
            *[octets(3, each) for each in otherwise],
        )
    )


# Leases, watches, and authentication


def lease(number: int) -> bytes:
    """Encode a request to revoke a lease, to keep it alive, or to read its time to live."""
    return integer(1, number)


def grant(number: int, seconds: int) -> bytes:
    """Encode a LeaseGrantRequest."""
    return integer(1, seconds) + integer(2, number)


def watch(number: int, key: bytes, end: bytes, revision: int, *, puts: bool) -> bytes:
    """Encode the start of a watch at a revision."""
    body = octets(1, key)
    if end:
        body += octets(2, end)
    body += integer(3, revision)
    if not puts:
        body += integer(5, _NO_PUTS)
    return octets(1, body + integer(7, number))


def unwatch(number: int) -> bytes:
    """Encode the end of a watch."""
    return octets(2, integer(1, number))


def authenticate(user: str, password: str) -> bytes:
    """Encode an AuthenticateRequest."""
    return octets(1, user.encode()) + octets(2, password.encode())
