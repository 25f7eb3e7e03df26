"""Leases while a statement of their program cannot complete."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import tenure
from tenure.engines.contract import Attach, Enqueued, Place, Withdrawn
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import (
    PATIENCE,
    an_engine,
    backends,
    engine_of,
    enqueue,
    queue_of,
    until,
)
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer
from tests.guarantees import POSTGRESQL, guarantee

pytestmark = pytest.mark.exhaustive

_WINDOW = 2.0
_TRIES = 50
_SOON = 2.0
"""Seconds for what is not measured, on a busy machine."""
_ROW = "SELECT FROM tenure.queues WHERE name = 'blocked' FOR UPDATE"
_WAITS = "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
_LIVING = f"""SELECT count(*) FROM tenure.sessions
    WHERE recovery_window = {_WINDOW} AND clock_timestamp() - seen < interval '{_WINDOW} s'"""


@contextmanager
def _locked(server: PostgresServer, sql: str) -> Iterator[None]:
    """Hold locks, as an administrator's open transaction does."""
    with psycopg.connect(server.url) as connection:
        connection.execute(sql.encode())
        yield


def _wait_for_standbys(server: PostgresServer, names: str) -> None:
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.execute("SELECT pg_reload_conf()")


@guarantee("cut off", "kept", on=POSTGRESQL)
@pytest.mark.parametrize(
    "locks", [_ROW, *(f"LOCK TABLE tenure.{each}" for each in ("queues", "requests", "removals"))]
)
async def test_a_lease_outlives_a_lock_that_a_statement_of_its_program_waits_for(
    server: PostgresServer, locks: str
) -> None:
    async with (
        tenure.connect(server.url) as client,
        client.session(recovery_window=_WINDOW) as session,
    ):
        async with session.mutex("blocked").lock():
            pass  # the row is there
        async with session.mutex("m").lock() as lease:
            with _locked(server, locks):
                with pytest.raises(tenure.AcquireTimeout, match=r"waits for a lock of process \d"):
                    await session.mutex("blocked").lock(timeout=_WINDOW)
                locking = asyncio.ensure_future(session.mutex("blocked").lock())
                await asyncio.wait([locking], timeout=_WINDOW)
                assert lease.held
                assert not locking.done()
                assert len(backends(server)) == 2  # and one that renews
            async with asyncio.timeout(PATIENCE), await locking as later:
                assert later.fencing_token > lease.fencing_token
            assert lease.held
            assert await queue_of(client, "m") == (1, 0)


def _operations() -> int:
    """Return how many operations on requests are in memory."""
    gc.collect()
    names = {"PostgresEnqueue", "PostgresWithdraw"}
    return sum(type(each).__name__ in names for each in gc.get_objects())


