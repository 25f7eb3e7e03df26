"""Keys and their claims: owners, waiters, and the record of them in the store.

A *claim* is one request in a key's queue. The request's data is a `Record` of its lease and its
deadline, so that another server can go on with it. Any client can read that data, and a token is
all that a release needs: so the record has the token's *seal*, from which the token cannot be made.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from tenure.engines.contract import Enqueued
from tenure.server.dflockd.names import stored_name

if TYPE_CHECKING:
    from tenure.server.dflockd.holder import Holder

__all__ = [
    "ASKED",
    "HELD",
    "MARK",
    "OVER",
    "WAITING",
    "Claim",
    "ClaimStage",
    "Key",
    "Record",
    "sealed",
]

MARK = b"dflockd"
"""The data of a semaphore that was made for a key, and may be deleted when it is not in use."""

_RECORD = re.compile(rb"dflockd2 ([0-9a-f]{32}) ([0-9]{1,10}) ([0-9]{1,17})")
_BEFORE = re.compile(rb"dflockd ([0-9a-f]{16}) ([0-9]{1,10}) ([0-9]{1,17})")  # with the salt itself


def sealed(salt: str, name: str) -> str:
    """The seal of a token for the key `name`: the hash of its salt, as 32 hex digits.

    The name is hashed too, so that one search for salts does not serve for all keys at once.
    """
    text = (salt + name).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16, person=b"tenure dflockd").hexdigest()


class Record(NamedTuple):
    """The data of a request.

    Attributes:
        seal: the seal of its token (`sealed`).
        lease: seconds.
        until: milliseconds since the Unix epoch at which the lease ends, counted from its being
            asked for or renewed: if it had to wait, and was not renewed since, it ends later.
    """

    seal: str
    lease: int
    until: int

    def to_bytes(self) -> bytes:
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

    ASKED = 0  # the store has not answered
    WAITING = 1
    HELD = 2
    OVER = 3


ASKED, WAITING, HELD, OVER = ClaimStage  # found at once, where it matters


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
        hold: its number within its holder's session.
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
        "hold",
        "holder",
        "key",
        "lease",
        "order_id",
        "salt",
        "seal",
        "stage",
        "token",
        "verdict",
    )

    def __init__(
        self, key: Key, holder: Holder, hold: int, lease: int, seal: str, salt: str = ""
    ) -> None:
        self.key = key
        self.holder = holder
        self.hold = hold
        self.salt = salt
        self.seal = seal
        self.token = ""
        self.order_id = 0
        self.lease = lease
        self.stage = ASKED
        self.answer: asyncio.Future[Enqueued] | None = None
