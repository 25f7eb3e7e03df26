"""Costly reads of the native protocol: lists and descriptions, in slices and in parts.

Slices are scheduled by `tenure.server.reads`, and a part is made only after the client has read the
previous one. So a read uses little memory, even if its client is slow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from msgspec import Struct

from tenure.engines.contract import Engine
from tenure.model import SemaphoreDescription
from tenure.server.reads import SLICE, Reader, pages_of_semaphores, pages_of_sessions
from tenure.server.sessions.describing import bytes_of, check_size, described, session_info
from tenure.wire.messages import (
    Describe,
    DescribeNode,
    ListNodes,
    ListSemaphores,
    ListSessions,
    NodeDescribed,
    NodesListed,
    SemaphoreDescribed,
    SemaphoresListed,
    SessionsListed,
)
from tenure.wire.values import NodeInfo, SemaphoreInfo, SessionInfo

T = TypeVar("T")

_PART = 256 * 1024  # bytes after which a list continues in another message


async def _list_nodes(
    engine: Engine, message: ListNodes, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader:
        found = await engine.list_nodes()
    for part, more in _parts(found, lambda _: 300):
        yield NodesListed(message.rid, list(part), more)


async def _describe_node(
    engine: Engine, message: DescribeNode, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader:
        found = await engine.describe_node(message.path)
    yield NodeDescribed(message.rid, NodeInfo.of(found))


async def _list_sessions(
    engine: Engine, message: ListSessions, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    infos: list[SessionInfo] | None = None
    async with aclosing(pages_of_sessions(engine, message.path, reader)) as pages:
        async for page in pages:
            if infos is not None:
                yield SessionsListed(message.rid, infos, True)
            infos = list(map(session_info, page))
    yield SessionsListed(message.rid, infos or [], False)


async def _list_semaphores(
    engine: Engine, message: ListSemaphores, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    infos: list[SemaphoreInfo] | None = None
    async with aclosing(
        pages_of_semaphores(
            engine, message.path, reader, owners=message.owners, waiters=message.waiters
        )
    ) as pages:
        async for page in pages:
            for part, _ in _parts(page, bytes_of):
                if infos is not None:
                    yield SemaphoresListed(message.rid, infos, True)
                infos = await _described(reader, part, message, most)
    yield SemaphoresListed(message.rid, infos or [], False)


async def _described(
    reader: Reader, found: Sequence[SemaphoreDescription], message: ListSemaphores, most: int
) -> list[SemaphoreInfo]:
    for each in found:
        check_size(each, message.path, most)
    return [await described(reader, each) for each in found]


async def _describe(
    engine: Engine, message: Describe, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader:
        found = await engine.describe_semaphore(
            message.path, message.name, owners=message.owners, waiters=message.waiters
        )
        check_size(found, message.path, most)
    yield SemaphoreDescribed(message.rid, await described(reader, found))


READS: dict[type[Struct], Callable[[Engine, Any, int, Reader], AsyncGenerator[Struct, None]]] = {
    Describe: _describe,
    DescribeNode: _describe_node,
    ListNodes: _list_nodes,
    ListSemaphores: _list_semaphores,
    ListSessions: _list_sessions,
}
"""Generators of the parts of the answer to each message.

The arguments are the engine, the message, the maximum bytes of a part, and the connection's reader.
They raise `LimitReached` if a single item is longer, and the engine's errors.
"""


def _parts(found: Sequence[T], size: Callable[[T], int]) -> Iterator[tuple[Sequence[T], bool]]:
    """Yield a list in parts, each with a flag for more; one empty part for an empty list."""
    start, taken = 0, 0
    for here, each in enumerate(found):
        if taken >= _PART or here - start >= SLICE:
            yield found[start:here], True
            start, taken = here, 0
        taken += size(each)
    yield found[start:], False
