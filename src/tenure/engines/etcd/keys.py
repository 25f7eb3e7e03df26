"""Keys and values in etcd, and the prefix rule over a queue that was read.

Under the prefix, with ``:a:b`` for the node ``/a/b`` and names percent-encoded:

    base                          an order id is a revision plus this number
    serial                        put whenever a number for a session, or a node, is made
    n/:a:b                        a node; its configuration
    s/:a:b/SESSION                a session, under its lease; its record
    s/:a:b/SESSION/b/TOKEN        an attachment that may consider leases held
    s/:a:b/SESSION/h/HOLD         why a request of it was removed, for its session to read
    q/:a:b/NAME/limit             a lasting semaphore: its limit in 8 bytes, who created it, and
                                  which requests own since the limit was changed (`Limit`)
    q/:a:b/NAME/r/SESSION-HOLD    a request, under its session's lease: its count, and a mark
    d/:a:b/NAME                   a semaphore's data
    x/:a:b/NAME/SESSION-HOLD      a request's data, under its session's lease

Values that are read often are small, and data has separate keys. All keys that notify a session are
in one range, for one watch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from tenure.core.rules import fits
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import KeyValue
from tenure.model import EPHEMERAL_LIMIT, Liveness, NodeConfig

EVICTED, DELETED, TIMED_OUT = b"evicted", b"deleted", b"timed out"
"""Reasons in a note for a session whose request was removed. Another one is `resized`."""


def resized(limit: int) -> bytes:
    """Encode the reason of a waiter whose count is above the new limit."""
    return b"resized %d" % limit


class Limit(NamedTuple):
    """Limit of a semaphore.

    Attributes:
        tokens: the limit.
        owned: the requests created up to this revision own, even if they exceed the limit: they
            owned when it was changed.
        created, modified: revisions of its key; 0 for an ephemeral semaphore.
    """

    tokens: int
    owned: int = 0
    created: int = 0
    modified: int = 0


EPHEMERAL = Limit(EPHEMERAL_LIMIT)
"""The limit of every ephemeral semaphore."""


class Name:
    """The keys of one semaphore, and the parts of transactions that every request needs.

    Attributes:
        lasting: its limit, as last read; ``None`` if the semaphore is unknown or ephemeral. Every
            transaction that adds a request compares its revision.
    """

    def __init__(self, prefix: str, path: str, name: str) -> None:
        where = f"{_node(path)}/{quote(name, safe='')}"
        self.path = path
        self.name = name
        self.lasting: Limit | None = None
        self.all = f"{prefix}q/{where}/".encode()
        self.limit = self.all + b"limit"
        self.requests = self.all + b"r/"
        self.data = f"{prefix}d/{where}".encode()
        self.request_data = f"{prefix}x/{where}/".encode()
        # Prepared, since every request needs them.
        end = wire.after(self.requests)
        self.absent = wire.created_at(self.limit, wire.ABSENT)
        self.empty = wire.nothing_in(self.requests)
        self.drop_data = wire.delete(self.data)
        self.get_limit = wire.get(self.limit)
        self.first_request = wire.get(self.requests, end, limit=1)
        self.head = wire.get(self.requests, end, limit=1, oldest_first=True)
        self.newest_two = wire.get(self.requests, end, limit=2, newest_first=True)
        self.queue = wire.get(self.requests, end, oldest_first=True)

    def data_of(self, request: bytes) -> bytes:
        """Return the key of the data of a request, by the key of the request."""
        return self.request_data + request[len(self.requests) :]


class Keys:
    """The keys of one store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.prefix = prefix.encode()
        self.base = f"{prefix}base".encode()
        self.serial = f"{prefix}serial".encode()
        self.nodes = f"{prefix}n/".encode()

    def node(self, path: str) -> bytes:
        """Return the key of a node."""
        return f"{self._prefix}n/{_node(path)}".encode()

    def path(self, key: bytes) -> str:
        """Return the path of a node, by its key."""
        return key[len(self.nodes) :].decode().replace(":", "/")

    def sessions(self, path: str) -> bytes:
        """Return the prefix of the keys of a node's sessions."""
        return f"{self._prefix}s/{_node(path)}/".encode()

    def session(self, path: str, number: int) -> bytes:
        """Return the key of a session."""
        return b"%s%016x" % (self.sessions(path), number)

    def queues(self, path: str) -> bytes:
        """Return the prefix of the keys of a node's queues."""
        return f"{self._prefix}q/{_node(path)}/".encode()

    def data(self, path: str) -> bytes:
        """Return the prefix of the keys of the data of a node's semaphores."""
        return f"{self._prefix}d/{_node(path)}/".encode()

    def request_data(self, path: str) -> bytes:
        """Return the prefix of the keys of the data of a node's requests."""
        return f"{self._prefix}x/{_node(path)}/".encode()

    def name(self, path: str, name: str) -> Name:
        """Return the keys of a semaphore."""
        return Name(self._prefix, path, name)


def _node(path: str) -> str:
    return path.replace("/", ":")


def name_in(key: bytes) -> str:
    """Return the name in the part of a key after the node."""
    return unquote(key.decode())


# Sessions


