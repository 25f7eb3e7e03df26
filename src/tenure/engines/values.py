"""Values that pass between the primitives and an engine. `tenure.engines.contract` exports them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias, TypeVar

from tenure.model import Liveness

__all__ = ["Answer", "Attach", "Enqueued", "Place", "Removal", "Withdrawn"]

T = TypeVar("T")
Answer: TypeAlias = "T | asyncio.Future[T]"


class Place(Enum):
    """Place of a request after `enqueue`."""

    GRANTED = "granted"
    WAITING = "waiting"
    REFUSED = "refused"  # timeout 0 and not grantable: it never joined the queue


class Enqueued(NamedTuple):
    """The answer to `enqueue`. The order id is ``None`` when refused or not (yet) known."""

    place: Place
    order_id: int | None


class Withdrawn(Enum):
    """The answer to `withdraw`."""

    LEFT = "left"  # it was in its queue, or may have been
    MISSING = "missing"  # the store says that it had left its queue before


class Removal(Enum):
    """Reason for which a request left its queue without a call of its session."""

    TIMED_OUT = "timed out"
    DELETED = "the semaphore was deleted"
    EVICTED = "evicted by an administrator"
    UNCONFIRMED = "not confirmed by enough replicas"
    CUT_OFF = "lost with its connection to the store"
    LAPSED = "forgotten by the store: its lease ran out, or it was released there"


@dataclass(frozen=True, slots=True)
class Attach:
    """Options of `Engine.attach`.

    Attributes:
        node: the path of the node.
        recovery_window: seconds; how long the session survives without contact.
        description: what the program says of itself, with its identity (`tenure.identity`).
        liveness: ``"process"``, or ``"window"`` for sessions that may be resumed.
        key: the protection key, at most 16 bytes. A session that is to be resumed has one: without
            it, a server refuses to resume the session, because any client can list its id.
        session_id: of a session of liveness ``"window"`` to take over, which has this key and
            keeps its own window and the text of its description, with the identity of the program
            that takes it over (`tenure.identity.retold`); ``None`` for a new session.
        assume_dead: take over without making sure that the other program has stopped.
        adopt: the session that is taken over gets this description and, where
            `Capabilities.adopt` says so, this recovery window. Only with `assume_dead`: the
            former program may have a proof for the former window.
    """

    node: str
    recovery_window: float
    description: str = ""
    liveness: Liveness = "process"
    key: bytes = b""
    session_id: int | None = None
    assume_dead: bool = False
    adopt: bool = False
