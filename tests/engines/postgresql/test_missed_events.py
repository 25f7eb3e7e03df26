"""Events that do not arrive: the monitor finds what they would have reported."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tenure.engines.postgresql import monitor
from tenure.engines.postgresql.engine import PostgresEngine
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, until
from tests.engines.postgresql.servers import a_schema


def _is_called(sent: list[bytes], function: bytes) -> bool:
    return any(b"." + function + b"(" in each for each in sent)


async def test_a_grant_whose_event_is_missed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_NET", 1.0)
    monkeypatch.setattr(PostgresEngine, "pushed", lambda *_: None)
    with a_schema() as url:
        async with tenure.connect(url) as one, tenure.connect(url) as other:
            lease = await one.mutex("m").lock()
            waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
            await is_waited_for(one, "m")
            await lease.release()
            async with await waiting as later:
                assert later.fencing_token > lease.fencing_token


async def test_a_changed_limit_whose_event_is_missed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "_NET", 1.0)
    monkeypatch.setattr(PostgresEngine, "pushed", lambda *_: None)
    with a_schema() as url:
        async with tenure.connect(url) as one, tenure.connect(url) as other:
            pool = one.semaphore("pool")
            await pool.create(3)
            async with pool, other.semaphore("pool").enqueue(3) as ticket:
                await pool.resize(2)
                with pytest.raises(tenure.InvalidArgument, match="was changed to 2 while"):
                    await ticket.wait(PATIENCE)


async def test_waiters_are_not_looked_up_while_events_arrive(
    sent: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_NET", 3600.0)
    with a_schema() as url:
        async with tenure.connect(url) as client, client.session() as session:
            lease = await session.mutex("m").lock()
            waiting = asyncio.ensure_future(session.mutex("m").lock())
            await until(lambda: _is_called(sent, b"tick"))  # it asks when an owner expires
            assert lease.held
            await lease.release()
            await (await waiting).release()
    assert not _is_called(sent, b"look")
