"""Messages of YDB's coordination API: building, and classification."""

from __future__ import annotations

from typing import Any

from tenure.model import NodeConfig, RequestDescription, SemaphoreDescription
from tenure.wire.ydb import Message, SessionRequest, Status, message_class, unpacked

__all__ = [
    "FOR_EVER",
    "Message",
    "Status",
    "acquire",
    "describe",
    "kind_of",
    "node_config",
    "node_request",
    "node_result",
    "reason",
    "release",
    "request",
    "semaphore",
    "start",
]

FOR_EVER = 2**64 - 1
"""Timeout of a request that waits until it is granted."""

_CONSISTENCY = ("unset", "strict", "relaxed")
_COUNTERS = ("unset", "aggregated", "detailed")


# To the server


def request(kind: str, **fields: object) -> Message:
    """Return a request of that kind."""
    return SessionRequest(**{kind: fields})


def start(
    path: str, session_id: int, window: float, description: str, seq_no: int, key: bytes
) -> Message:
    """Return the first message of a stream; with a session id, it reattaches that session."""
    return request(
        "session_start",
        path=path,
        session_id=session_id,
        timeout_millis=round(window * 1000),
        description=description,
        seq_no=seq_no,
        protection_key=key,
    )


def acquire(
    req_id: int, name: str, count: int, data: bytes, timeout: float | None, *, ephemeral: bool
) -> Message:
    """Return the request to join a queue, or to change the session's request there."""
    return request(
        "acquire_semaphore",
        req_id=req_id,
        name=name,
        count=count,
        data=data,
        # Never 0 for a request that may wait: 0 means not to wait.
        timeout_millis=(
            FOR_EVER if timeout is None else max(round(timeout * 1000), int(timeout > 0))
        ),
        ephemeral=ephemeral,
    )


def release(req_id: int, name: str) -> Message:
    """Return the request to leave a queue."""
    return request("release_semaphore", req_id=req_id, name=name)


def describe(
    req_id: int,
    name: str,
    *,
    owners: bool = False,
    waiters: bool = False,
    watch_data: bool = False,
    watch_owners: bool = False,
) -> Message:
    """Return the request to describe a semaphore, and to report one change of it."""
    return request(
        "describe_semaphore",
        req_id=req_id,
        name=name,
        include_owners=owners,
        include_waiters=waiters,
        watch_data=watch_data,
        watch_owners=watch_owners,
    )


# From the server


def kind_of(message: Message) -> tuple[str, Message]:
    """Return the kind of a server's message (empty if unknown), and its body."""
    kind = message.WhichOneof("response")
    return ("", None) if kind is None else (kind, getattr(message, kind))


def reason(body: Message) -> str:
    """Return a failure as text: its status by name, and its issues in a line."""
    try:
        status = Status(body.status).name
    except ValueError:
        status = str(body.status)
    issues = "; ".join(filter(None, (issue.message.strip() for issue in body.issues)))
    return f"{status}: {issues}" if issues else status


def semaphore(described: Message, own: dict[int, int]) -> SemaphoreDescription:
    """Return the description of a semaphore; `own` maps siblings to their sessions."""
    return SemaphoreDescription(
        name=described.name,
        data=described.data,
        limit=described.limit,
        held=described.count,
        ephemeral=described.ephemeral,
        owners=_requests(described.owners, own),
        waiters=_requests(described.waiters, own),
    )


def _requests(found: Any, own: dict[int, int]) -> tuple[RequestDescription, ...]:
    return tuple(
        RequestDescription(
            session_id=own.get(each.session_id, each.session_id),
            order_id=each.order_id,
            count=each.count,
            data=each.data,
        )
        for each in sorted(found, key=lambda each: each.order_id)
    )


# Nodes


def node_request(call: str, path: str, config: NodeConfig | None = None) -> Message:
    """Return the request of a call about a node."""
    made = message_class(f"Coordination.{call}Request")
    if config is None:
        return made(path=path)
    return made(
        path=path,
        config=message_class("Coordination.Config")(
            self_check_period_millis=round(config.self_check_period * 1000),
            session_grace_period_millis=round(config.session_grace_period * 1000),
            read_consistency_mode=_CONSISTENCY.index(config.read_consistency),
            attach_consistency_mode=_CONSISTENCY.index(config.attach_consistency),
            rate_limiter_counters_mode=_COUNTERS.index(config.rate_limiter_counters_mode),
        ),
    )


def node_result(operation: Message) -> Message:
    """Return the description of a node."""
    return unpacked(operation, "Coordination.DescribeNodeResult")


def node_config(config: Message) -> NodeConfig:
    """Return a configuration of tenure's model."""
    return NodeConfig(
        self_check_period=config.self_check_period_millis / 1000,
        session_grace_period=config.session_grace_period_millis / 1000,
        read_consistency=_named(_CONSISTENCY, config.read_consistency_mode),
        attach_consistency=_named(_CONSISTENCY, config.attach_consistency_mode),
        rate_limiter_counters_mode=_named(_COUNTERS, config.rate_limiter_counters_mode),
    )


def _named(names: tuple[str, ...], value: int) -> Any:
    return names[value] if value < len(names) else names[0]
