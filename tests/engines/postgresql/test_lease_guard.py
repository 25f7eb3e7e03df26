"""`Lease.guard` on the connections of each driver."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import django.db
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import tenure
from tenure import blocking
from tenure._client.internals import request_of
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.postgresql import session as sessions
from tests.django_settings import configure_django
from tests.engines.postgresql.helpers import until
from tests.engines.postgresql.servers import a_schema, new_name, shared
from tests.engines.postgresql.transactions import (
    ASYNC,
    ASYNC_AUTOCOMMIT,
    SYNC,
    SYNC_AUTOCOMMIT,
)

WINDOW = 60.0
"""A recovery window whose renewals are farther apart than a test takes."""

on_each_driver = pytest.mark.parametrize("driver", ASYNC)
on_each_driver_of_threads = pytest.mark.parametrize("driver", SYNC)


@pytest.fixture
def url() -> Iterator[str]:
    with a_schema() as url:
        yield url


def schema_of(url: str) -> str:
    return url.rpartition("schema=")[2]


def expire_sessions(url: str) -> None:
    """Have all sessions expire in the store, as after a long pause of their programs."""
    shared().execute(f"UPDATE {schema_of(url)}.sessions SET seen = seen - interval '1 hour'")


class Table:
    """A table beside the store, to which a transaction writes."""

    def __init__(self, url: str) -> None:
        self.name = f"{schema_of(url)}.written"
        shared().execute(f"CREATE TABLE {self.name} (token bigint)")

    def insert(self, token: int) -> str:
        return f"INSERT INTO {self.name} VALUES ({token})"

    def rows(self) -> list[tuple[object, ...]]:
        return shared().execute(f"SELECT token FROM {self.name}")


# asyncio


@on_each_driver
async def test_the_transaction_of_a_holder_commits(url: str, driver: str) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        table = Table(url)
        async with ASYNC[driver]() as transaction:
            await lease.guard(transaction.connection)
            await transaction.execute(table.insert(lease.fencing_token))
            await lease.guard(transaction.connection)  # twice is no mistake
        assert table.rows() == [(lease.fencing_token,)]


@on_each_driver
async def test_the_transaction_of_an_expired_holder_rolls_back(url: str, driver: str) -> None:
    async with tenure.connect(url) as client:
        session = await client.session(recovery_window=WINDOW)
        lease = await session.mutex("job").lock()
        table = Table(url)
        expire_sessions(url)

        async def write() -> None:
            async with ASYNC[driver]() as transaction:
                await transaction.execute(table.insert(lease.fencing_token))
                await lease.guard(transaction.connection)

        with pytest.raises(tenure.LeaseLost, match="the database has refused its guard") as lost:
            await write()
        assert lost.value.fencing_token == lease.fencing_token
        assert (lost.value.node, lost.value.name) == ("/default", "job")
        assert lost.value.__cause__ is not None
        assert table.rows() == []


@pytest.mark.parametrize("driver", ASYNC_AUTOCOMMIT)
async def test_a_guard_without_a_transaction_is_refused(url: str, driver: str) -> None:
    async with (
        tenure.connect(url) as client,
        client.mutex("job").lock() as lease,
        ASYNC_AUTOCOMMIT[driver]() as connection,
    ):
        with pytest.raises(tenure.Misuse, match="no transaction is open on the connection"):
            await lease.guard(connection)


async def test_a_released_lease_guards_nothing(url: str) -> None:
    async with tenure.connect(url) as client, ASYNC["psycopg"]() as transaction:
        lease = await client.mutex("job").lock()
        await lease.release()
        with pytest.raises(tenure.LeaseReleased):
            await lease.guard(transaction.connection)


async def test_a_known_loss_is_raised_at_once(url: str) -> None:
    async with tenure.connect(url) as client:
        lease = await client.mutex("job").lock()
        assert await client.evict("/default", "job", lease.fencing_token)
        await lease.wait_lost()
        with pytest.raises(tenure.LeaseLost, match="evicted"):
            await lease.guard("not even looked at")


class PausedConnection(psycopg.AsyncConnection[Any]):
    """A connection whose program is paused before its next statement."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def wait(self, gen: Generator[Any, Any, Any], *args: Any, **options: Any) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().wait(gen, *args, **options)


async def test_a_loss_in_front_of_the_statement_is_found_by_the_database(url: str) -> None:
    async with tenure.connect(url) as client, client.session() as session:
        lease = await session.mutex("job").lock()

        async def lose() -> None:
            await client.evict("/default", "job", lease.fencing_token)
            await lease.wait_lost()

        async with await PausedConnection.connect(shared().url) as connection:
            connection.meanwhile = lose
            with pytest.raises(tenure.LeaseLost, match="refused its guard") as lost:
                await lease.guard(connection)
        assert "has not learned" not in str(lost.value)


