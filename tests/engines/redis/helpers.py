"""Waiting for what another process does, and nothing tells of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import tenure
from tests.engines.redis.servers import Server

PATIENCE = 30.0


async def until(so: Callable[[], bool]) -> None:
    """Look until it is so."""
    async with asyncio.timeout(PATIENCE):
        while not so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def queue_of(client: tenure.Client, name: str) -> tuple[int, int]:
    """How many own and how many wait; (0, 0) where there is no such thing."""
    async with client.session() as session:
        with contextlib.suppress(tenure.SemaphoreNotFound):
            found = await session.semaphore(name).describe(owners=True, waiters=True)
            return len(found.owners), len(found.waiters)
    return 0, 0


async def is_waited_for(client: tenure.Client, name: str) -> None:
    """Return when somebody waits."""
    async with asyncio.timeout(PATIENCE):
        while (await queue_of(client, name))[1] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def replicates(replica: Server) -> None:
    """Return when the replica follows its master."""

    def follows() -> bool:
        told = replica.tell("INFO", "replication")
        return isinstance(told, dict) and told.get("master_link_status") == "up"

    await until(follows)
