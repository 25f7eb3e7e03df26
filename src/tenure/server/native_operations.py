"""What clients of the native protocol ask of the store as a whole, beside any session.

Each is one call of the engine, and its answer one message, or several: a long list is told in
parts, so that no message grows beyond measure and a connection can be written in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from tenure.engines.contract import Engine
from tenure.model import RequestDescription, SemaphoreDescription
from tenure.server.describing import semaphore_info, session_info
from tenure.server.limits import LimitReached
from tenure.wire.messages import (
    AlterNode,
    CreateNode,
    Describe,
    DescribeNode,
    Done,
    DropNode,
    EndSession,
    Evict,
    ListNodes,
    ListSemaphores,
    ListSessions,
    NodeDescribed,
    NodesListed,
    ReadStoreTime,
    SemaphoreDescribed,
    SemaphoresListed,
    SessionsListed,
    StoreTime,
)
from tenure.wire.values import NodeInfo

__all__ = ["ENGINE_MESSAGES", "ask", "check_size"]

T = TypeVar("T")

_PART = 256 * 1024  # bytes after which a list goes on in another message
_SESSION = 1200  # bytes of a session's description, at the most or nearly
_PATH = 300


async def ask(engine: Engine, message: Struct, most: int) -> Iterable[Struct]:
    """What the engine answers, as messages to be sent one after the other.

    Args:
        most: bytes that one message may have.

    Raises:
        LimitReached: one thing alone is longer.
        TenureError: what the engine raises.
    """
    return await _ASK[type(message)](engine, message, most)


async def _create_node(engine: Engine, message: CreateNode, _: int) -> Iterable[Struct]:
    await engine.create_node(message.path, message.config.model(), exist_ok=message.exist_ok)
    return (Done(message.rid),)


async def _alter_node(engine: Engine, message: AlterNode, _: int) -> Iterable[Struct]:
    await engine.alter_node(message.path, message.config.model())
    return (Done(message.rid),)


async def _drop_node(engine: Engine, message: DropNode, _: int) -> Iterable[Struct]:
    await engine.drop_node(message.path, force=message.force)
    return (Done(message.rid),)


async def _describe_node(engine: Engine, message: DescribeNode, _: int) -> Iterable[Struct]:
    found = await engine.describe_node(message.path)
    return (NodeDescribed(message.rid, NodeInfo.of(found)),)


async def _list_nodes(engine: Engine, message: ListNodes, _: int) -> Iterable[Struct]:
    found = await engine.list_nodes()
    return (
        NodesListed(message.rid, list(part), more) for part, more in _parts(found, lambda _: _PATH)
    )


async def _list_semaphores(engine: Engine, message: ListSemaphores, most: int) -> Iterable[Struct]:
    found = await engine.list_semaphores(
        message.path, owners=message.owners, waiters=message.waiters
    )
    for each in found:
        check_size(each, message.path, most)
    return (
        SemaphoresListed(message.rid, [semaphore_info(each) for each in part], more)
        for part, more in _parts(found, bytes_of)
    )


async def _describe(engine: Engine, message: Describe, most: int) -> Iterable[Struct]:
    found = await engine.describe_semaphore(
        message.path, message.name, owners=message.owners, waiters=message.waiters
    )
    check_size(found, message.path, most)
    return (SemaphoreDescribed(message.rid, semaphore_info(found)),)


async def _list_sessions(engine: Engine, message: ListSessions, _: int) -> Iterable[Struct]:
    found = await engine.list_sessions(message.path)
    return (
        SessionsListed(message.rid, [session_info(each) for each in part], more)
        for part, more in _parts(found, lambda _: _SESSION)
    )


async def _end_session(engine: Engine, message: EndSession, _: int) -> Iterable[Struct]:
    return (Done(message.rid, await engine.end_session(message.path, message.session_id)),)


async def _evict(engine: Engine, message: Evict, _: int) -> Iterable[Struct]:
    return (Done(message.rid, await engine.evict(message.path, message.name, message.order_id)),)


async def _read_store_time(engine: Engine, message: ReadStoreTime, _: int) -> Iterable[Struct]:
    return (StoreTime(message.rid, await engine.store_time()),)


_ASK: dict[type[Struct], Callable[[Engine, Any, int], Awaitable[Iterable[Struct]]]] = {
    AlterNode: _alter_node,
    CreateNode: _create_node,
    Describe: _describe,
    DescribeNode: _describe_node,
    DropNode: _drop_node,
    EndSession: _end_session,
    Evict: _evict,
    ListNodes: _list_nodes,
    ListSemaphores: _list_semaphores,
    ListSessions: _list_sessions,
    ReadStoreTime: _read_store_time,
}

ENGINE_MESSAGES = frozenset(_ASK)
"""The messages that are answered here."""


def _parts(found: Sequence[T], size: Callable[[T], int]) -> Iterator[tuple[Sequence[T], bool]]:
    """A list in parts, each with whether another follows; one empty part for an empty list."""
    start, taken = 0, 0
    for here, each in enumerate(found):
        if taken >= _PART:
            yield found[start:here], True
            start, taken = here, 0
        taken += size(each)
    yield found[start:], False


def bytes_of(semaphore: SemaphoreDescription) -> int:
    """About how many bytes a semaphore's description takes in a message."""
    requests = (*semaphore.owners, *semaphore.waiters)
    return 1200 + len(semaphore.data) + sum(map(_bytes_of_request, requests))


def _bytes_of_request(request: RequestDescription) -> int:
    return 100 + len(request.data) + len(request.session_description or "")


def check_size(semaphore: SemaphoreDescription, node: str, most: int) -> int:
    """About how many bytes a description takes.

    Raises:
        LimitReached: more than a message may have.
    """
    size = bytes_of(semaphore)
    if size > most:
        raise LimitReached(
            f"the description of {semaphore.name!r} on {node} has about {size} bytes, and this "
            f"server's limit output_bytes allows {most}; ask for its owners or its waiters alone, "
            "or for neither",
            "output_bytes",
            node=node,
            name=semaphore.name,
        )
    return size
