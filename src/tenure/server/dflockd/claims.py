"""Keys, their claims, and the sessions that have these claims in the store.

A *claim* is one request in a key's queue. The request's data is a `Record` of its lease and its
deadline, so that another server can go on with it. Any client can read that data, and a token is
all that a release needs: so the record has the token's *seal*, from which the token cannot be made.

A *holder* is a session of the store, for one connection. Rules:

* The store decides: a claim is held when the store has granted it, and over when its session is.
* A lease is promised as far as the session is known to live, and no further (`can_promise`). A
  session that may have expired by now is over (`lapsed`).
* A grant is reported to the client only if the session was proven to live a short time ago. After
  an outage another listener may have taken the session over, and its grants may be out of date.
* A holder may have no connection: its client has gone and what it holds is kept for its lease, or
  it was found in the store after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from tenure.engines.contract import EngineSession, Enqueued, Removal
from tenure.errors import SessionExpired
from tenure.model import Recovered
from tenure.server.dflockd.names import stored_name
from tenure.wire.lines.replies import ERROR, ERROR_NOT_ENQUEUED, TIMEOUT

__all__ = [
    "HELD",
    "LAPSED",
    "MARK",
    "OVER",
    "REQUESTED",
    "WAITING",
    "Claim",
    "ClaimStage",
    "ClaimTable",
    "Holder",
    "HolderClient",
    "Key",
    "Record",
    "sealed",
]

MARK = b"dflockd"
"""The data of a semaphore that was made for a key, and may be deleted when it is not in use."""

LAPSED = "the store has not been reached for too long"

_RECORD = re.compile(rb"dflockd2 ([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,17})")
_BEFORE = re.compile(rb"dflockd ([0-9a-f]{16}) ([0-9]{1,10}) ([0-9]{1,17})")  # with the salt itself


def sealed(salt: str, name: str) -> str:
    """Return the seal of a token for the key `name`: the hash of its salt, as 32 hex digits.

    The name is hashed too, so that one search for salts does not serve for all keys at once.
    """
    text = (salt + name).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16, person=b"tenure dflockd").hexdigest()


class Record(NamedTuple):
    """The data of a request.

    Attributes:
        seal: the seal of its token (`sealed`).
        lease: seconds.
        until: milliseconds since the Unix epoch at which the lease ends, counted from its
            request or renewal: if it had to wait, and was not renewed since, it ends later.
    """

    seal: str
    lease: int
    until: int

    def to_bytes(self) -> bytes:
        """Encode the record as a request's data."""
        return b"dflockd2 %b %d %d" % (self.seal.encode(), self.lease, self.until)

    @classmethod
    def of(cls, data: bytes, name: str) -> Record | None:
        """Read the data of a request for the key `name`; ``None`` if no server wrote it.

        Servers before 0.2 wrote the salt itself. It is sealed here, and in the store with the next
        renewal.
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
    """Stage of a claim."""

    REQUESTED = 0  # the store has not answered
    WAITING = 1
    HELD = 2
    OVER = 3


REQUESTED, WAITING, HELD, OVER = ClaimStage  # found at once, where it matters


class Key:
    """A key that is used, or was a moment ago.

    Attributes:
        name: the key, as the connections have it.
        stored: its name in the store (`tenure.server.dflockd.names`).
        limit: how many may hold it; of 1, its semaphore is a mutex, of more a lasting one.
        made: whether that lasting one is there, as far as is known.
        claims: of this server's clients.
        waiting: how many of them wait.
        used_at: when a claim was over the last time.
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
        request_id: its number within its holder's session.
        lease: seconds.
        stage: where it stands.
        salt: the part of its token that cannot be guessed; empty if another server granted it,
            until its client shows the token.
        seal: the seal of its token.
        token: the token, once it is held and the salt is known; else empty.
        order_id: the fencing token of one that another server granted; else 0.
        deadline: until when it is held, once it is.
        answer: of the store, which has not come yet.
        verdict: once it is over, the reply to a client that waits for it; empty if its semaphore
            did not exist, and it is to be requested again.
    """

    deadline: float
    verdict: bytes

    __slots__ = (
        "answer",
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
        """Start as requested, with no answer and no token."""
        self.key = key
        self.holder = holder
        self.request_id = request_id
        self.salt = salt
        self.seal = seal
        self.token = ""
        self.order_id = 0
        self.lease = lease
        self.stage = REQUESTED
        self.answer: asyncio.Future[Enqueued] | None = None


class ClaimTable(Protocol):
    """Table of the claims, which processes the store's events."""

    @property
    def now(self) -> Callable[[], float]:
        """The clock."""

    def answered(self, claim: Claim, answer: asyncio.Future[Enqueued]) -> None:
        """Take the store's answer to a claim's request."""

    def give(self, claim: Claim, order_id: int, now: float) -> None:
        """Hold a claim that the store has granted."""

    def drop(self, claim: Claim, verdict: bytes, now: float) -> None:
        """Remove a claim that is over."""

    def lose(self, holder: Holder, why: str) -> None:
        """Drop all claims of a holder whose session has ended, or may be."""


