"""What there is of a key: who has it, who waits for it, and what the store keeps of that.

A *claim* is one request in a key's queue. What its token, its lease and its deadline are is in the
request's data (`Record`), with the order id that the store gives; so another process can find out.
"""

from __future__ import annotations

import asyncio
import re
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from tenure.engines.contract import Enqueued

if TYPE_CHECKING:
    from tenure.server.dflockd.holder import Holder

__all__ = ["ASKED", "HELD", "MARK", "OVER", "WAITING", "Claim", "Key", "Record", "Stage"]

MARK = b"dflockd"
"""The data of a semaphore that was made for a key, and may be deleted when nobody uses it."""

_RECORD = re.compile(rb"dflockd ([0-9a-f]{16}) ([0-9]{1,10}) ([0-9]{1,17})")


class Record(NamedTuple):
    """The data of a request.

    Attributes:
        salt: what of its token cannot be guessed.
        lease: seconds.
        until: milliseconds since the Unix epoch at which the lease ends, counted from its being
            asked for or renewed: if it had to wait, and was not renewed since, it ends later.
    """

    salt: str
    lease: int
    until: int

    def to_bytes(self) -> bytes:
        return b"dflockd %b %d %d" % (self.salt.encode(), self.lease, self.until)

    @classmethod
    def of(cls, data: bytes) -> Record | None:
        """What was written; ``None`` if it is somebody else's data."""
        match = _RECORD.fullmatch(data)
        if match is None:
            return None
        salt, lease, until = match.groups()
        return cls(salt.decode(), int(lease), int(until))


class Stage(IntEnum):
    """Where a claim stands."""

    ASKED = 0  # the store has not answered
    WAITING = 1
    HELD = 2
    OVER = 3


ASKED, WAITING, HELD, OVER = Stage  # found at once, where it matters


class Key:
    """A key that is used, or was a moment ago.

    Attributes:
        limit: how many may hold it; of 1, its semaphore is a mutex, of more a lasting one.
        made: whether that lasting one is there, as far as is known.
        claims: of this server's clients.
        waiting: how many of them wait.
        used_at: when a claim was over the last time.
    """

    __slots__ = ("claims", "limit", "made", "name", "used_at", "waiting")

    def __init__(self, name: str, limit: int, now: float) -> None:
        self.name = name
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
        token: once it is held; before that, what of it cannot be guessed.
        deadline: until when it is held, once it is.
        answer: of the store, which has not come yet.
        verdict: once it is over, what is replied to whoever waits for it; empty if its semaphore
            was not there, and it is to be asked for again.
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
        "stage",
        "token",
        "verdict",
    )

    def __init__(self, key: Key, holder: Holder, hold: int, salt: str, lease: int) -> None:
        self.key = key
        self.holder = holder
        self.hold = hold
        self.token = salt
        self.lease = lease
        self.stage = ASKED
        self.answer: asyncio.Future[Enqueued] | None = None