@dataclass(frozen=True, slots=True)
class Record:
    """The stored record of a session.

    Attributes:
        token: the token of the attachment.
        attached: whether a client is attached.
        window: the recovery window in seconds.
        description: the description from its program.
        liveness: ``process`` or ``window``.
        key: its protection key.
    """

    token: str
    attached: bool
    window: float
    description: str
    liveness: Liveness
    key: bytes

    def claim(self, key: bytes) -> bytes:
        """Return the key that exists while the attachment may consider leases held."""
        return key + b"/b/" + self.token.encode()

    def value(self) -> bytes:
        """Encode the record."""
        return json.dumps({**asdict(self), "key": self.key.hex()}).encode()

    @staticmethod
    def read(value: bytes) -> Record:
        """Decode a stored record."""
        found = json.loads(value)
        return Record(**{**found, "key": bytes.fromhex(found["key"])})


# Nodes


def config_text(given: NodeConfig, nonce: str = "") -> bytes:
    """Encode a configuration; the nonce identifies the creator of the node."""
    return json.dumps({**asdict(given), "nonce": nonce}).encode()


def config_of(stored: bytes) -> tuple[NodeConfig, str]:
    """Decode a configuration and its nonce."""
    found = json.loads(stored)
    nonce = found.pop("nonce", "")
    return NodeConfig(**found), nonce


# Semaphores


def limit_value(limit: int, nonce: bytes, owned: int = 0) -> bytes:
    """Encode a limit; the nonce of 8 bytes identifies the semaphore's creator."""
    return limit.to_bytes(8, "big") + nonce + (owned.to_bytes(8, "big") if owned else b"")


def nonce_of(stored: bytes) -> bytes:
    """Return the nonce in an encoded limit."""
    return stored[8:16]


def limit_of(kv: KeyValue | None) -> Limit:
    """Decode a limit; without its key it is that of an ephemeral semaphore."""
    if kv is None:
        return EPHEMERAL
    tokens, owned = int.from_bytes(kv.value[:8], "big"), int.from_bytes(kv.value[16:24], "big")
    return Limit(tokens, owned, kv.created, kv.modified)


# Requests


class Entry:
    """A request as stored in its queue.

    Attributes:
        timeout: its timeout in seconds from when it was last put; ``None`` for no limit, or if it
            is marked as an owner.
    """

    __slots__ = (
        "count",
        "created",
        "key",
        "marked",
        "modified",
        "request_id",
        "session",
        "timeout",
    )

    def __init__(self, kv: KeyValue) -> None:
        count, _, mark = kv.value.partition(b" ")
        session, _, request_id = kv.key[kv.key.rindex(b"/") + 1 :].partition(b"-")
        self.key = kv.key
        self.created = kv.created
        self.modified = kv.modified
        self.session = int(session, 16)
        self.request_id = int(request_id, 16)
        self.count = int(count)
        self.marked = mark == b"g"
        self.timeout = int(mark[1:]) / 1000 if mark[:1] == b"t" else None


def request_value(count: int, *, marked: bool = False, timeout: float | None = None) -> bytes:
    """Encode a request."""
    if marked:
        return b"%d g" % count
    return b"%d" % count if timeout is None else b"%d t%d" % (count, round(1000 * timeout))


def entries(found: Iterable[KeyValue]) -> list[Entry]:
    """Return requests that were read, in the order of the queue."""
    return sorted(map(Entry, found), key=lambda each: each.created)


class Queue:
    """A semaphore's limit and its queue, as read."""

    __slots__ = ("limit", "limit_kv", "name", "owning", "requests")

    def __init__(self, name: str, limit: KeyValue | None, requests: list[Entry]) -> None:
        self.name = name
        self.limit_kv = limit
        self.limit = limit_of(limit)
        self.requests = requests
        self.owning = number_owning(requests, self.limit)

    @property
    def exists(self) -> bool:
        """True if the semaphore exists."""
        return self.limit_kv is not None or bool(self.requests)


def queues(found: Iterable[KeyValue], prefix: bytes) -> list[Queue]:
    """Return the semaphores of the keys under `Keys.queues`, sorted by name."""
    limits: dict[bytes, KeyValue] = {}
    requests: dict[bytes, list[KeyValue]] = {}
    for kv in found:
        name, _, what = kv.key[len(prefix) :].partition(b"/")
        of_name = requests.setdefault(name, [])
        if what == b"limit":
            limits[name] = kv
        else:
            of_name.append(kv)
    every = [Queue(name_in(each), limits.get(each), entries(requests[each])) for each in requests]
    return sorted(every, key=lambda each: each.name)


def number_owning(queue: Sequence[Entry], limit: Limit) -> int:
    """Count the owners: the longest prefix of the queue whose counts fit in the limit.

    Requests that owned when the limit was changed own in any case.
    """
    held, whole = 0, False
    for number, entry in enumerate(queue):
        if entry.created > limit.owned and not fits(held, whole, entry.count, limit.tokens):
            return number
        held += entry.count
        whole = entry.count == limit.tokens
    return len(queue)


def has_room(queue: Sequence[Entry], count: int, limit: Limit) -> bool:
    """Return true if a request for so many would be an owner at the end of this queue."""
    held = sum(each.count for each in queue)
    whole = any(each.count == limit.tokens for each in queue)
    return number_owning(queue, limit) == len(queue) and fits(held, whole, count, limit.tokens)


def note(session_key: bytes, entry: Entry, why: bytes = DELETED) -> bytes:
    """Encode a note for a session that one of its requests was removed."""
    return wire.put(session_key + b"/h/%x" % entry.request_id, why, entry.session)


def taking_out(name: Name, entry: Entry, session_key: bytes, why: bytes) -> tuple[bytes, ...]:
    """Encode the operations that remove a request from its queue, with a note for its session."""
    data = name.data_of(entry.key)
    return wire.delete(entry.key), wire.delete(data), note(session_key, entry, why)