class HolderClient(Protocol):
    """Connection of the client that has a holder's claims."""

    @property
    def number(self) -> int:
        """Number of the connection."""

    def update(self, claim: Claim) -> None:
        """Reply to the client if the claim that it waits for is decided."""

    def lost_holder(self, claims: list[Claim]) -> None:
        """Drop the holder: its session has ended."""


class Holder:
    """Session of the store and its claims; receives the session's events (`SessionEvents`).

    Attributes:
        session: once it is attached.
        window: seconds that it lives without proof.
        connection: the connection of its client; ``None`` when that is gone.
        claims: by their numbers.
        last_id: the greatest of these numbers.
        proof: the latest time at which the session was proven to live.
        found: the requests that it had in queues when it was taken over.
        letters: to other listeners, by their numbers, until they are answered
            (`tenure.server.dflockd.remote`).
        over: its session has ended, or left in the store.
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
        """Start without claims and without proof."""
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
        self._doubted: dict[int, int] = {}  # order ids of grants, by their numbers

    def tick(self, now: float) -> None:
        """Prove that it lives, when it is time to; report the grants that waited for a proof."""
        if self._doubted and not self.doubts(now):
            doubted, self._doubted = self._doubted, {}
            for request_id, order_id in doubted.items():
                self.granted(request_id, order_id)
        if now - self.renewed_at >= self.window / 6:
            self.renewed_at = now
            self.session.renew()

    def lapsed(self, now: float) -> bool:
        """Return true if the store may have ended it without an event here."""
        return now - self.proof > self.window * 0.95

    def doubts(self, now: float) -> bool:
        """Return true if another listener may have taken it over: the store's events may be old.

        That takes half a window of silence.
        """
        return now - self.proof > self.window / 3

    def doubt(self, request_id: int, order_id: int) -> None:
        """Report this grant when the session is proven to be this listener's still."""
        self._doubted[request_id] = order_id
        self.session.renew()

    def can_promise(self, lease: int, now: float) -> bool:
        """Return true if it will live for so long, even if the store were lost now."""
        return now + min(lease, self.window / 2) <= self.proof + self.window

    # Events of the store

    def proven(self, at: float) -> None:
        """From any thread."""
        self.proof = max(self.proof, at)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Keep the recovered requests."""
        self.found = requests

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Give the lock to the client, unless the session may have lapsed."""
        claim = self.claims.get(request_id)
        if claim is None:
            return  # it is being withdrawn
        self._see_answer(claim)
        now = self.locks.now()
        if self.lapsed(now):  # and so this may be over as well
            self.locks.lose(self, LAPSED)
        elif claim.stage is not WAITING or order_id is None:
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
            letter.set_result(why is Removal.EVICTED)
        claim = self.claims.get(request_id)
        if claim is None:
            return
        self._see_answer(claim)
        if why is Removal.TIMED_OUT:
            verdict = TIMEOUT
        else:  # an owner is evicted, by another listener when its client releases it there
            verdict = ERROR_NOT_ENQUEUED if claim.stage is HELD else ERROR
        self.locks.drop(claim, verdict, self.locks.now())
        self._report(claim)

    def detached(self, cause: BaseException | None = None) -> None:
        """Do nothing: the store cannot be reached. `lapsed` says when that is too long."""

    def attached(self) -> None:
        """Renew the session: the store can be reached again."""
        self.session.renew()

    def ended(self, error: SessionExpired) -> None:
        """Lose all claims."""
        self.locks.lose(self, str(error))

    def _see_answer(self, claim: Claim) -> None:
        """Process the answer before the push, even if its callback has not been called yet."""
        if claim.answer is not None and claim.answer.done():
            self.locks.answered(claim, claim.answer)

    def _report(self, claim: Claim) -> None:
        if self.connection is not None:
            self.connection.update(claim)
