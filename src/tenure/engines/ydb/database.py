"""Parts of an engine that all of its sessions share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines.ydb.channel import Channel
from tenure.engines.ydb.url import YdbUrl

__all__ = ["Database"]

T = TypeVar("T")


class Database:
    """A database, as one engine reaches it.

    Attributes:
        address: its parsed URL.
        channel: the connection to its servers.
        siblings: the session that each sibling belongs to, by their ids.
    """

    def __init__(self, address: YdbUrl, clock: Clock) -> None:
        """Start without sessions."""
        self.address = address
        self.clock = clock
        self.channel = Channel(address)
        self.siblings: dict[int, int] = {}
        self._ending: set[asyncio.Task[Any]] = set()

    def path_of(self, node: str) -> str:
        """Return a node's path in the database."""
        return self.address.database + node

    def complete(self, ending: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it to its end before the database is closed, with or without its caller."""
        task = asyncio.create_task(ending, name="tenure-ydb-ending")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def aclose(self) -> None:
        """Wait for what is to be completed, and close the channel. Safe to call twice."""
        while self._ending:
            await asyncio.wait(list(self._ending))
        await self.channel.aclose()
