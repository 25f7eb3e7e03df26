"""Watches that begin or end at an unusual moment."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from tenure.clock import SystemClock
from tenure.engines._kit.commands.pipeline import Statement
from tenure.engines.contract import Attach
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.engines.postgresql.monitor import PostgresWatches
from tenure.testing.recorder import Attached, Detached, Recorder
from tests.engines.postgresql.helpers import an_engine, until
from tests.engines.postgresql.servers import a_schema, shared

_BLOCKED = """SELECT count(*) FROM pg_stat_activity
    WHERE query LIKE '%{}.reattach%' AND pg_blocking_pids(pid) <> '{{}}'"""


class _Channels(Statement):
    """The channels on which a connection receives notifications."""

    def __init__(self) -> None:
        self.found: list[str] | None = None

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
        return b"SELECT json_agg(c) FROM pg_listening_channels() c", []

    def answered(self, reply: Any) -> None:
        self.found = reply


async def test_a_watch_that_begins_during_a_reconnect_is_notified() -> None:
    with a_schema() as url:
        name = url.rpartition("schema=")[2]
        clock = SystemClock()
        async with an_engine(url, clock) as engine:
            assert isinstance(engine, PostgresEngine)
            events = Recorder()
            session = await engine.attach(Attach("/default", 30), events)
            connection = engine.connection
            assert connection is not None
            with psycopg.connect(shared().url) as holding:
                holding.execute(f"SELECT FROM {name}.sessions FOR UPDATE".encode())
                connection.drop("the test drops it")
                await until(lambda: shared().execute(_BLOCKED.format(name)) == [(1,)])
                stop = session.watch("m", data=True, owners=True, changed=lambda: None)
            await events.wait_for(lambda found: Attached() in found.said, "contact again")
            assert Detached() in events.said
            channels = _Channels()
            engine.send(channels)
            await until(lambda: channels.found is not None)
            assert [each[:8] for each in sorted(channels.found or ())] == [
                engine.channel[:8],
                "tenure_q",
            ]
            stop()
            await session.close()


async def test_a_change_before_another_connection_listens_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PostgresWatches, "compare", lambda *_: None)  # the look that finds it late
    with a_schema() as url:
        place = f"{url}&listen={shared().folder}"
        clock = SystemClock()
        async with an_engine(place, clock) as engine, an_engine(url, clock) as other:
            assert isinstance(engine, PostgresEngine)
            watcher = await engine.attach(Attach("/default", 30), Recorder())
            writer = await other.attach(Attach("/default", 30), Recorder())
            await writer.create_semaphore("s", 1, b"old", exist_ok=False)
            held: list[tuple[Any, ...]] = []
            monkeypatch.setattr(engine._watches, "_listen", lambda *call: held.append(call))
            changed = asyncio.Event()
            watcher.watch("s", data=True, owners=True, changed=changed.set)
            assert (
                await watcher.describe_semaphore("s", owners=True, waiters=False)
            ).data == b"old"
            await writer.update_semaphore("s", b"new")
            assert not changed.is_set()
            [late] = held
            engine.listen(*late)
            await until(changed.is_set)