async def test_another_database_refuses_the_guard(url: str) -> None:
    elsewhere = new_name()
    shared().execute(f"CREATE DATABASE {elsewhere}")
    other = url.replace("/postgres?", f"/{elsewhere}?")
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        async with await psycopg.AsyncConnection.connect(other.partition("&schema")[0]) as mine:
            with pytest.raises(psycopg.errors.InvalidSchemaName) as missing:
                await lease.guard(mine)
            (note,) = missing.value.__notes__
            assert "needs a connection to the database of postgresql://tenure@/" in note
        async with tenure.connect(other) as namesake, namesake.mutex("job").lock():
            where = other.partition("&schema")[0]
            async with await psycopg.AsyncConnection.connect(where) as mine:
                with pytest.raises(tenure.LeaseLost, match=r"is not to the database of postgres"):
                    await lease.guard(mine)
        assert lease.held
    shared().execute(f"DROP DATABASE {elsewhere} WITH (FORCE)")


async def test_an_error_of_the_driver_passes_through(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        mine = await psycopg.AsyncConnection.connect(shared().url)
        await mine.close()
        with pytest.raises(psycopg.OperationalError, match="closed"):
            await lease.guard(mine)


async def test_a_snapshot_from_before_an_expiry_is_a_serialization_failure(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        session = await client.session(recovery_window=WINDOW)
        lease = await session.mutex("job").lock()
        taken: list[tenure.Lease] = []

        async def expire() -> None:
            expire_sessions(url)
            taken.append(await other.mutex("job").lock(timeout=30))

        async with await PausedConnection.connect(shared().url) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.execute("SELECT 1")
            connection.meanwhile = expire
            with pytest.raises(psycopg.errors.SerializationFailure):
                await lease.guard(connection)
            await connection.rollback()
            with pytest.raises(tenure.LeaseLost):
                await lease.guard(connection)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "SQLAlchemy session on asyncpg"])
async def test_a_release_waits_for_the_end_of_the_transaction(url: str, driver: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        lease = await client.mutex("job").lock()
        waiting = asyncio.ensure_future(other.mutex("job").lock())
        async with ASYNC[driver]() as transaction:
            await lease.guard(transaction.connection)
            releasing = asyncio.ensure_future(lease.release())
            async with other.mutex("another").lock(), client.mutex("one more").lock():
                assert not releasing.done()
                assert not waiting.done()
        await releasing
        await (await waiting).release()


async def test_a_release_that_waits_for_long_is_logged_once(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REPORTED_AFTER", 0.1)

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if "waits" in each.getMessage()]

    async with tenure.connect(url) as client:
        lease = await client.mutex("job").lock()
        async with client.session() as session:
            _held = await session.mutex("of a session").lock()
            async with ASYNC["psycopg"]() as transaction:
                await lease.guard(transaction.connection)
                releasing = asyncio.ensure_future(lease.release())
                await until(lambda: len(lines()) == 1)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(releasing), 0.3)
            await releasing
    (line,) = lines()
    assert line.startswith(
        "release waits for the end of a transaction that guards the lease: "
        f"node=/default name='job' session={lease.session.id} seconds="
    )