async def test_requests_that_time_out_behind_a_blocked_statement_leave_nothing_in_memory(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        async with session.mutex("blocked").lock():
            pass  # the row is there
        with _locked(server, _ROW):
            locking = asyncio.ensure_future(session.mutex("blocked").lock())
            await until(lambda: "waits for a lock" in str(engine_of(client).trouble()))
            waiting = asyncio.ensure_future(session.mutex("m").lock())
            counts = list[int]()
            for number in range(2):
                for answer in await asyncio.gather(
                    *(session.mutex("m").lock(timeout=0.001) for _ in range(_TRIES)),
                    *(
                        session.mutex(f"{number}-{each}").lock(timeout=0.001)
                        for each in range(_TRIES)
                    ),
                    return_exceptions=True,
                ):
                    assert isinstance(answer, tenure.AcquireTimeout)
                counts.append(_operations())
            assert counts[1] < counts[0] + _TRIES
        async with asyncio.timeout(PATIENCE), await locking, await waiting:
            assert await queue_of(client, "m") == (1, 0)


async def test_a_request_that_was_changed_behind_a_blocked_statement_is_withdrawn_after_it(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, an_engine(server.url, client.clock) as engine:
        async with client.mutex("blocked").lock():
            pass
        session = await engine.attach(Attach("/default", 60), Recorder())
        with _locked(server, _ROW):
            blocked = session.enqueue(1, "blocked", 1, b"", timeout=None, ephemeral=True)
            await until(lambda: "waits for a lock" in str(engine.trouble()))
            placed = session.enqueue(2, "m", 2, b"", timeout=None, ephemeral=True)
            changed = session.alter(2, count=1, data=None)
            left = session.withdraw(2)
        async with asyncio.timeout(PATIENCE):
            assert (await answer_of(blocked)).place is Place.GRANTED
            assert (await answer_of(placed)).place is Place.GRANTED
            await answer_of(changed)
            assert await answer_of(left) is Withdrawn.LEFT
        assert await queue_of(client, "m") == (0, 0)


@guarantee("cut off", "kept", on=POSTGRESQL)
@pytest.mark.parametrize("table", ["sessions", "meta", "witness"])
async def test_a_lease_outlives_a_lock_on_a_table_of_the_sessions_that_ends_before_its_deadline(
    server: PostgresServer, table: str
) -> None:
    async with (
        tenure.connect(server.url) as client,
        client.session(recovery_window=3 * _WINDOW) as session,
        session.mutex("m").lock() as lease,
    ):
        (connection,) = backends(server)
        with _locked(server, f"LOCK TABLE tenure.{table}"):
            locking = asyncio.ensure_future(session.mutex("another").lock())
            await until(lambda: client.clock.now() > lease.deadline - _SOON / 2)
        deadline = lease.deadline
        await until(lambda: lease.deadline > deadline or not lease.held)
        assert lease.held
        async with asyncio.timeout(PATIENCE), await locking:
            assert connection in backends(server)


@guarantee("cut off", "kept", on=POSTGRESQL)
@pytest.mark.parametrize("operation", ["update", "end another session"])
async def test_a_lease_outlives_a_lock_that_another_operation_on_its_sessions_waits_for(
    server: PostgresServer, operation: str
) -> None:
    async with (
        tenure.connect(server.url) as client,
        tenure.connect(server.url) as other,
        other.session(recovery_window=10 * _WINDOW),
        client.session(recovery_window=_WINDOW) as session,
    ):
        await session.semaphore("blocked").create(limit=1)
        ending = await client.session(recovery_window=_WINDOW)
        _held = await ending.semaphore("blocked").acquire()
        async with session.mutex("m").lock() as lease:
            with _locked(server, _ROW):
                call: asyncio.Future[Any]
                if operation == "update":
                    call = asyncio.ensure_future(session.semaphore("blocked").update(b"data"))
                else:
                    call = asyncio.ensure_future(other.end_session("/default", ending.id))
                await asyncio.wait([call], timeout=3 * _WINDOW)
                assert not call.done()
                assert lease.held
            async with asyncio.timeout(PATIENCE):
                await call
            assert lease.held


@guarantee("cut off", "kept", on=POSTGRESQL)
async def test_leases_outlive_a_lock_that_the_last_statement_of_a_lost_connection_waits_for(
    server: PostgresServer,
) -> None:
    if server.major >= 14:  # or else the server ends the statement
        server.execute("ALTER ROLE tenure SET client_connection_check_interval = '1h'")
    async with tenure.connect(server.url) as client, an_engine(server.url, client.clock) as engine:
        async with client.mutex("blocked").lock():
            pass
        sessions = [await engine.attach(Attach("/default", _WINDOW), Recorder()) for _ in range(2)]
        with _locked(server, _ROW):
            locking = asyncio.ensure_future(enqueue(sessions[1], [("blocked", b"")]))
            await until(lambda: server.execute(_WAITS) == [(True,)])
            assert isinstance(engine, PostgresEngine)
            assert engine.connection is not None
            engine.connection.drop("cut by the test")
            end = client.clock.now() + 3 * _WINDOW
            while client.clock.now() < end:
                await asyncio.sleep(_WINDOW / 8)
                for session in sessions:
                    session.renew()
                assert server.execute(_LIVING) == [(2,)]
            assert not locking.done()
        (answer,) = await locking
        assert isinstance(answer, Enqueued)
        assert answer.place is Place.GRANTED
        assert server.execute(_LIVING) == [(2,)]


@guarantee("cut off", "kept", on=POSTGRESQL)
async def test_a_lease_outlives_a_lock_that_a_statement_behind_a_pooler_waits_for(
    server: PostgresServer,
) -> None:
    with a_pooler(server) as url:
        async with (
            tenure.connect(url) as client,
            client.session(recovery_window=_WINDOW) as session,
        ):
            async with session.mutex("blocked").lock():
                pass
            async with session.mutex("m").lock() as lease:
                with _locked(server, _ROW):
                    locking = asyncio.ensure_future(session.mutex("blocked").lock())
                    await asyncio.wait([locking], timeout=3 * _WINDOW)
                    assert lease.held
                    assert not locking.done()
                async with asyncio.timeout(PATIENCE), await locking as later:
                    assert later.fencing_token > lease.fencing_token
                assert lease.held


@guarantee("cut off", "one owner", "loss reported", "others proceed", on=POSTGRESQL)
async def test_without_its_synchronous_standby_a_store_renews_and_grants_nothing(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, tenure.connect(server.url) as other:
        session = await client.session(recovery_window=_WINDOW)
        spare = await other.session(recovery_window=20)
        lease = await session.mutex("m").lock()
        _wait_for_standbys(server, "nobody_there")
        waiting = asyncio.ensure_future(spare.mutex("m").lock())
        async with asyncio.timeout(PATIENCE):
            await lease.wait_lost()
        assert client.clock.now() < lease.deadline + 5  # the machine may be busy
        with pytest.raises(tenure.AcquireTimeout, match="waits for a synchronous standby"):
            await spare.mutex("free").lock(timeout=2 * _WINDOW)
        assert not waiting.done()
        assert len(backends(server)) <= 6
        _wait_for_standbys(server, "")
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > lease.fencing_token
            assert await queue_of(client, "m") == (1, 0)
            assert await queue_of(client, "free") == (0, 0)


@guarantee("cut off", "kept", on=POSTGRESQL)
async def test_with_durability_process_a_store_does_not_wait_for_a_standby(
    server: PostgresServer,
) -> None:
    async with (
        tenure.connect(f"{server.url}&durability=process") as client,
        client.session(recovery_window=_WINDOW) as session,
        session.mutex("m").lock() as lease,
    ):
        _wait_for_standbys(server, "nobody_there")
        for _ in range(20):
            async with session.mutex("another").lock(timeout=_WINDOW):
                await asyncio.sleep(_WINDOW / 10)
        assert lease.held


async def test_an_attempt_to_connect_is_abandoned_when_the_server_falls_silent(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url):
        pass
    with _locked(server, "LOCK TABLE tenure.meta"):
        client = tenure.connect(f"{server.url}&connect_timeout=2")
        opening = asyncio.ensure_future(client.list_nodes())
        await until(lambda: server.execute(_WAITS) == [(True,)])
        server.signal(signal.SIGSTOP)
        try:
            begun = client.clock.now()
            with pytest.raises(tenure.EngineUnavailable, match="does not answer"):
                await opening
            assert client.clock.now() < begun + 2 * 2 + _SOON
        finally:
            server.signal(signal.SIGCONT)
    await client.aclose()
