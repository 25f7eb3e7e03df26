"""Errors for YDB's statuses, with the node and the name that they are about."""

from __future__ import annotations

from tenure.core import rules
from tenure.engines.ydb import messages
from tenure.engines.ydb.messages import Message, Status
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    InvalidArgument,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)

__all__ = [
    "attach_error",
    "expired",
    "semaphore_error",
]


def expired(node: str, failure: Message) -> SessionExpired:
    """Return the error of a session that the store ended."""
    if failure.status == Status.BAD_SESSION:
        return rules.taken_over(node)
    return SessionExpired(
        f"the session on {node} is over: {messages.reason(failure)}; begin a new one", node=node
    )


def attach_error(node: str, failure: Message) -> TenureError | None:
    """Return the error of a refused attachment; ``None`` for a failure that may pass."""
    reason = messages.reason(failure)
    match failure.status:
        case Status.NOT_FOUND | Status.SCHEME_ERROR:
            return NodeNotFound(
                f"there is no node {node} in the database ({reason}); create it first", node=node
            )
        case Status.UNAUTHORIZED:
            return AuthenticationFailed(
                f"a session on {node} was refused ({reason}); check the credentials", node=node
            )
        case Status.BAD_REQUEST:
            return InvalidArgument(f"a session on {node} was refused: {reason}", node=node)
        case Status.PRECONDITION_FAILED | Status.UNSUPPORTED | Status.GENERIC_ERROR:
            return EngineError(f"a session on {node} was refused: {reason}", node=node)
        case _:
            return None


def semaphore_error(node: str, name: str, body: Message) -> TenureError:
    """Return the error of a failed operation on a semaphore."""
    reason = messages.reason(body)
    match body.status:
        case Status.NOT_FOUND:
            return SemaphoreNotFound(
                f"there is no semaphore {name!r} on {node}; create it first", node=node, name=name
            )
        case Status.PRECONDITION_FAILED:
            return SemaphoreBusy(
                f"{name!r} on {node} has owners or waiters ({reason}); release it, or delete it "
                "by force, which takes it from them",
                node=node,
                name=name,
            )
        case Status.BAD_REQUEST:
            return InvalidArgument(f"{name!r} on {node}: {reason}", node=node, name=name)
        case Status.UNAUTHORIZED:
            return AuthenticationFailed(
                f"{name!r} on {node} was refused ({reason}); check the credentials",
                node=node,
                name=name,
            )
        case _:
            return EngineError(
                f"the server failed at {name!r} on {node}: {reason}", node=node, name=name
            )
