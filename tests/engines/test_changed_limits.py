"""Requests for a semaphore whose limit another program has just changed, on every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tenure
from tests.engines.stores import stores

PATIENCE = 60.0


@pytest.fixture(params=["memory", "sqlite", "redis", "postgresql", "etcd", "tenure"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as url:
        yield url


@pytest.mark.parametrize("again", ["resized", "created anew"])
async def test_requests_of_several_sessions_that_learn_of_a_change_together_all_wait(
    url: str, again: str
) -> None:
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as admin,
        client.session() as one,
        client.session() as two,
    ):
        theirs = admin.semaphore("pool")
        await theirs.create(2)
        for each in (one, two):  # so that both know the limit
            async with each.semaphore("pool").acquire():
                pass
        if again == "resized":
            await theirs.resize(1)
        else:
            await theirs.delete()
            await theirs.create(1)
        async with theirs.acquire() as lease:
            tickets = await asyncio.gather(
                *(each.semaphore("pool").enqueue() for each in (one, two, one, two))
            )
            assert not any(ticket.granted for ticket in tickets)
            await lease.release()

            async def take_turn(ticket: tenure.Ticket[tenure.Lease]) -> None:
                await (await ticket.wait(PATIENCE)).release()

            await asyncio.gather(*map(take_turn, tickets))
