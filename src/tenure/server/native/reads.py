"""Costly reads of the native protocol: lists and descriptions, in slices and in parts.

Each slice waits for its turn (`tenure.server.reads`), and a part is made only when the client has
read the one before. So a read keeps little in memory, however slowly its client reads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from tenure.engines.contract import Engine
from tenure.model import SemaphoreDescription
from tenure.server.reads import SLICE, Reader
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
from tenure.wire.values import NodeInfo, SemaphoreInfo

__all__ = ["READS"]

T = TypeVar("T")

_SEMAPHORES = SLICE // 4  # of one slice; each takes several queries where a store has tables
_PART = 256 * 1024  # bytes after which a list goes on in another message


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
    pages, after = engine.pages(), 0
    while pages is not None:
        async with reader:
            page = await pages.sessions(message.path, after=after, most=SLICE)
            part = list(map(session_info, page))
        yield SessionsListed(message.rid, part, len(page) >= SLICE)
        if len(page) < SLICE:
            return
        after = page[-1].id
    async with reader:
        found = await engine.list_sessions(message.path)
    for start in range(0, max(1, len(found)), SLICE):
        async with reader:
            part = [session_info(each) for each in found[start : start + SLICE]]
        yield SessionsListed(message.rid, part, start + SLICE < len(found))


async def _list_semaphores(
    engine: Engine, message: ListSemaphores, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    pages = engine.pages()
    if pages is None:
        async with reader:
            found = await engine.list_semaphores(
                message.path, owners=message.owners, waiters=message.waiters
            )
        for part, more in _parts(found, bytes_of):
            yield SemaphoresListed(message.rid, await _described(reader, part, message, most), more)
        return
    after, infos = "", list[SemaphoreInfo]()
    while True:
        async with reader:
            page = await pages.semaphores(
                message.path,
                owners=message.owners,
                waiters=message.waiters,
                after=after,
                most=_SEMAPHORES,
            )
        if not page:
            break
        if after:
            yield SemaphoresListed(message.rid, infos, True)
        after = page[-1].name
        infos = await _described(reader, page, message, most)
    yield SemaphoresListed(message.rid, infos, False)


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
"""The parts of the answer to each message.

The arguments are the engine, the message, the most bytes of one part, and the connection's reader.
They raise `LimitReached` where one thing alone is longer, and what the engine raises.
"""


def _parts(found: Sequence[T], size: Callable[[T], int]) -> Iterator[tuple[Sequence[T], bool]]:
    """A list in parts, each with whether another follows; one empty part for an empty list."""
    start, taken = 0, 0
    for here, each in enumerate(found):
        if taken >= _PART or here - start >= SLICE:
            yield found[start:here], True
            start, taken = here, 0
        taken += size(each)
    yield found[start:], False
