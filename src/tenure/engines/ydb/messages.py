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
"""The timeout of a request that waits until it is granted."""

_CONSISTENCY = ("unset", "strict", "relaxed")
_COUNTERS = ("unset", "aggregated", "detailed")


# To the server


def request(kind: str, **fields: object) -> Message:
    """Return a request of that kind."""
    return SessionRequest(**{kind: fields})


def start(
    path: str, session_id: int, window: float, description: str, seq_no: int, key: bytes
) -> Message:
    """The first message on a stream; with a session id, that session is attached again."""
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
    """Join the queue, or change the request that the session has there."""
    return request(
        "acquire_semaphore",
        req_id=req_id,
        name=name,
        count=count,
        data=data,
        # Never 0 for one that is willing to wait: that would mean not to.
        timeout_millis=(
            FOR_EVER if timeout is None else max(round(timeout * 1000), int(timeout > 0))
        ),
        ephemeral=ephemeral,
    )


def release(req_id: int, name: str) -> Message:
    """Leave the queue."""
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
    """Tell of a semaphore, and once, later, that what is watched has changed."""
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
    """Which of the answers and pushes it is (empty: one that is not known here), and its body."""
    kind = message.WhichOneof("response")
    return ("", None) if kind is None else (kind, getattr(message, kind))


def reason(body: Message) -> str:
    """Return a failure as text: its status by name, and its issues in a line."""
    try:
        status = Status(body.status).name
    except ValueError:
        status = str(body.status)
    said = "; ".join(filter(None, (issue.message.strip() for issue in body.issues)))
    return f"{status}: {said}" if said else status


def semaphore(described: Message, own: dict[int, int]) -> SemaphoreDescription:
    """A semaphore as it was described; `own` tells whose session a sibling session is."""
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
    """The request of a node call, by its name."""
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
    """A configuration as tenure says it."""
    return NodeConfig(
        self_check_period=config.self_check_period_millis / 1000,
        session_grace_period=config.session_grace_period_millis / 1000,
        read_consistency=_named(_CONSISTENCY, config.read_consistency_mode),
        attach_consistency=_named(_CONSISTENCY, config.attach_consistency_mode),
        rate_limiter_counters_mode=_named(_COUNTERS, config.rate_limiter_counters_mode),
    )


def _named(names: tuple[str, ...], value: int) -> Any:
    return names[value] if value < len(names) else names[0]
