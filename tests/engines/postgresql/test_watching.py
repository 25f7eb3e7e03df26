"""Watches that begin or end at an unusual moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from tenure.clock import SystemClock
from tenure.engines._kit.commands.pipeline import Statement
from tenure.engines.contract import Attach, EngineSession
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.engines.postgresql.monitor import PostgresWatches
from tenure.testing.recorder import Attached, Detached, Recorder
from tests.engines.postgresql.helpers import SessionOfStatements, an_engine, until
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


class _Compared:
    """Counts the comparisons of the counters of a store's queues."""

    def __init__(self, engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self._engine = engine
        self._compare = engine._watches.compare
        monkeypatch.setattr(engine._watches, "compare", self._count)

    def _count(self, *args: Any, **options: Any) -> bool:
        doubtful = self._compare(*args, **options)
        self.times += 1
        return doubtful

    async def again(self, times: int = 3) -> None:
        """Wait for so many comparisons that begin from now on."""
        for _ in range(times):
            before = self.times
            self._engine._monitor.look_in(0)
            await until(lambda before=before: self.times > before)  # type: ignore[misc]


@dataclass
class _Watched:
    """A semaphore "s" whose data and owners are watched by a session of its only program.

    Attributes:
        schema: of the store.
        engine: of the program.
        session: the session.
        compared: the comparisons of the engine.
        calls: of the watches since the last one of the tests, "data" or "owners".
    """

    schema: str
    engine: PostgresEngine
    session: EngineSession
    compared: _Compared
    calls: list[str]

    async def take(self) -> None:
        """Become the owner."""
        answer = self.session.enqueue(1, "s", 1, b"", timeout=None, ephemeral=False)
        if isinstance(answer, asyncio.Future):
            await answer

    async def write_unnoticed(self) -> None:
        """Change the data as if no program had looked at the queue for long."""
        shared().execute(f"UPDATE {self.schema}.queues SET watched_until = 'epoch'")
        await self.session.update_semaphore("s", b"unnoticed")


@asynccontextmanager
async def _watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Watched]:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            session = await engine.attach(Attach("/default", 30), Recorder())
            await session.create_semaphore("s", 1, b"old", exist_ok=False)
            compared = _Compared(engine, monkeypatch)
            calls: list[str] = []
            session.watch("s", data=True, owners=False, changed=lambda: calls.append("data"))
            session.watch("s", data=False, owners=True, changed=lambda: calls.append("owners"))
            await compared.again()
            calls.clear()
            yield _Watched(url.rpartition("schema=")[2], engine, session, compared, calls)


async def test_a_change_that_was_notified_is_not_reported_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _watched(monkeypatch) as watched:
        session, calls = watched.session, watched.calls
        await watched.take()
        await until(lambda: calls == ["owners"])
        await watched.compared.again()
        assert calls == ["owners"]
        await session.update_semaphore("s", b"new")
        await until(lambda: calls == ["owners", "data"])
        await watched.compared.again()
        assert calls == ["owners", "data"]


@pytest.mark.parametrize("of_owners", [False, True])
async def test_a_change_that_was_not_notified_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, of_owners: bool
) -> None:
    async with _watched(monkeypatch) as watched:
        if of_owners:  # one that is notified says nothing of a change of data
            await watched.take()
            await until(lambda: watched.calls == ["owners"])
            watched.calls.clear()
        await watched.write_unnoticed()
        await watched.compared.again()
        assert watched.calls == ["data"]


async def test_after_a_long_pause_no_notification_is_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _watched(monkeypatch) as watched:
        await watched.session.update_semaphore("s", b"new")
        await until(lambda: watched.calls == ["data"])
        await watched.write_unnoticed()
        now = watched.engine.clock.now
        monkeypatch.setattr(watched.engine._watches, "_now", lambda: now() + 91)
        await watched.compared.again(1)
        assert watched.calls == ["data", "data"]


class _Watcher(SessionOfStatements):
    over = False


class _Calls:
    """Watches of one queue, without a store, and the calls of the only one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[Any] = []
        self.made = 0
        self.watches = PostgresWatches(self.sent.append, self._listen, "tenure", lambda: self.now)
        session: Any = _Watcher(1)
        self.watches.begin(session, "s", "bd", self._changed)
        self.sent.pop().answered([1, 0, 0])
        [self.channel] = self.watches

    def _listen(self, *_: Any) -> None:
        """Ignore it."""

    def _changed(self) -> None:
        self.made += 1

    def notify(self) -> None:
        self.watches.report(self.channel, "d")

    def look(self, data: int, notifies: float | None = 90.0, number: int = 1) -> bool:
        """Compare the counters after so many changes of the data."""
        left = None if notifies is None else [notifies]
        return self.watches.compare((self.channel,), [[number, data, 0]], left, self.now)


def test_a_change_is_reported_that_came_after_the_last_notification() -> None:
    calls = _Calls()
    assert not calls.look(0, notifies=5)  # the queue was locked when it was to be notified longer
    calls.notify()
    calls.now = 10
    assert not calls.look(2)
    assert calls.made == 2


def test_a_notification_may_come_after_the_look_that_shows_its_change() -> None:
    calls = _Calls()
    assert calls.look(1)
    calls.notify()
    assert not calls.look(1)
    assert calls.made == 1


def test_a_queue_with_another_row_is_reported_whatever_was_notified_before() -> None:
    calls = _Calls()
    calls.watches.report(calls.channel, "b")  # it was deleted
    assert not calls.look(0, number=2)
    assert calls.made == 2


def test_after_a_reconnect_no_notification_is_relied_on() -> None:
    calls = _Calls()
    calls.watches.report_all()
    assert not calls.look(1)
    assert calls.made == 2


def test_without_notifications_each_change_is_reported_at_once() -> None:
    calls = _Calls()
    assert not calls.look(1, notifies=None)
    assert not calls.look(2, notifies=None)
    assert not calls.look(2, notifies=None)
    assert calls.made == 2
