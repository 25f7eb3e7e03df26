"""Errors with which all engines reject operations, in the same words."""

from __future__ import annotations

import shlex

from tenure.core import rules
from tenure.errors import (
    InvalidArgument,
    LeaseReleased,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.model import DEFAULT_NODE


def node_not_found(path: str) -> NodeNotFound:
    """Return the error for a path without a node."""
    return NodeNotFound(
        f"there is no node {path}. Create it with client.create_node({path!r}) or "
        f"'tenure node create {path}'",
        node=path,
    )


def node_exists(path: str) -> NodeExists:
    """Return the error for creating a node that exists."""
    return NodeExists(f"the node {path} exists already", node=path)


def node_busy(path: str, attached: int) -> NodeBusy:
    """Return the error for dropping a node with attached sessions."""
    return NodeBusy(
        f"the node {path} has {attached} attached session(s). Close them, or drop it by force, "
        "which expires them",
        node=path,
    )


def node_full(path: str) -> InvalidArgument:
    """Return the error for exceeding a node's limit of sessions."""
    return InvalidArgument(
        f"the node {path} has {rules.SESSIONS_PER_NODE} sessions, the maximum", node=path
    )


def semaphores_full(path: str, name: str) -> InvalidArgument:
    """Return the error for exceeding a node's limit of semaphores."""
    return InvalidArgument(
        f"the node {path} has {rules.SEMAPHORES_PER_NODE} semaphores, the maximum",
        node=path,
        name=name,
    )


def semaphore_not_found(path: str, name: str) -> SemaphoreNotFound:
    """Return the error for a name without a semaphore."""
    return SemaphoreNotFound(
        f"there is no semaphore {name!r} on {path}. Create it first", node=path, name=name
    )


def semaphore_exists(path: str, name: str, limit: int) -> SemaphoreExists:
    """Return the error for creating a semaphore that exists with `limit`."""
    return SemaphoreExists(
        f"{name!r} on {path} exists already, with limit {limit}", node=path, name=name, limit=limit
    )


def resizing(path: str, name: str, limit: int) -> str:
    """Return the command that changes a limit, for a message."""
    node = [] if path == DEFAULT_NODE else ["--node", path]
    return shlex.join(["tenure", "sem", "resize", name, str(limit), *node])


def limit_changed(path: str, name: str, limit: int, count: int) -> InvalidArgument:
    """Return the error of a waiter whose count is above the limit that the semaphore has now."""
    return InvalidArgument(
        f"the limit of semaphore {name!r} on {path} was changed to {limit} while this request "
        f"waited for {count}. Acquire at most {limit}",
        node=path,
        name=name,
    )


def semaphore_busy(path: str, name: str) -> SemaphoreBusy:
    """Return the error for deleting a semaphore with owners or waiters."""
    return SemaphoreBusy(
        f"{name!r} on {path} has owners or waiters. Release it, or delete it by force, which "
        "removes them",
        node=path,
        name=name,
    )


def session_over(path: str, why: str = "") -> SessionExpired:
    """Return the error of a session that has ended, with the reason if it is known."""
    return SessionExpired(f"the session on {path} has ended{': ' if why else ''}{why}", node=path)


def request_over(path: str) -> LeaseReleased:
    """Return the error for changing a request that has left its queue."""
    return LeaseReleased(f"the request on {path} has ended", node=path)
