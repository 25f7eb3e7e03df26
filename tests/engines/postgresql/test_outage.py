"""Requests of programs that try again and again while the server is down."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, until
from tests.engines.postgresql.servers import PostgresServer

_TRIES = 50


def _inserted(server: PostgresServer) -> int:
    """Return how many requests have been stored."""
    rows = server.execute(
        "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relid = 'tenure.requests'::regclass"
    )
    return cast("int", rows[0][0])


async def test_requests_that_time_out_during_an_outage_are_not_sent_after_it(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        async with session.mutex("kept").lock() as lease, client.events() as events:
            waiting = asyncio.ensure_future(session.mutex("kept").lock())
            async with asyncio.timeout(PATIENCE):
                await is_waited_for(client, "kept")
                await asyncio.to_thread(server.stop)
                async for event in events:
                    if isinstance(event, tenure.events.SessionDetached):
                        break
                early = asyncio.ensure_future(session.mutex("early").lock())
                for _ in range(_TRIES):
                    with pytest.raises(tenure.AcquireTimeout):
                        await session.mutex("m").lock(timeout=0.001)
                await asyncio.to_thread(server.start)
                async with await early, session.mutex("m").lock():
                    assert lease.held
        async with asyncio.timeout(PATIENCE), await waiting:
            pass
    await until(lambda: _inserted(server) == 4)  # kept twice, early, m
