"""Values passed between the primitives and an engine. `tenure.engines.contract` exports them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

from tenure.model import Liveness

T = TypeVar("T")
Answer: TypeAlias = "T | asyncio.Future[T]"


class Place(Enum):
    """Place of a request after `enqueue`."""

    GRANTED = "granted"
    WAITING = "waiting"
    REFUSED = "refused"  # timeout 0 and not grantable: it never joined the queue


class Enqueued(NamedTuple):
    """Answer to `enqueue`. The order id is ``None`` when refused or not (yet) known."""

    place: Place
    order_id: int | None


class Withdrawn(Enum):
    """Answer to `withdraw`."""

    LEFT = "left"  # it was in its queue, or may have been
    MISSING = "missing"  # the store says that it had left its queue before


@dataclass(frozen=True, slots=True)
class Removal:
    """Reason for which a request left its queue without a call of its session.

    Attributes:
        value: the reason in words.
        limit: the new limit, below the count of this waiter; ``None`` for other reasons.
    """

    value: str
    limit: int | None = None

    TIMED_OUT: ClassVar[Removal]
    DELETED: ClassVar[Removal]
    EVICTED: ClassVar[Removal]
    UNCONFIRMED: ClassVar[Removal]
    CUT_OFF: ClassVar[Removal]
    LAPSED: ClassVar[Removal]

    @classmethod
    def resized(cls, limit: int) -> Removal:
        """Return the reason of a waiter whose count is above the new limit of its semaphore."""
        return cls(f"too large for the limit, which was changed to {limit}", limit)


Removal.TIMED_OUT = Removal("timed out")
Removal.DELETED = Removal("the semaphore was deleted")
Removal.EVICTED = Removal("evicted by an administrator")
Removal.UNCONFIRMED = Removal("not confirmed by enough replicas")
Removal.CUT_OFF = Removal("lost with its connection to the store")
Removal.LAPSED = Removal("forgotten by the store: its lease expired, or it was released there")


@dataclass(frozen=True, slots=True)
class Attach:
    """Options of `Engine.attach`.

    Attributes:
        node: the path of the node.
        recovery_window: the recovery window in seconds.
        description: the program's description, with its identity (`tenure.identity`).
        liveness: ``"process"``, or ``"window"`` for sessions that may be resumed.
        key: the protection key, at most 16 bytes. A resumable session needs one: without it, a
            server refuses to resume the session, because any client can list its id.
        session_id: the session of liveness ``"window"`` to take over, by its key. It keeps its
            window and the text of its description, which gets the identity of the new program
            (`tenure.identity.retold`). ``None`` for a new session.
        assume_dead: whether to take over without proof that the other program has stopped.
        adopt: whether the session that is taken over gets this description and, if
            `Capabilities.adopt` is true, this recovery window. Only with `assume_dead`: the former
            program may have a proof for the former window.
    """

    node: str
    recovery_window: float
    description: str = ""
    liveness: Liveness = "process"
    key: bytes = b""
    session_id: int | None = None
    assume_dead: bool = False
    adopt: bool = False


@dataclass(frozen=True, slots=True)
class Orphan:
    """A session whose program is dead, or will be when it is ended.

    Attributes:
        node: the path of its node.
        session_id: its id.
        recovery_window: its recovery window in seconds.
        credential: see `SessionDefaults.credential`.
    """

    node: str
    session_id: int
    recovery_window: float
    credential: str


@dataclass(frozen=True, slots=True)
class LastWords:
    """Bytes that end a session, if a server receives them over a new connection.

    Attributes:
        place: a host and a port, or the path of a socket.
        data: the bytes.
    """

    place: tuple[str, int] | str
    data: bytes
