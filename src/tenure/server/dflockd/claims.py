"""Keys, their claims, and the sessions that hold these claims in the store.

A *claim* is one request in a key's queue. The request's data is a `ClaimRecord` of its lease and
its deadline, so that another server can take it over. Any client can read that data, and a token
suffices for a release. So the record contains the token's *seal*, from which the token cannot be
derived.

A *holder* is a session of the store, for one connection. Rules:

* The store decides: a claim is held when the store has granted it, and ends with its session.
* A lease is promised only for as long as the session is known to live (`can_promise`). A session
  that may have expired counts as ended (`lapsed`).
* A grant is reported to the client only if the session was proven recently. After an outage another
  listener may have taken over the session, and its grants may be outdated.
* A holder may have no connection: its client has disconnected and its claims are kept for their
  leases, or it was found in the store after a restart.

**Names** of keys are bytes on the wire, and text in the store. A key is any bytes without white
space. In the server it is a `str` in which a byte that is not UTF-8 is a lone surrogate, by the
error handler ``surrogateescape``. A name in the store is text:

* A key that is UTF-8 is its own name.
* Any other key is ``bytes`` and a space, then the key with each byte that is not UTF-8 as ``%E9``,
  and ``%`` as ``%25``. No key contains a space, so no other key has this name.

Each key has one name, and each name at most one key. The longest name has 774 bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from tenure.engines.contract import EngineSession, Removal
from tenure.errors import SessionExpired
from tenure.model import Recovered
from tenure.wire.lines import ERROR, ERROR_NOT_ENQUEUED, LINE_BYTES, TIMEOUT, is_key

_MARK = "bytes "
_TO_ESCAPE = re.compile("[%\udc80-\udcff]")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")


def stored_name(key: str) -> str:
    """Return the name of a key in the store."""
    if key.isascii() or _is_text(key):
        return key
    return _MARK + _TO_ESCAPE.sub(lambda each: f"%{ord(each[0]) & 0xFF:02X}", key)


def key_of(name: str) -> str | None:
    """Return the key of a name in the store; ``None`` if no key has it."""
    key = name
    if name.startswith(_MARK):
        escaped = name[len(_MARK) :].encode()
        raw = _ESCAPED.sub(lambda each: bytes([int(each[1], 16)]), escaped)
        key = raw.decode("utf-8", "surrogateescape")
        if stored_name(key) != name:
            return None
    fits = len(key.encode("utf-8", "surrogateescape")) <= LINE_BYTES
    return key if fits and is_key(key) else None


def readable(key: str) -> str:
    """Return a key as text for people, with a replacement character for invalid bytes."""
    return key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


MARK = b"dflockd"
"""Data of a semaphore that was created for a key, and may be deleted when it is unused."""

LAPSED = "the store has not been reached for too long"

_RECORD = re.compile(rb"dflockd2 ([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,17})")
_BEFORE = re.compile(rb"dflockd ([0-9a-f]{16}) ([0-9]{1,10}) ([0-9]{1,17})")  # with the salt itself


def sealed(salt: str, name: str) -> str:
    """Return the seal of a token for the key `name`: the hash of its salt, as 32 hex digits.

    The name is hashed too, so that an attacker must search the salts for each key separately.
    """
    text = (salt + name).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16, person=b"tenure dflockd").hexdigest()


class ClaimRecord(NamedTuple):
    """The data of a request.

    Attributes:
        seal: the seal of its token (`sealed`).
        lease: the lease in seconds.
        until: end of the lease in milliseconds since the Unix epoch, counted from the request or
            the last renewal. If the request waited, and was not renewed since, the lease ends
            later.
    """

    seal: str
    lease: int
    until: int

    def to_bytes(self) -> bytes:
        """Encode the record as a request's data."""
        return b"dflockd2 %b %d %d" % (self.seal.encode(), self.lease, self.until)

    @classmethod
    def of(cls, data: bytes, name: str) -> ClaimRecord | None:
        """Read the data of a request for the key `name`; ``None`` if no server wrote it.

        Servers before 0.2 wrote the salt itself. It is sealed here, and with the next renewal in
        the store.
        """
        match = _RECORD.fullmatch(data)
        if match is not None:
            seal, lease, until = match.groups()
            return cls(seal.decode(), int(lease), int(until))
        match = _BEFORE.fullmatch(data)
        if match is None:
            return None
        salt, lease, until = match.groups()
        return cls(sealed(salt.decode(), name), int(lease), int(until))


