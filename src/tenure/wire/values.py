"""Descriptions that messages carry, and their counterparts in `tenure.model`.

On the wire each is an array: fields are added at the end, with a default, and a peer that does not
know them ignores them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

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

__all__ = [
    "Abilities",
    "Config",
    "Found",
    "NodeInfo",
    "Number",
    "RequestInfo",
    "SemaphoreInfo",
    "SessionInfo",
]

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Counter that fits into a signed 64-bit integer, which every store can keep."""


class Config(Struct, array_like=True, frozen=True):
    """`NodeConfig`."""

    self_check_period: float = 0.0
    session_grace_period: float = 0.0
    read_consistency: Consistency = "unset"
    attach_consistency: Consistency = "unset"
    rate_limiter_counters_mode: CountersMode = "unset"

    @classmethod
    def of(cls, config: NodeConfig) -> Config:
        return cls(
            config.self_check_period,
            config.session_grace_period,
            config.read_consistency,
            config.attach_consistency,
            config.rate_limiter_counters_mode,
        )

    def model(self) -> NodeConfig:
        return NodeConfig(
            self.self_check_period,
            self.session_grace_period,
            self.read_consistency,
            self.attach_consistency,
            self.rate_limiter_counters_mode,
        )


class NodeInfo(Struct, array_like=True, frozen=True):
    """`NodeDescription`."""

    path: str
    config: Config
    sessions: int | None = None
    semaphores: int | None = None

    @classmethod
    def of(cls, node: NodeDescription) -> NodeInfo:
        return cls(node.path, Config.of(node.config), node.sessions, node.semaphores)

    def model(self) -> NodeDescription:
        return NodeDescription(self.path, self.config.model(), self.sessions, self.semaphores)


class SessionInfo(Struct, array_like=True, frozen=True):
    """`SessionDescription`."""

    id: Number
    node: str
    description: str
    recovery_window: float
    attached: bool | None = None
    silent_for: float | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None

    @classmethod
    def of(cls, session: SessionDescription) -> SessionInfo:
        return cls(
            session.id,
            session.node,
            session.description,
            session.recovery_window,
            session.attached,
            session.silent_for,
            session.pid,
            session.host,
            session.program,
        )

    def model(self) -> SessionDescription:
        return SessionDescription(
            self.id,
            self.node,
            self.description,
            self.recovery_window,
            self.attached,
            self.silent_for,
            self.pid,
            self.host,
            self.program,
        )


class RequestInfo(Struct, array_like=True, frozen=True):
    """`RequestDescription`."""

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

    @classmethod
    def of(cls, request: RequestDescription) -> RequestInfo:
        return cls(
            request.session_id,
            request.order_id,
            request.count,
            request.data,
            request.since,
            request.timeout,
            request.remaining,
            request.session_description,
            request.pid,
            request.host,
            request.program,
        )

    def model(self) -> RequestDescription:
        return RequestDescription(
            self.session_id,
            self.order_id,
            self.count,
            self.data,
            self.since,
            self.timeout,
            self.remaining,
            self.session_description,
            self.pid,
            self.host,
            self.program,
        )


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

    @classmethod
    def of(cls, semaphore: SemaphoreDescription) -> SemaphoreInfo:
        return cls(
            semaphore.name,
            semaphore.data,
            semaphore.limit,
            semaphore.held,
            semaphore.ephemeral,
            [RequestInfo.of(each) for each in semaphore.owners],
            [RequestInfo.of(each) for each in semaphore.waiters],
            semaphore.waiting,
        )

    def model(self) -> SemaphoreDescription:
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


class Found(Struct, array_like=True, frozen=True):
    """`Recovered`: a request that a session has in a queue."""

    hold: Number
    name: str
    order_id: Number
    count: int
    data: bytes
    ephemeral: bool
    granted: bool

    @classmethod
    def of(cls, request: Recovered) -> Found:
        return cls(
            request.request_id,
            request.name,
            request.order_id,
            request.count,
            request.data,
            request.ephemeral,
            request.granted,
        )

    def model(self) -> Recovered:
        return Recovered(
            self.hold,
            self.name,
            self.order_id,
            self.count,
            self.data,
            self.ephemeral,
            self.granted,
        )


class Abilities(Struct, array_like=True, frozen=True):
    """`Capabilities`, of the server's store as its clients see it."""

    fencing: bool = True
    watch: bool = True
    data: bool = True
    lasting: bool = True
    resume: bool = False
    since: bool = True
    waiter_timeout: bool = True
    durable: bool = False
    store_time: bool = False

    @classmethod
    def of(cls, can: Capabilities) -> Abilities:
        return cls(
            can.fencing,
            can.watch,
            can.data,
            can.lasting,
            can.resume,
            can.since,
            can.waiter_timeout,
            can.durable,
            can.store_time,
        )

    def model(self) -> Capabilities:
        return Capabilities(
            fencing=self.fencing,
            watch=self.watch,
            data=self.data,
            lasting=self.lasting,
            resume=self.resume,
            since=self.since,
            waiter_timeout=self.waiter_timeout,
            durable=self.durable,
            store_time=self.store_time,
        )
