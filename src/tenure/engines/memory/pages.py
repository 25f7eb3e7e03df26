"""Lists of the memory engine in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from heapq import nsmallest

from tenure.core.node import Node
from tenure.engines.memory import describe
from tenure.model import SemaphoreDescription, SessionDescription

__all__ = ["MemoryPages"]


class MemoryPages:
    """Pages of one engine.

    Args:
        reading: enters the store, which is locked and up to date meanwhile; gives a node and the
            time.
    """

    def __init__(
        self, reading: Callable[[str], AbstractContextManager[tuple[Node, float]]]
    ) -> None:
        self._reading = reading

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        with self._reading(path) as (node, now):
            ids = nsmallest(most, (each for each in node.sessions if each > after))
            return [describe.session(node.sessions[each], path, now) for each in ids]

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        with self._reading(path) as (node, now):
            page: list[SemaphoreDescription] = []
            size = 0
            for name in nsmallest(most, (each for each in node.semaphores if each > after)):
                found = node.semaphores[name]
                page.append(describe.semaphore(found, now, owners=owners, waiters=waiters))
                size += 1 + len(page[-1].owners) + len(page[-1].waiters)
                if size >= most:
                    break
            return page