class ClaimStage(IntEnum):
    """State of a claim."""

    REQUESTED = 0  # the store has not answered
    WAITING = 1
    HELD = 2
    OVER = 3


REQUESTED, WAITING, HELD, OVER = ClaimStage  # module globals, for speed


class Key:
    """A key that is in use, or was recently.

    Attributes:
        name: the key, as on the wire.
        stored: its name in the store.
        limit: maximum number of holders; for 1 its semaphore is a mutex, else a lasting one.
        made: whether that lasting semaphore exists, as far as known.
        claims: the claims of this server's clients.
        waiting: number of waiting claims.
        used_at: time at which its last claim ended.
    """

    __slots__ = ("claims", "limit", "made", "name", "stored", "used_at", "waiting")

    def __init__(self, name: str, limit: int, now: float) -> None:
        """Start without claims, last used at `now`."""
        self.name = name
        self.stored = stored_name(name)
        self.limit = limit
        self.made = False
        self.claims: set[Claim] = set()
        self.waiting = 0
        self.used_at = now


class Claim:
    """One request in a key's queue.

    Attributes:
        request_id: its id within its holder's session.
        lease: the lease in seconds.
        stage: its state.
        salt: the random part of its token; empty if another server granted it, until its client
            sends the token.
        seal: the seal of its token.
        token: the token, once it is held and the salt is known; else empty.
        order_id: the fencing token, if another server granted it; else 0.
        deadline: end of the lease, once it is held.
        verdict: after its end, the reply to a waiting client; empty if its semaphore did not exist,
            and it must be requested again.
    """

    deadline: float
    verdict: bytes

    __slots__ = (
        "deadline",
        "holder",
        "key",
        "lease",
        "order_id",
        "request_id",
        "salt",
        "seal",
        "stage",
        "token",
        "verdict",
    )

    def __init__(
        self, key: Key, holder: Holder, request_id: int, lease: int, seal: str, salt: str = ""
    ) -> None:
        self.key = key
        self.holder = holder
        self.request_id = request_id
        self.salt = salt
        self.seal = seal
        self.token = ""
        self.order_id = 0
        self.lease = lease
        self.stage = REQUESTED


class ClaimTable(Protocol):
    """Table of the claims, which handles the store's events."""

    @property
    def now(self) -> Callable[[], float]:
        """The clock."""

    def give(self, claim: Claim, order_id: int, now: float) -> None:
        """Mark a claim as held after its grant."""

    def drop(self, claim: Claim, verdict: bytes, now: float) -> None:
        """Remove a claim that has ended."""

    def lose(self, holder: Holder, why: str) -> None:
        """Drop all claims of a holder whose session has ended, or may have."""


class HolderClient(Protocol):
    """Connection of the client that has a holder's claims."""

    @property
    def number(self) -> int:
        """Number of the connection."""

    def update(self, claim: Claim) -> None:
        """Reply to the client if its awaited claim is decided."""

    def lost_holder(self, claims: list[Claim]) -> None:
        """Drop the holder: its session has ended."""


