"""The fence before tables, on the connections that programs have."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import django.db
import psycopg
import pytest
import sqlalchemy
from django.db import transaction
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.ext.asyncio.session import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tenure.errors import InvalidArgument, Misuse, StaleToken, Unsupported
from tenure.fencing import SQLFence
from tenure.fencing.connections import rendered
from tests.django_settings import configure_django

FENCE = SQLFence("accounts")

Connect = Callable[[], Any]


class OfOnesOwn(sqlite3.Connection):
    """As programs derive them, in a module that has no paramstyle."""


def _with_sqlite(path: Path) -> Iterator[Connect]:
    yield lambda: closing(sqlite3.connect(path))


def _with_a_class_of_ones_own(path: Path) -> Iterator[Connect]:
    yield lambda: closing(sqlite3.connect(path, factory=OfOnesOwn))


def _with_sqlalchemy(path: Path) -> Iterator[Connect]:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield engine.connect
    engine.dispose()


def _with_a_session(path: Path) -> Iterator[Connect]:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield lambda: Session(engine)
    engine.dispose()


def _with_psycopg(url: str) -> Iterator[Connect]:
    yield lambda: psycopg.connect(url)


def for_sqlalchemy(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


def _with_sqlalchemy_on_postgres(url: str) -> Iterator[Connect]:
    engine = sqlalchemy.create_engine(for_sqlalchemy(url))
    yield engine.connect
    engine.dispose()


ON_SQLITE: list[Callable[..., Iterator[Connect]]] = [
    _with_sqlite,
    _with_a_class_of_ones_own,
    _with_sqlalchemy,
    _with_a_session,
]
ON_POSTGRES: list[Callable[..., Iterator[Connect]]] = [_with_psycopg, _with_sqlalchemy_on_postgres]


@pytest.fixture(params=ON_SQLITE + ON_POSTGRES)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Gives a new connection, to a database with the fences' table."""
    where = tmp_path / "data.db"
    if request.param in ON_POSTGRES:
        where = request.getfixturevalue("postgres_url")
    opened = request.param(where)
    connect: Connect = next(opened)
    with connect() as connection:
        FENCE.create_table(connection)
        FENCE.create_table(connection)  # nothing happens where it is
        connection.commit()
    yield connect
    with connect() as connection:
        execute(connection, "DROP TABLE tenure_fences")
        connection.commit()
    assert list(opened) == []


def execute(connection: Any, statement: str) -> Any:
    if isinstance(connection, sqlalchemy.Connection | Session):
        return connection.execute(sqlalchemy.text(statement))
    return connection.execute(statement)


def test_an_older_token_is_refused_and_the_same_is_not(connect: Connect) -> None:
    with connect() as connection:
        assert FENCE.newest(connection) is None
        for token in (33, 33, 34, 34, 2**53 - 1):
            FENCE.admit(connection, token)
            assert FENCE.newest(connection) == token
        for token in (2**53 - 2, 33, 0):
            with pytest.raises(StaleToken) as caught:
                FENCE.admit(connection, token)
            assert (caught.value.resource, caught.value.token) == ("accounts", token)
            assert caught.value.newest == 2**53 - 1


def test_what_was_committed_counts_for_the_next_transaction(connect: Connect) -> None:
    with connect() as connection:
        FENCE.admit(connection, 33)
        connection.commit()
    with connect() as connection:
        with pytest.raises(StaleToken):
            FENCE.admit(connection, 32)
        connection.rollback()
        FENCE.admit(connection, 33)  # nothing but `writes` is changed: MySQL would count no row
        connection.commit()
        (writes,) = execute(connection, "SELECT writes FROM tenure_fences").fetchone()
        assert writes == 2


def test_an_admission_is_rolled_back_with_the_write(connect: Connect) -> None:
    with connect() as connection:
        FENCE.admit(connection, 33)
        connection.commit()
        FENCE.admit(connection, 40)
        connection.rollback()
        assert FENCE.newest(connection) == 33
        FENCE.admit(connection, 34)


