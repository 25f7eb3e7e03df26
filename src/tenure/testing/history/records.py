"""What a history is made of: small facts, each with an instant, said by whoever saw it.

A record is a frozen value. `at` is in seconds, on one scale that is common to all who record: a
simulation's true time, or the boot-time clock of the one host (`tenure.clock.SystemClock`). A
`process` is an incarnation: what is started again gets another label. A `request` is a label
that is unique in the whole history, and is asked for once.

The instants are the careful ones. What begins something is recorded before it (`Asked`,
`Called`) or once it is certain (`Granted`, `Returned`); what ends something is recorded before
it can have ended (`Leaves`, `Revokes`, `Paused`, `Crashed`). So what a history says to be the
case was the case, and a checker that finds a contradiction has found a defect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

__all__ = [
    "KINDS",
    "Asked",
    "Believes",
    "Called",
    "Continued",
    "Crashed",
    "Gone",
    "Granted",
    "History",
    "Leaves",
    "Observed",
    "Operation",
    "Outcome",
    "Paused",
    "Queued",
    "Record",
    "Returned",
    "Revokes",
    "Shrinks",
    "Truth",
    "Unobserved",
    "Why",
]

Why = Literal["released", "lost", "timeout", "withdrawn", "refused", "failed"]
"""How a request came to its end, as its program saw it."""

Operation = Literal["create", "ensure", "update", "delete", "read"]
"""What is done to a semaphore's data; ``ensure`` is a creation that accepts what exists."""

Outcome = Literal["ok", "exists", "missing", "busy", "refused", "unknown"]
"""How a call ended: ``exists``, ``missing`` and ``busy`` (it has owners or waiters) say what was
found and change nothing, ``refused`` says nothing and changes nothing, and ``unknown`` may have
taken effect or may yet."""


# Requests


@dataclass(frozen=True, slots=True)
class Asked:
    """Said just before a request is sent.

    Attributes:
        count: how many tokens; of a mutex, all of them.
        limit: of the semaphore; 2^64-1 of an ephemeral one and so of a mutex.
        window: the session's recovery window, in seconds.
        timeout: seconds from `at` after which the request may have left its queue by itself.
        recovers: the request of a resumed session that this one continues; empty if nobody knows
            what that was called.
    """

    at: float
    process: str
    request: str
    node: str
    name: str
    count: int
    limit: int
    window: float
    timeout: float | None = None
    recovers: str | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """The request's place is known."""

    at: float
    request: str
    order_id: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The program was told that it holds.

    Attributes:
        order_id: the fencing token; ``None`` where the engine gives none.
        deadline: the lease's, on the common scale.
    """

    at: float
    request: str
    order_id: int | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Believes:
    """The program asked its lease whether it is held, and it is. `deadline` was read anew."""

    at: float
    request: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Shrinks:
    """Said just before a lease gives back a part: from here on it may have only `count`."""

    at: float
    request: str
    count: int


@dataclass(frozen=True, slots=True)
class Leaves:
    """Said just before the request is given up, or its task cancelled: it may leave from here."""

    at: float
    request: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The program knows that it has the request no more.

    Attributes:
        deadline: of the lease or the session, if there was one, read when this was said.
    """

    at: float
    request: str
    why: Why
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Revokes:
    """Said just before an administrator takes something away, whose owners learn it later.

    It concerns what has been asked for by then; every field but the instants narrows that down,
    and ``None`` stands for all.

    Attributes:
        request: this one.
        session_of: those of this process.
        node, name: those of this semaphore.
        since: said again when it is done, for what was asked for meanwhile: when it was begun.
    """

    at: float
    request: str | None = None
    session_of: str | None = None
    node: str | None = None
    name: str | None = None
    since: float | None = None


# Processes


@dataclass(frozen=True, slots=True)
class Paused:
    """Said just before a process is stopped: nothing of it runs, or at least its event loop."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Continued:
    """Said after a process was let go on."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """Said just before a process is killed, or by whoever finds that it has ended by itself."""

    at: float
    process: str


# A semaphore's data


@dataclass(frozen=True, slots=True)
class Called:
    """Said just before something is done to a semaphore's data. `call` is unique."""

    at: float
    process: str
    call: str
    node: str
    name: str
    op: Operation
    argument: bytes | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    """That call has ended. `result` is what was read."""

    at: float
    call: str
    outcome: Outcome
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What a watch showed.

    Attributes:
        observer: the watch; one that is begun anew may keep its label.
        value: the data (``None``: there is no such semaphore), or the owners' order ids.
    """

    at: float
    process: str
    observer: str
    node: str
    name: str
    value: bytes | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Unobserved:
    """A watch of that process is over, and will not tell how it ends."""

    at: float
    process: str
    observer: str


@dataclass(frozen=True, slots=True)
class Truth:
    """A semaphore at the end, when all is healed and settled, as the store says.

    Attributes:
        data: ``None``: there is no such semaphore.
        owners, waiters: their order ids, in the order of the queue.
    """

    at: float
    node: str
    name: str
    data: bytes | None
    owners: tuple[int, ...] = ()
    waiters: tuple[int, ...] = ()


Record = (
    Asked
    | Queued
    | Granted
    | Believes
    | Shrinks
    | Leaves
    | Gone
    | Revokes
    | Paused
    | Continued
    | Crashed
    | Called
    | Returned
    | Observed
    | Unobserved
    | Truth
)

KINDS: tuple[type[Record], ...] = (
    *(Asked, Queued, Granted, Believes, Shrinks, Leaves, Gone, Revokes),
    *(Paused, Continued, Crashed, Called, Returned, Observed, Unobserved, Truth),
)
"""What a record may be."""


class History:
    """Records in the order of their instants, and how far the clocks behind them may disagree.

    Args:
        records: in any order; those of one instant keep the order that they come in.
        skew: seconds between two processes' readings of the common scale, at the most.
        slack: seconds that a process may come late because its machine is busy.
    """

    def __init__(self, records: Iterable[Record], skew: float = 0.0, slack: float = 0.0) -> None:
        self.records: tuple[Record, ...] = tuple(sorted(records, key=attrgetter("at")))
        self.skew = skew
        self.slack = slack

    def __repr__(self) -> str:
        return f"<History of {len(self.records)} records>"