class Holder:
    """Session of the store with its claims; receives the session's events (`SessionEvents`).

    Attributes:
        session: the session, once attached.
        window: recovery window in seconds.
        connection: the connection of its client; ``None`` after a disconnect.
        claims: the claims by request id.
        last_id: the greatest of these ids.
        proof: the time of the session's latest proof.
        found: the requests that it had in queues when it was taken over.
        letters: to other listeners, by their numbers, until they are answered
            (`tenure.server.dflockd.remote`).
        over: whether its session has ended, or was left in the store.
    """

    session: EngineSession

    __slots__ = (
        "_doubted",
        "claims",
        "connection",
        "found",
        "last_id",
        "letters",
        "locks",
        "over",
        "proof",
        "renewed_at",
        "session",
        "window",
    )

    def __init__(self, locks: ClaimTable, window: float, connection: HolderClient | None) -> None:
        self.locks = locks
        self.window = window
        self.connection = connection
        self.claims: dict[int, Claim] = {}
        self.last_id = 0
        self.proof = float("-inf")
        self.renewed_at = locks.now()
        self.found: Sequence[Recovered] = ()
        self.letters: dict[int, asyncio.Future[bool]] = {}
        self.over = False
        self._doubted: dict[int, int] = {}  # order ids of grants, by request id

    def tick(self, now: float) -> None:
        """Prove the session when due; report the grants that waited for a proof."""
        if self._doubted and not self.doubts(now):
            doubted, self._doubted = self._doubted, {}
            for request_id, order_id in doubted.items():
                self.granted(request_id, order_id)
        if now - self.renewed_at >= self.window / 6:
            self.renewed_at = now
            self.session.renew()

    def lapsed(self, now: float) -> bool:
        """Return true if the store may have ended the session without an event here."""
        return now - self.proof > self.window * 0.95

    def doubts(self, now: float) -> bool:
        """Return true if another listener may have taken it over, so that events may be outdated.

        That requires half a window of silence.
        """
        return now - self.proof > self.window / 3

    def doubt(self, request_id: int, order_id: int) -> None:
        """Report this grant when the session is proven to still belong to this listener."""
        self._doubted[request_id] = order_id
        self.session.renew()

    def can_promise(self, lease: int, now: float) -> bool:
        """Return true if the session lives that long, even if the store is lost now."""
        return now + min(lease, self.window / 2) <= self.proof + self.window

    # Events of the store

    def proven(self, at: float) -> None:
        """Record a proof. From any thread."""
        self.proof = max(self.proof, at)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Keep the recovered requests."""
        self.found = requests

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Grant the lock to the client, unless the session may have lapsed."""
        claim = self.claims.get(request_id)
        if claim is None:
            return  # it is being withdrawn
        now = self.locks.now()
        if self.lapsed(now):  # and so this may have ended, too
            self.locks.lose(self, LAPSED)
        elif claim.stage >= HELD or order_id is None:
            return
        elif self.doubts(now):
            self.doubt(request_id, order_id)
        else:
            self.locks.give(claim, order_id, now)
            self._report(claim)

    def removed(self, request_id: int, why: Removal) -> None:
        """Inform the client that its claim has ended."""
        letter = self.letters.pop(request_id, None)
        if letter is not None and not letter.done():
            letter.set_result(why == Removal.EVICTED)
        claim = self.claims.get(request_id)
        if claim is None:
            return
        if why == Removal.TIMED_OUT:
            verdict = TIMEOUT
        else:  # another listener evicted an owner whose client released it there
            verdict = ERROR_NOT_ENQUEUED if claim.stage is HELD else ERROR
        self.locks.drop(claim, verdict, self.locks.now())
        self._report(claim)

    def detached(self, cause: BaseException | None = None) -> None:
        """Do nothing: the store cannot be reached. `lapsed` checks for how long."""

    def attached(self) -> None:
        """Renew the session: the store can be reached again."""
        self.session.renew()

    def ended(self, error: SessionExpired) -> None:
        """Drop all claims."""
        self.locks.lose(self, str(error))

    def _report(self, claim: Claim) -> None:
        if self.connection is not None:
            self.connection.update(claim)