def test_the_write_of_a_stale_holder_is_rolled_back_with_the_refusal(connect: Connect) -> None:
    with connect() as connection:
        FENCE.admit(connection, 34)
        execute(connection, "CREATE TABLE balance (cents INT)")
        execute(connection, "INSERT INTO balance VALUES (100)")
        connection.commit()
        execute(connection, "UPDATE balance SET cents = 7")  # first, and not as it should be
        with pytest.raises(StaleToken):
            FENCE.admit(connection, 33)
        connection.rollback()
        assert tuple(execute(connection, "SELECT cents FROM balance").fetchone()) == (100,)
        execute(connection, "DROP TABLE balance")
        connection.commit()


def test_each_resource_has_tokens_of_its_own(connect: Connect) -> None:
    with connect() as connection:
        FENCE.admit(connection, 34)
        SQLFence("orders").admit(connection, 5)
        assert FENCE.newest(connection) == 34
        assert SQLFence("orders").newest(connection) == 5
        assert SQLFence("'; DROP TABLE tenure_fences; -- %s ? :1").newest(connection) is None


# On SQLite alone


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "data.db")) as connection:
        FENCE.create_table(connection)
        connection.commit()
        yield connection


def test_another_table_is_another_fence(sqlite: sqlite3.Connection) -> None:
    other = SQLFence("accounts", table="main.my_fences")
    with sqlite:
        other.create_table(sqlite)
        FENCE.admit(sqlite, 34)
        other.admit(sqlite, 5)
    assert (FENCE.newest(sqlite), other.newest(sqlite)) == (34, 5)
    assert "my_fences" in repr(other)
    assert "my_fences" in other.schema


@pytest.mark.parametrize("make", [psycopg.rows.dict_row, psycopg.rows.scalar_row])
def test_rows_may_be_whatever_the_connection_makes_of_them(postgres_url: str, make: Any) -> None:
    with psycopg.connect(postgres_url, row_factory=make) as connection:
        FENCE.create_table(connection)
        FENCE.admit(connection, 34)
        with pytest.raises(StaleToken) as caught:
            FENCE.admit(connection, 33)
        assert caught.value.newest == 34
        connection.rollback()


@pytest.mark.parametrize("make", [lambda _, row: {"token": row[0]}, sqlite3.Row])
def test_and_so_may_those_of_sqlite(sqlite: sqlite3.Connection, make: Any) -> None:
    sqlite.row_factory = make
    FENCE.admit(sqlite, 34)
    assert FENCE.newest(sqlite) == 34


def test_outside_a_transaction_nothing_is_admitted(sqlite: sqlite3.Connection) -> None:
    with sqlite:
        FENCE.admit(sqlite, 33)
    sqlite.isolation_level = None  # each statement is committed by itself
    with pytest.raises(Misuse, match="no transaction is open"):
        FENCE.admit(sqlite, 34)
    with pytest.raises(Misuse, match="no transaction is open"):
        SQLFence("new").admit(sqlite, 34)
    assert SQLFence("new").newest(sqlite) is None
    sqlite.execute("BEGIN IMMEDIATE")
    FENCE.admit(sqlite, 35)
    sqlite.execute("COMMIT")


