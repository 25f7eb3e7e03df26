"""Many long descriptions at once: the client is not cut off."""

from __future__ import annotations

import asyncio

import tenure
from tenure.model import EPHEMERAL_LIMIT
from tests.engines.ydb.behind import Server

READERS = 60
WAITERS = 3
DATA = b"x" * 1_000_000


async def test_sessions_that_describe_a_long_queue_at_once_get_it() -> None:
    server = Server("memory://long-queue")
    server.start()
    try:
        url = f"{server.url}?answer_timeout=60"  # a slow machine is none of the reasons
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            queue = client.semaphore("m", ephemeral=True)
            async with queue.acquire(EPHEMERAL_LIMIT, data=DATA):
                sessions = [await client.session() for _ in range(3)]
                tickets = [
                    await sessions[number % 3].semaphore("m", ephemeral=True).enqueue(data=DATA)
                    for number in range(WAITERS)
                ]
                readers = [await other.session() for _ in range(READERS)]
                found = await asyncio.gather(
                    *(
                        each.semaphore("m", ephemeral=True).describe(owners=True, waiters=True)
                        for each in readers
                    )
                )
                assert {len(each.waiters) for each in found} == {WAITERS}
                for ticket in tickets:
                    await ticket.withdraw()
    finally:
        server.stop()
