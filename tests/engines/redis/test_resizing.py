"""A limit that is changed: what a program finds that has missed it, and the sums in the hash."""

from __future__ import annotations

import pytest

import tenure
from tenure.engines._kit.commands.pipeline import WAITING
from tenure.engines.redis.session import RedisSession
from tests.engines.redis.servers import a_namespace

PATIENCE = 20.0


async def test_a_changed_limit_whose_event_is_missed_is_found_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RedisSession, "push", lambda *_: None)
    with a_namespace() as url:
        async with tenure.connect(url) as one, tenure.connect(url) as other:
            pool = one.semaphore("pool")
            await pool.create(3)
            async with (
                pool,
                other.session() as session,
                session.semaphore("pool").enqueue(3) as ticket,
            ):
                await pool.resize(2)
                engine = session._core.engine
                assert isinstance(engine, RedisSession)
                engine.look_up({WAITING})
                with pytest.raises(tenure.InvalidArgument, match="was changed to 2 while"):
                    await ticket.wait(PATIENCE)


async def test_one_that_owns_the_whole_limit_counts_with_its_number_afterwards() -> None:
    """What is held is not stored while one request has all of it."""
    with a_namespace() as url:
        async with tenure.connect(url) as client:
            pool = client.semaphore("pool")
            await pool.create(3)
            lease = await pool.acquire(3)
            for limit in (2, 5, 3, 4):
                await pool.resize(limit)
                assert (await pool.describe()).held == 3
            async with pool:
                assert (await pool.describe()).held == 4
                assert await pool.try_acquire() is None
                await lease.release()
                assert (await pool.describe()).held == 1
            assert (await pool.describe()).held == 0
