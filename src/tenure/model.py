"""Data model: the frozen values that pass between a program, the primitives and an engine.

A fact that some engines do not know is optional; ``None`` means unknown.
Times are seconds; data is bytes. The rules for names and numbers are in `tenure.core.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

__all__ = [
    "DEFAULT_NODE",
    "EPHEMERAL_LIMIT",
    "UNCHANGED",
    "Capabilities",
    "Consistency",
    "CountersMode",
    "LastRun",
    "Leader",
    "Liveness",
    "MutexHolder",
    "NodeConfig",
    "NodeDescription",
    "Recovered",
    "RequestDescription",
    "SemaphoreDescription",
    "SessionDescription",
    "Unchanged",
]

DEFAULT_NODE = "/default"
"""The node that always exists."""

EPHEMERAL_LIMIT = 2**64 - 1
"""The limit of every ephemeral semaphore; a mutex acquires all of it."""

Consistency = Literal["unset", "strict", "relaxed"]
CountersMode = Literal["unset", "aggregated", "detailed"]

Liveness = Literal["process", "window"]
"""What keeps a session alive: its process, or its recovery window alone (it may outlive both
the process and the machine's uptime)."""


class Unchanged(Enum):
    """The type of `UNCHANGED`."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
"""Leave the value as it is; for values that may be ``None`` as well."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of a node, stored as given.

    Zero or ``"unset"`` means the default; `alter_node` leaves such fields alone.

    Attributes:
        self_check_period: seconds between a node's checks of itself (default 1).
        session_grace_period: seconds that sessions get on top of their window after
            the store was restarted (default 10).
        read_consistency, attach_consistency: kept for YDB's clients.
        rate_limiter_counters_mode: kept for YDB's clients.
    """

    self_check_period: float = 0.0
    session_grace_period: float = 0.0
    read_consistency: Consistency = "unset"
    attach_consistency: Consistency = "unset"
    rate_limiter_counters_mode: CountersMode = "unset"


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node as it is now."""

    path: str
    config: NodeConfig
    sessions: int | None = None
    semaphores: int | None = None


@dataclass(frozen=True, slots=True)
class SessionDescription:
    """A session as the store sees it.

    Attributes:
        id: positive, never reused in a store.
        node: the path of its node.
        description: what its program said of itself.
        recovery_window: seconds it survives without contact.
        attached: whether its program is connected, where the store knows that.
        silent_for: seconds since its last contact with the store.
        pid: the process on `host`, where known.
        host: the name of the machine, where known.
        program: the name of the program, where known.
    """

    id: int
    node: str
    description: str
    recovery_window: float
    attached: bool | None = None
    silent_for: float | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True)
class RequestDescription:
    """One request in a semaphore's queue: an owner or a waiter.

    Attributes:
        session_id: whose request it is.
        order_id: its place in the queue, and its fencing token.
        count: how many of the semaphore's tokens it wants or has.
        data: what its session attached to it.
        since: seconds that it has been an owner (of a waiter: that it has waited).
        timeout: of a waiter, the seconds until it times out; ``None`` for never or unknown.
        remaining: seconds until its session expires if it is not renewed any more.
        session_description: what the session said of itself, where known.
        pid: the process on `host`, where known.
        host: the name of the machine, where known.
        program: the name of the program, where known.
    """

    session_id: int
    order_id: int
    count: int
    data: bytes
    since: float | None = None
    timeout: float | None = None
    remaining: float | None = None
    session_description: str | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A request that a session still had in a queue when it was resumed.

    Attributes:
        request_id: the request's number within the session.
        name: of the semaphore.
        order_id: its place in the queue, and its fencing token.
        count: how many tokens it wants or has.
        data: what it carries.
        ephemeral: whether the semaphore is ephemeral.
        granted: whether it owns its tokens.
    """

    request_id: int
    name: str
    order_id: int
    count: int
    data: bytes
    ephemeral: bool
    granted: bool


@dataclass(frozen=True, slots=True)
class SemaphoreDescription:
    """A semaphore as it is now.

    Attributes:
        held: the sum of the owners' counts.
        owners, waiters: in the order of their order ids; empty unless requested.
        waiting: how many requests wait, where known.
    """

    name: str
    data: bytes
    limit: int
    held: int
    ephemeral: bool
    owners: tuple[RequestDescription, ...] = ()
    waiters: tuple[RequestDescription, ...] = ()
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Leader:
    """Leader of an election.

    Attributes:
        data: what the leader campaigned with, or proclaimed since.
        is_me: whether the leader campaigns through the observing session.
        term: rises with every leader; it is the leader's fencing token.
        host, pid, program: the leader's process, where known.
        description: the description of the leader's session, where known. These four take no
            part in comparisons.
    """

    data: bytes
    is_me: bool
    term: int
    host: str | None = field(default=None, compare=False)
    pid: int | None = field(default=None, compare=False)
    program: str | None = field(default=None, compare=False)
    description: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LastRun:
    """The latest run of a job that `Client.once` guards.

    Attributes:
        started: when it was started, by the store's clock, in seconds since the Unix epoch.
        since: seconds from then until now, by the same clock.
        succeeded: whether it ended well. A running one has not (yet).
        fencing_token: of its lease; 0 where the store has none.
        host, pid, program: the process that ran it; ``None`` is unknown.
        description: what its session said of itself.
    """

    started: float
    since: float
    succeeded: bool
    fencing_token: int
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class MutexHolder:
    """Holder of a mutex.

    Attributes:
        data: what the holder attached to its lease.
        is_me: whether it is held through the calling session.
        fencing_token: the holder's fencing token.
        since: seconds it has been held, where known.
        remaining: seconds after which the holder's session would expire if it were not renewed
            any more, where known.
        waiting: how many requests wait behind it, where known.
        host, pid, program: the holder's process, where known.
        description: the description of the holder's session, where known.
    """

    data: bytes
    is_me: bool
    fencing_token: int
    since: float | None = None
    remaining: float | None = None
    waiting: int | None = None
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine, and the facts that it reports.

    Attributes:
        fencing: grants carry order ids (fencing tokens).
        watch: changes can be watched.
        data: semaphores and requests carry data.
        lasting: semaphores can exist without requests, and sessions can create them.
        resume: sessions of liveness ``window`` with resume tokens.
        since: descriptions report since when.
        waiter_timeout: descriptions have the remaining timeout of a waiter.
        durable: the state survives the end of every process.
        waiter_order: a request's order id is known while it waits, and not only with its grant.
        one_step: a session that ends leaves all its queues in one step. Where this is false, that
            holds only for its first request for each name.
        removal_reason: the deletion of an ephemeral semaphore is distinguished from the eviction
            of its last request.
        owners: descriptions list the owners and the waiters.
        descriptions: an owner and a waiter are described with their session's description.
        longest_window: seconds of the longest recovery window that a session may have.
        store_time: the store's wall clock can be read. Where this is false, what is dated
            (`Client.once`) is dated by the caller's clock.
        adopt: a session that is taken over can be given another recovery window.
    """

    fencing: bool = True
    watch: bool = True
    data: bool = True
    lasting: bool = True
    resume: bool = False
    since: bool = True
    waiter_timeout: bool = True
    durable: bool = False
    waiter_order: bool = True
    one_step: bool = True
    removal_reason: bool = True
    owners: bool = True
    descriptions: bool = True
    longest_window: float = 1800.0
    store_time: bool = True
    adopt: bool = False
