"""Descriptions in messages, and their counterparts in `tenure.model`.

Each is encoded as an array: new fields are added at the end, with a default, and a peer that does
not know them ignores them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from tenure.model import (
    Capabilities,
    Consistency,
    CountersMode,
    NodeConfig,
    NodeDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

T = TypeVar("T")

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Counter that fits into a signed 64-bit integer, which every store can keep."""


class _Value(Struct, Generic[T], array_like=True, frozen=True):
    """Value with some or all fields of a class of the model."""

    counterpart: ClassVar[Any]

    @classmethod
    def of(cls, value: T) -> Self:
        return cls(*[getattr(value, name) for name in cls.__struct_fields__])

    def model(self) -> T:
        found: T = self.counterpart(**asdict(self))
        return found


class Config(_Value[NodeConfig], array_like=True, frozen=True):
    """`NodeConfig`."""

    counterpart = NodeConfig
    self_check_period: float = 0.0
    session_grace_period: float = 0.0
    read_consistency: Consistency = "unset"
    attach_consistency: Consistency = "unset"
    rate_limiter_counters_mode: CountersMode = "unset"


class NodeInfo(Struct, array_like=True, frozen=True):
    """`NodeDescription`."""

    path: str
    config: Config
    sessions: int | None = None
    semaphores: int | None = None

    @classmethod
    def of(cls, node: NodeDescription) -> NodeInfo:
        """Convert a description to its message."""
        return cls(node.path, Config.of(node.config), node.sessions, node.semaphores)

    def model(self) -> NodeDescription:
        """Convert the message to a description."""
        return NodeDescription(self.path, self.config.model(), self.sessions, self.semaphores)


class SessionInfo(_Value[SessionDescription], array_like=True, frozen=True):
    """`SessionDescription`."""

    counterpart = SessionDescription
    id: Number
    node: str
    description: str
    recovery_window: float
    attached: bool | None = None
    silent_for: float | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


class RequestInfo(_Value[RequestDescription], array_like=True, frozen=True):
    """`RequestDescription`."""

    counterpart = RequestDescription
    session_id: Number
    order_id: Number
    count: int
    data: bytes
    since: float | None = None
    timeout: float | None = None
    remaining: float | None = None
    session_description: str | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


class SemaphoreInfo(Struct, array_like=True, frozen=True):
    """`SemaphoreDescription`."""

    name: str
    data: bytes
    limit: int
    held: int
    ephemeral: bool
    owners: list[RequestInfo] = []
    waiters: list[RequestInfo] = []
    waiting: int | None = None

    def model(self) -> SemaphoreDescription:
        """Convert the message to a description."""
        return SemaphoreDescription(
            self.name,
            self.data,
            self.limit,
            self.held,
            self.ephemeral,
            tuple(each.model() for each in self.owners),
            tuple(each.model() for each in self.waiters),
            self.waiting,
        )


class Found(_Value[Recovered], array_like=True, frozen=True):
    """`Recovered`: a request that a session has in a queue."""

    counterpart = Recovered
    request_id: Number
    name: str
    order_id: Number
    count: int
    data: bytes
    ephemeral: bool
    granted: bool


class Abilities(_Value[Capabilities], array_like=True, frozen=True):
    """Some of the `Capabilities` of the server's store.

    The others have their defaults, because a server serves only stores which can do all that. A
    default here is what a server of an older release means that does not send the field.
    """

    counterpart = Capabilities
    fencing: bool = True
    watch: bool = True
    data: bool = True
    lasting: bool = True
    resume: bool = False
    since: bool = True
    waiter_timeout: bool = True
    durable: bool = False
    store_time: bool = False
    longest_window: float = 1800.0
    resize: bool = False
    rates: bool = False
