"""Requests that wait in the client, because the server's store answers none."""

from __future__ import annotations

import asyncio
import gc

import tenure
from tenure import events
from tenure.errors import AcquireTimeout
from tenure.server.limits import Limits
from tests.engines.outages import NETWORKED
from tests.server.served import served

KEPT = 16
"""Operations of a session that the server accepts behind an unanswered one."""

TRIES = 100


def calls() -> int:
    """Return how many messages without an answer are in memory."""
    gc.collect()
    return sum(type(each).__name__ == "NativeCall" for each in gc.get_objects())


async def test_requests_behind_one_that_the_store_does_not_answer_leave_nothing_in_memory() -> None:
    limits = Limits(kept_answers=KEPT)
    with NETWORKED["redis"]() as store, served(store.url, limits=limits) as server:
        async with tenure.connect(server.address) as client, client.session() as session:
            await (await session.mutex("m").lock(timeout=30)).release()
            async with client.events() as happened:
                store.network.refuse()
                async for event in happened:
                    if isinstance(event, events.SessionDetached):
                        break
            waiting = asyncio.ensure_future(session.mutex("m").lock())
            counts = list[int]()
            for _ in range(2):
                for answer in await asyncio.gather(
                    *(session.mutex("m").lock(timeout=0.001) for _ in range(TRIES)),
                    return_exceptions=True,
                ):
                    assert isinstance(answer, AcquireTimeout)
                counts.append(calls())
            assert counts[1] < counts[0] + TRIES / 2
            store.network.start()
            async with asyncio.timeout(30), await waiting as lease:
                assert lease.held
            async with session.mutex("m").lock(timeout=30) as lease:
                assert lease.held
