"""Errors for YDB's statuses, with their node and name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio

from tenure.core import rules
from tenure.engines.ydb import messages
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.wire.ydb import Message, Status

_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def code_of(error: BaseException | None) -> grpc.StatusCode | None:
    """Return the status of a call that failed; ``None`` for any other error."""
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def brief(text: str) -> str:
    """Return the beginning of a possibly long text, in one line."""
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:297] + "..."


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """Convert gRPC's errors of a broken connection to `EngineUnavailable`."""
    try:
        yield
    except TenureError:
        raise
    except Exception as error:  # a call on a closing connection may fail in any way
        text = (error.details() if isinstance(error, grpc.aio.AioRpcError) else None) or str(error)
        if code_of(error) in _REFUSED:
            raise AuthenticationFailed(f"the server rejected the credentials: {text}") from error
        raise EngineUnavailable(brief(text) or type(error).__name__) from error
    except asyncio.CancelledError as error:
        # gRPC also raises this for a call that was cancelled with its connection.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EngineUnavailable("the connection was closed") from error


def check(operation: Message) -> None:
    """Raise the error of a failed discovery or login.

    Raises:
        EngineUnavailable, AuthenticationFailed
    """
    reason = messages.reason(operation)
    if operation.status == Status.UNAUTHORIZED:
        raise AuthenticationFailed(f"the server rejected the credentials: {reason}")
    if operation.status != Status.SUCCESS:
        raise EngineUnavailable(reason)


def expired(node: str, failure: Message) -> SessionExpired:
    """Return the error for a session that the store has ended."""
    if failure.status == Status.BAD_SESSION:
        return rules.taken_over(node)
    return SessionExpired(
        f"the session on {node} has ended: {messages.reason(failure)}; open a new one", node=node
    )


def attach_error(node: str, failure: Message) -> TenureError | None:
    """Return the error for a rejected attachment; ``None`` for a transient failure."""
    match failure.status:
        case Status.NOT_FOUND | Status.SCHEME_ERROR:
            return _no_node(node, failure)
        case (
            Status.UNAUTHORIZED
            | Status.BAD_REQUEST
            | Status.PRECONDITION_FAILED
            | Status.UNSUPPORTED
            | Status.GENERIC_ERROR
        ):
            return _refusal(f"a session on {node}", failure, node)
        case _:
            return None


def node_error(node: str, operation: Message) -> TenureError:
    """Return the error for a failed operation on a node."""
    reason = messages.reason(operation)
    match operation.status:
        case Status.SCHEME_ERROR | Status.NOT_FOUND:
            return _no_node(node, operation)
        case Status.ALREADY_EXISTS:
            return NodeExists(f"the node {node} exists already ({reason})", node=node)
        case Status.PRECONDITION_FAILED:
            return NodeBusy(
                f"the node {node} has attached sessions ({reason}); close them first", node=node
            )
        case _:
            return _refusal(f"the node {node}", operation, node)


def semaphore_error(node: str, name: str, body: Message) -> TenureError:
    """Return the error for a failed operation on a semaphore."""
    match body.status:
        case Status.NOT_FOUND:
            return SemaphoreNotFound(
                f"semaphore {name!r} on {node} does not exist; create it first",
                node=node,
                name=name,
            )
        case Status.PRECONDITION_FAILED:
            return SemaphoreBusy(
                f"{name!r} on {node} has owners or waiters ({messages.reason(body)}); release it, "
                "or delete it by force, which evicts them",
                node=node,
                name=name,
            )
        case _:
            return _refusal(f"{name!r} on {node}", body, node, name)


def _no_node(node: str, body: Message) -> NodeNotFound:
    reason = messages.reason(body)
    return NodeNotFound(
        f"node {node} does not exist in the database ({reason}); create it first", node=node
    )


def _refusal(subject: str, body: Message, node: str, name: str | None = None) -> TenureError:
    reason = messages.reason(body)
    match body.status:
        case Status.UNAUTHORIZED:
            text = f"{subject} was rejected ({reason}); check the credentials"
            return AuthenticationFailed(text, node=node, name=name)
        case Status.BAD_REQUEST:
            return InvalidArgument(f"{subject} was rejected: {reason}", node=node, name=name)
        case _:
            return EngineError(f"{subject}: the server failed: {reason}", node=node, name=name)