def test_on_postgres_neither(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        FENCE.create_table(connection)
        with pytest.raises(Misuse, match="autocommit"):
            FENCE.admit(connection, 34)
        with connection.transaction():
            FENCE.admit(connection, 35)
        connection.execute("DROP TABLE tenure_fences")


def test_of_sqlalchemy_neither(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(
        f"sqlite:///{tmp_path / 'data.db'}", isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        FENCE.create_table(connection)
        with pytest.raises(Misuse, match="no transaction is open"):
            FENCE.admit(connection, 34)
    engine.dispose()


def test_a_sqlalchemy_block_is_rolled_back_by_the_refusal(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'data.db'}")
    notes = sqlalchemy.table("notes", sqlalchemy.column("text"))
    make_session = sessionmaker(engine)
    with make_session.begin() as session:
        FENCE.create_table(session)
        session.execute(sqlalchemy.text("CREATE TABLE notes (text TEXT)"))

    def write(token: int, text: str) -> None:
        with make_session.begin() as session:
            FENCE.admit(session, token)
            session.execute(notes.insert().values(text=text))

    write(33, "first")
    write(34, "second")
    with pytest.raises(StaleToken):
        write(33, "too late")
    registry = scoped_session(make_session)
    FENCE.admit(registry, 34)
    assert [text for (text,) in registry.execute(sqlalchemy.select(notes.c.text))] == [
        "first",
        "second",
    ]
    registry.remove()
    engine.dispose()


async def test_asynchronous_sqlalchemy_runs_it_by_run_sync(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'data.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(FENCE.create_table)
        await connection.run_sync(FENCE.admit, 34)
    async with AsyncSession(engine) as session:
        with pytest.raises(StaleToken):
            async with session.begin():
                await session.run_sync(FENCE.admit, 33)
        assert await session.run_sync(FENCE.newest) == 34
        with pytest.raises(InvalidArgument, match=r"await fence\.admit_async"):
            FENCE.admit(session, 35)
    async with engine.connect() as connection:
        with pytest.raises(InvalidArgument, match=r"await fence\.admit_async"):
            FENCE.admit(connection, 35)
    await engine.dispose()


@pytest.mark.parametrize("where", ["sqlite", "postgres"])
async def test_asynchronous_sqlalchemy_admits_nothing_outside_a_transaction_either(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'data.db'}"
    if where == "postgres":
        url = for_sqlalchemy(request.getfixturevalue("postgres_url"))
    engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.run_sync(FENCE.create_table)
        with pytest.raises(Misuse, match="no transaction is open"):
            await connection.run_sync(FENCE.admit, 34)
        await connection.exec_driver_sql("DROP TABLE tenure_fences")
    await engine.dispose()


async def test_asynchronous_sqlalchemy_on_postgres_does_too(postgres_url: str) -> None:
    engine = create_async_engine(for_sqlalchemy(postgres_url))
    async with engine.connect() as connection:
        await connection.run_sync(FENCE.create_table)
        await connection.run_sync(FENCE.admit, 34)
        with pytest.raises(StaleToken):
            await connection.run_sync(FENCE.admit, 33)
        await connection.rollback()
    await engine.dispose()


@contextlib.asynccontextmanager
async def of_psycopg(url: str, autocommit: bool) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=autocommit) as connection:
        yield connection


@contextlib.asynccontextmanager
async def of_asyncpg(url: str, autocommit: bool) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        if autocommit:
            yield connection
        else:
            async with connection.transaction():
                yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def of_sqlalchemy(url: str, autocommit: bool) -> AsyncIterator[Any]:
    engine = create_async_engine(
        url.replace("postgresql:", "postgresql+asyncpg:"),
        isolation_level="AUTOCOMMIT" if autocommit else "READ COMMITTED",
    )
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


@pytest.fixture
def fences_url(postgres_url: str) -> Iterator[str]:
    """Of a database with the fences' table."""
    with psycopg.connect(postgres_url) as connection:
        FENCE.create_table(connection)
    yield postgres_url
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE tenure_fences")


asynchronous = pytest.mark.parametrize("connect", [of_psycopg, of_asyncpg, of_sqlalchemy])


@asynchronous
async def test_an_asynchronous_transaction_is_admitted_or_rolled_back(
    fences_url: str, connect: Any
) -> None:
    async def write(token: int) -> None:
        async with connect(fences_url, False) as connection:
            await FENCE.admit_async(connection, token)

    await write(33)
    await write(34)
    await write(34)
    with pytest.raises(StaleToken) as caught:
        await write(33)
    assert caught.value.newest == 34
    with psycopg.connect(fences_url) as connection:
        assert FENCE.newest(connection) == 34


@asynchronous
async def test_two_first_writes_at_once_come_one_after_the_other(
    fences_url: str, connect: Any
) -> None:
    async with connect(fences_url, False) as first:
        await FENCE.admit_async(first, 34)

        async def write(token: int) -> None:
            async with connect(fences_url, False) as second:
                await FENCE.admit_async(second, token)

        newer, older = asyncio.ensure_future(write(35)), asyncio.ensure_future(write(33))
        with psycopg.connect(fences_url, autocommit=True) as eye:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while eye.execute(waiting).fetchone() != (2,):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await newer
    with pytest.raises(StaleToken):
        await older


@asynchronous
async def test_an_asynchronous_write_outside_a_transaction_is_not_admitted(
    fences_url: str, connect: Any
) -> None:
    async with connect(fences_url, True) as connection:
        with pytest.raises(Misuse, match="no transaction is open"):
            await FENCE.admit_async(connection, 34)


async def test_an_asynchronous_connection_is_named_where_it_does_not_fit(fences_url: str) -> None:
    async with of_psycopg(fences_url, False) as one, of_asyncpg(fences_url, False) as two:
        for connection in (one, two):
            with pytest.raises(InvalidArgument, match=r"await fence\.admit_async"):
                FENCE.admit(connection, 34)
    with sqlite3.connect(":memory:") as of_threads:
        for wrong in (None, 3, of_threads):
            with pytest.raises(InvalidArgument, match="AsyncConnection of psycopg"):
                await FENCE.admit_async(wrong, 34)
    of_threads.close()


@pytest.fixture
def django_connection() -> Iterator[Any]:
    """What a program imports as `django.db.connection`."""
    configure_django()
    FENCE.create_table(django.db.connection)
    yield django.db.connection
    with django.db.connection.cursor() as cursor:
        cursor.execute("DROP TABLE tenure_fences")
    django.db.connection.close()


def test_a_block_of_django_is_rolled_back_by_the_refusal(django_connection: Any) -> None:
    with transaction.atomic():
        FENCE.admit(django_connection, 34)
    with pytest.raises(StaleToken), transaction.atomic():
        FENCE.admit(django_connection, 33)
    assert FENCE.newest(django_connection) == 34


def test_outside_a_transaction_of_django_nothing_is_admitted(django_connection: Any) -> None:
    with pytest.raises(Misuse, match="no transaction is open"):
        FENCE.admit(django_connection, 34)
    assert FENCE.newest(django_connection) is None
    transaction.set_autocommit(False)
    FENCE.admit(django_connection, 35)
    transaction.commit()
    transaction.set_autocommit(True)
    assert FENCE.newest(django_connection) == 35


def test_a_database_that_fails_is_heard(sqlite: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table: nowhere"):
        SQLFence("accounts", table="nowhere").admit(sqlite, 33)
    sqlite.execute(
        "CREATE TRIGGER full BEFORE INSERT ON tenure_fences "
        "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    )
    sqlite.commit()
    with pytest.raises(sqlite3.IntegrityError, match="the disk is full"):
        FENCE.admit(sqlite, 33)
    sqlite.execute("DROP TRIGGER full")
    FENCE.admit(sqlite, 33)


@pytest.mark.parametrize("wrong", [None, 7, "sqlite:///data.db", object()])
def test_what_is_no_connection_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="DB-API connection"):
        FENCE.admit(wrong, 33)


@pytest.mark.parametrize("token", [-1, True, 2**53, "7"])
def test_what_is_no_token_is_refused(sqlite: sqlite3.Connection, token: Any) -> None:
    with pytest.raises(InvalidArgument, match="fencing token"):
        FENCE.admit(sqlite, token)
    assert not sqlite.in_transaction


@pytest.mark.parametrize(
    "arguments",
    [
        {"resource": ""},
        {"resource": "x", "table": "fences; DROP TABLE users"},
        {"resource": "x", "table": "a.b.c"},
        {"resource": "x", "table": 7},
        {"resource": "x", "paramstyle": "percent"},
    ],
)
def test_what_makes_no_fence_is_refused(arguments: Any) -> None:
    with pytest.raises(InvalidArgument):
        SQLFence(**arguments)


# Drivers of other kinds, with SQLite behind


class Wrapped:
    """A driver whose module has no paramstyle."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def cursor(self) -> Any:
        return self.connection.cursor()

    def commit(self) -> None:
        self.connection.commit()


@pytest.mark.parametrize("style", ["qmark", "named"])
def test_a_parameter_style_can_be_given(sqlite: sqlite3.Connection, style: str) -> None:
    connection = Wrapped(sqlite)
    with pytest.raises(InvalidArgument, match="paramstyle="):
        FENCE.admit(connection, 33)
    fence = SQLFence("accounts", paramstyle=style)
    fence.admit(connection, 33)
    connection.commit()
    with pytest.raises(StaleToken):
        fence.admit(connection, 32)


@pytest.mark.parametrize(
    ("style", "text", "values"),
    [
        ("qmark", "a = ? AND b = ?", (1, "x")),
        ("format", "a = %s AND b = %s", (1, "x")),
        ("numeric", "a = :1 AND b = :2", (1, "x")),
        ("numeric_dollar", "a = $1 AND b = $2", (1, "x")),
        ("named", "a = :v1 AND b = :v2", {"v1": 1, "v2": "x"}),
        ("pyformat", "a = %(v1)s AND b = %(v2)s", {"v1": 1, "v2": "x"}),
    ],
)
def test_a_statement_is_written_in_the_drivers_style(style: str, text: str, values: Any) -> None:
    assert rendered("a = ? AND b = ?", style, (1, "x")) == (text, values)


class Uncounting(Wrapped):
    """A driver that does not know how many rows it has touched, which PEP 249 allows."""

    def cursor(self) -> Any:
        cursor = super().cursor()

        class Cursor:
            rowcount = -1
            execute = cursor.execute
            close = cursor.close

        return Cursor


def test_a_driver_that_does_not_count_is_refused(sqlite: sqlite3.Connection) -> None:
    with pytest.raises(Unsupported, match="number of affected rows"):
        SQLFence("accounts", paramstyle="qmark").admit(Uncounting(sqlite), 33)


class Snapshot(Wrapped):
    """What it reads is as of the beginning; what it updates is as of now (MySQL is like that).

    Attributes:
        reads: what the next queries for the newest token answer.
        between: statements that others run before the next insertion or query.
    """

    def __init__(self, connection: sqlite3.Connection, *reads: int | None) -> None:
        super().__init__(connection)
        self.reads = list(reads)

    def cursor(self) -> Any:
        snapshot, cursor = self, super().cursor()

        class Cursor:
            close = cursor.close

            @property
            def rowcount(self) -> int:
                return int(cursor.rowcount)

            def execute(self, *statement: Any) -> None:
                cursor.execute(*statement)

            def fetchone(self) -> tuple[int] | None:
                value = snapshot.reads.pop(0)
                return None if value is None else (value,)

        return Cursor()


@pytest.mark.parametrize(
    ("committed", "token", "reads", "newest"),
    [
        (40, 33, [33, 33], None),  # the snapshot never gets to see the newer one
        (40, 33, [33, 40], 40),
        (40, 33, [None, 40], 40),  # it was made, by a newer holder, while this one tried to
        (40, 33, [33, None], None),
    ],
)
def test_what_is_read_decides_nothing(
    sqlite: sqlite3.Connection,
    committed: int,
    token: int,
    reads: list[int | None],
    newest: int | None,
) -> None:
    with sqlite:
        FENCE.admit(sqlite, committed)
    with pytest.raises(StaleToken) as caught:
        SQLFence("accounts", paramstyle="qmark").admit(Snapshot(sqlite, *reads), token)
    assert caught.value.newest == newest


def test_a_row_that_came_meanwhile_is_no_hindrance(sqlite: sqlite3.Connection) -> None:
    with sqlite:
        FENCE.admit(sqlite, 33)
    fence = SQLFence("accounts", paramstyle="qmark")
    seldom = Snapshot(sqlite, 33)
    seldom.cursor = lambda: Late(sqlite, seldom)  # type: ignore[method-assign]
    fence.admit(seldom, 34)
    assert FENCE.newest(sqlite) == 34


class Late:
    """Its first UPDATE comes before the row does, and its later ones after."""

    def __init__(self, connection: sqlite3.Connection, snapshot: Snapshot) -> None:
        self.cursor, self.snapshot = connection.cursor(), snapshot
        self.close = self.cursor.close
        self.rowcount = 0

    def execute(self, statement: str, values: Any = ()) -> None:
        if statement.startswith("UPDATE") and self.snapshot.reads:
            return
        self.cursor.execute(statement, values)
        self.rowcount = self.cursor.rowcount

    def fetchone(self) -> tuple[int]:
        return (self.snapshot.reads.pop(0) or 0,)