async def test_the_end_of_a_session_waits_too_and_is_logged(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REPORTED_AFTER", 0.1)
    async with tenure.connect(url) as client:
        session = await client.session()
        lease = await session.mutex("job").lock()
        async with ASYNC["asyncpg"]() as transaction:
            await lease.guard(transaction.connection)
            closing = asyncio.ensure_future(session.aclose())
            await until(lambda: "release waits" in caplog.text)
            assert not closing.done()
        await closing
    assert caplog.text.count("release waits") == 1


async def test_a_guard_that_is_cancelled_while_it_waits_leaves_the_lease_held(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        rows = f"SELECT * FROM {schema_of(url)}.requests FOR UPDATE"
        async with ASYNC["psycopg"]() as holding_up, ASYNC["psycopg"]() as transaction:
            await holding_up.execute(rows)
            guarding = asyncio.ensure_future(lease.guard(transaction.connection))
            pid = transaction.connection.info.backend_pid
            waits = f"SELECT cardinality(pg_blocking_pids({pid})) > 0"
            await until(lambda: shared().execute(waits) == [(True,)])
            guarding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await guarding
            assert lease.held
            await transaction.connection.rollback()
            await holding_up.connection.rollback()
            await lease.guard(transaction.connection)


async def test_an_object_that_is_no_connection_is_refused(url: str) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        with psycopg.connect(shared().url) as of_threads:
            for wrong in (None, 3, sqlite3.connect(":memory:"), of_threads, engine):
                with pytest.raises(tenure.InvalidArgument, match="AsyncSession of SQLAlchemy"):
                    await lease.guard(wrong)
        async with engine.connect() as connection:
            with pytest.raises(tenure.InvalidArgument, match="is guarded on an AsyncConnection"):
                await lease.guard(connection)
    await engine.dispose()


@pytest.mark.parametrize("store", ["memory://", "sqlite:///jobs.db"])
async def test_a_store_elsewhere_has_no_guard(
    store: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with tenure.connect(store) as client, client.mutex("job").lock() as lease:
        with pytest.raises(tenure.Unsupported, match=r"use a fence of tenure\.fencing"):
            await lease.guard(None)


def test_a_server_does_not_know_the_database_of_its_clients() -> None:
    engine = connect_engine("tenure://localhost", SystemClock())
    with pytest.raises(tenure.Unsupported, match="with the token 33"):
        engine.guard("/default", "job", 33)


async def test_a_lease_without_a_token_has_no_guard(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        request_of(lease).order_id = None
        with pytest.raises(tenure.Unsupported, match="no fencing token"):
            await lease.guard(None)


async def test_a_name_with_any_character_is_guarded(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("%s ?\0 'ö\"$1").lock() as lease:
        async with ASYNC["psycopg"]() as transaction:
            await lease.guard(transaction.connection)
        async with ASYNC["SQLAlchemy session on asyncpg"]() as transaction:
            await lease.guard(transaction.connection)


# Threads


@on_each_driver_of_threads
def test_the_transaction_of_a_thread_commits(url: str, driver: str) -> None:
    with blocking.connect(url) as client, client.mutex("job").lock() as lease:
        table = Table(url)
        with SYNC[driver]() as transaction:
            lease.guard(transaction.connection)
            transaction.execute(table.insert(lease.fencing_token))
            lease.guard(transaction.connection)
        assert table.rows() == [(lease.fencing_token,)]


@on_each_driver_of_threads
def test_the_transaction_of_an_expired_thread_rolls_back(url: str, driver: str) -> None:
    with blocking.connect(url) as client:
        session = client.session(recovery_window=WINDOW)
        lease = session.mutex("job").lock()
        table = Table(url)
        expire_sessions(url)

        def write() -> None:
            with SYNC[driver]() as transaction:
                transaction.execute(table.insert(lease.fencing_token))
                lease.guard(transaction.connection)

        with pytest.raises(tenure.LeaseLost, match="the database has refused its guard"):
            write()
        assert table.rows() == []


@pytest.mark.parametrize("driver", SYNC_AUTOCOMMIT)
def test_a_thread_needs_a_transaction(url: str, driver: str) -> None:
    with (
        blocking.connect(url) as client,
        client.mutex("job").lock() as lease,
        SYNC_AUTOCOMMIT[driver]() as connection,
        pytest.raises(tenure.Misuse, match="no transaction is open on the connection"),
    ):
        lease.guard(connection)


def test_django_needs_no_block_where_it_does_not_commit_by_itself(url: str) -> None:
    with (
        blocking.connect(url) as client,
        client.mutex("job").lock() as lease,
        SYNC_AUTOCOMMIT["Django"]() as connection,
    ):
        of_django: Any = connection
        of_django.set_autocommit(False)
        lease.guard(connection)
        of_django.rollback()


def test_a_release_of_a_thread_waits_for_the_transaction(url: str) -> None:
    with blocking.connect(url) as client:
        lease = client.mutex("job").lock()
        releasing = threading.Thread(target=lease.release)
        with SYNC["psycopg2"]() as transaction:
            lease.guard(transaction.connection)
            releasing.start()
            with client.mutex("another").lock():
                assert client.mutex("job").locked()
        releasing.join()
        assert not client.mutex("job").locked()


def test_an_account_without_rights_is_named_in_a_note(url: str) -> None:
    role = f"role_{new_name()}"
    with blocking.connect(url) as client, client.mutex("job").lock() as lease:
        shared().execute(f"CREATE ROLE {role} LOGIN")
        with (
            psycopg.connect(shared().url.replace("tenure@", f"{role}@")) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege) as refused,
        ):
            lease.guard(connection)
    assert "an account with USAGE on its schema" in refused.value.__notes__[0]


def test_an_error_of_a_threads_driver_passes_through(url: str) -> None:
    with blocking.connect(url) as client, client.mutex("job").lock() as lease:
        mine = psycopg.connect(shared().url)
        mine.close()
        with pytest.raises(psycopg.OperationalError, match="closed"):
            lease.guard(mine)


def test_a_thread_is_refused_what_is_no_connection(url: str) -> None:
    configure_django()
    engine = sqlalchemy.create_engine("sqlite://")
    with (
        blocking.connect(url) as client,
        client.mutex("job").lock() as lease,
        engine.connect() as of_sqlite,
    ):
        for wrong in (
            *(None, 3, sqlite3.connect(":memory:"), engine, of_sqlite),
            *(django.db.connection, psycopg.AsyncConnection),
        ):
            with pytest.raises(tenure.InvalidArgument, match="Django's connection to Postgre"):
                lease.guard(wrong)
    engine.dispose()


def test_a_thread_inside_a_lost_block_gets_its_loss(url: str) -> None:
    def lose(client: blocking.Client) -> None:
        with client.mutex("job").lock() as lease, client.mutex("another").lock() as other:
            client.evict("/default", "job", lease.fencing_token)
            lease.wait_lost()
            other.guard("not even looked at")

    with blocking.connect(url) as client, pytest.raises(tenure.LeaseLost, match="evicted"):
        lose(client)
