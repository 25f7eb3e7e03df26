"""Transactions of each driver whose connections `Lease.guard` takes.

Each one commits at the end of its block, and rolls back when an exception leaves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

import asyncpg
import django.db
import psycopg
import psycopg2
import pytest
import sqlalchemy
from django.db import transaction
from django.db.backends.postgresql.features import DatabaseFeatures
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.django_settings import configure_django
from tests.engines.postgresql.servers import shared


@dataclass(frozen=True)
class AsyncTransaction:
    """A transaction of an asynchronous driver: its connection, and how it runs SQL."""

    connection: Any
    execute: Callable[[str], Awaitable[object]]


@dataclass(frozen=True)
class Transaction:
    """A transaction of a synchronous driver: its connection, and how it runs SQL."""

    connection: Any
    execute: Callable[[str], object]


def _url(driver: str) -> str:
    return shared().url.replace("postgresql:", f"postgresql+{driver}:")


# asyncio


def _on_psycopg(connection: psycopg.AsyncConnection[Any]) -> AsyncTransaction:
    return AsyncTransaction(connection, lambda sql: connection.execute(sql.encode()))


@contextlib.asynccontextmanager
async def _psycopg() -> AsyncIterator[AsyncTransaction]:
    async with await psycopg.AsyncConnection.connect(shared().url) as connection:
        yield _on_psycopg(connection)


@contextlib.asynccontextmanager
async def _psycopg_cursor() -> AsyncIterator[AsyncTransaction]:
    async with (
        await psycopg.AsyncConnection.connect(shared().url) as connection,
        connection.cursor() as cursor,
    ):
        yield AsyncTransaction(cursor, lambda sql: cursor.execute(sql.encode()))


@contextlib.asynccontextmanager
async def _psycopg_block() -> AsyncIterator[AsyncTransaction]:
    connection = await psycopg.AsyncConnection.connect(
        shared().url, autocommit=True, cursor_factory=psycopg.AsyncRawCursor
    )
    async with connection, connection.transaction():
        yield _on_psycopg(connection)


@contextlib.asynccontextmanager
async def _psycopg_pipeline() -> AsyncIterator[AsyncTransaction]:
    async with (
        await psycopg.AsyncConnection.connect(shared().url) as connection,
        connection.pipeline(),
    ):
        yield _on_psycopg(connection)


@contextlib.asynccontextmanager
async def _asyncpg() -> AsyncIterator[AsyncTransaction]:
    connection = await asyncpg.connect(shared().url)
    try:
        async with connection.transaction():
            yield AsyncTransaction(connection, connection.execute)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def _asyncpg_pool() -> AsyncIterator[AsyncTransaction]:
    async with (
        asyncpg.create_pool(shared().url, min_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        yield AsyncTransaction(connection, connection.execute)


def _sqlalchemy_async(
    driver: str, wrapper: str
) -> Callable[[], AbstractAsyncContextManager[AsyncTransaction]]:
    @contextlib.asynccontextmanager
    async def begin() -> AsyncIterator[AsyncTransaction]:
        engine = create_async_engine(_url(driver))
        made = async_sessionmaker(engine)
        scoped = async_scoped_session(made, scopefunc=lambda: 1)
        makers: dict[str, Any] = {"connection": engine.connect, "session": made, "scoped": scoped}
        own = makers[wrapper]()
        try:
            async with own, own.begin():
                connection = scoped if wrapper == "scoped" else own
                yield AsyncTransaction(connection, lambda sql: own.execute(sqlalchemy.text(sql)))
        finally:
            await engine.dispose()

    return begin


ASYNC: dict[str, Callable[[], AbstractAsyncContextManager[AsyncTransaction]]] = {
    "psycopg": _psycopg,
    "psycopg cursor": _psycopg_cursor,
    "psycopg block": _psycopg_block,
    "psycopg pipeline": _psycopg_pipeline,
    "asyncpg": _asyncpg,
    "asyncpg pool": _asyncpg_pool,
    "SQLAlchemy connection on psycopg": _sqlalchemy_async("psycopg", "connection"),
    "SQLAlchemy connection on asyncpg": _sqlalchemy_async("asyncpg", "connection"),
    "SQLAlchemy session on psycopg": _sqlalchemy_async("psycopg", "session"),
    "SQLAlchemy session on asyncpg": _sqlalchemy_async("asyncpg", "session"),
    "SQLAlchemy scoped session": _sqlalchemy_async("asyncpg", "scoped"),
}


@contextlib.asynccontextmanager
async def _psycopg_autocommit() -> AsyncIterator[object]:
    async with await psycopg.AsyncConnection.connect(shared().url, autocommit=True) as connection:
        yield connection


@contextlib.asynccontextmanager
async def _asyncpg_autocommit() -> AsyncIterator[object]:
    connection = await asyncpg.connect(shared().url)
    try:
        yield connection
    finally:
        await connection.close()


def _sqlalchemy_async_autocommit(
    driver: str,
) -> Callable[[], AbstractAsyncContextManager[object]]:
    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[object]:
        engine = create_async_engine(_url(driver), isolation_level="AUTOCOMMIT")
        try:
            async with AsyncSession(engine) as session:
                yield session
        finally:
            await engine.dispose()

    return connect


ASYNC_AUTOCOMMIT: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {
    "psycopg": _psycopg_autocommit,
    "asyncpg": _asyncpg_autocommit,
    "SQLAlchemy on psycopg": _sqlalchemy_async_autocommit("psycopg"),
    "SQLAlchemy on asyncpg": _sqlalchemy_async_autocommit("asyncpg"),
}


# Threads


@contextlib.contextmanager
def _sync_psycopg() -> Iterator[Transaction]:
    with psycopg.connect(shared().url) as connection:
        yield Transaction(connection, lambda sql: connection.execute(sql.encode()))


@contextlib.contextmanager
def _sync_psycopg_cursor() -> Iterator[Transaction]:
    with psycopg.connect(shared().url) as connection, connection.cursor() as cursor:
        yield Transaction(cursor, lambda sql: cursor.execute(sql.encode()))


@contextlib.contextmanager
def _psycopg2(*, cursor: bool = False) -> Iterator[Transaction]:
    connection = psycopg2.connect(shared().url)
    try:
        with connection, connection.cursor() as its_cursor:
            yield Transaction(its_cursor if cursor else connection, its_cursor.execute)
    finally:
        connection.close()


def _sqlalchemy(driver: str, wrapper: str) -> Callable[[], AbstractContextManager[Transaction]]:
    @contextlib.contextmanager
    def begin() -> Iterator[Transaction]:
        engine = sqlalchemy.create_engine(_url(driver))
        made = sessionmaker(engine)
        scoped = scoped_session(made)
        makers: dict[str, Any] = {"connection": engine.connect, "session": made, "scoped": scoped}
        own = makers[wrapper]()
        try:
            with own, own.begin():
                connection = scoped if wrapper == "scoped" else own
                yield Transaction(connection, lambda sql: own.execute(sqlalchemy.text(sql)))
        finally:
            engine.dispose()

    return begin


@contextlib.contextmanager
def _django(*, proxy: bool = False) -> Iterator[Transaction]:
    configure_django()
    (oldest, *_) = DatabaseFeatures.minimum_database_version
    if shared().major < oldest:
        pytest.skip(f"this Django needs PostgreSQL {oldest}")
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "tenure",
        "HOST": str(shared().folder),
    }
    own = ConnectionHandler({"default": settings, "guarded": settings})["guarded"]
    django.db.connections["guarded"] = own
    try:
        connection = ConnectionProxy(django.db.connections, "guarded") if proxy else own
        with transaction.atomic(using="guarded"), own.cursor() as cursor:
            yield Transaction(connection, cursor.execute)
    finally:
        own.close()
        del django.db.connections["guarded"]


SYNC: dict[str, Callable[[], AbstractContextManager[Transaction]]] = {
    "psycopg": _sync_psycopg,
    "psycopg cursor": _sync_psycopg_cursor,
    "psycopg2": _psycopg2,
    "psycopg2 cursor": lambda: _psycopg2(cursor=True),
    "SQLAlchemy connection on psycopg": _sqlalchemy("psycopg", "connection"),
    "SQLAlchemy connection on psycopg2": _sqlalchemy("psycopg2", "connection"),
    "SQLAlchemy session on psycopg": _sqlalchemy("psycopg", "session"),
    "SQLAlchemy scoped session": _sqlalchemy("psycopg2", "scoped"),
    "Django": _django,
    "Django's proxy": lambda: _django(proxy=True),
}


@contextlib.contextmanager
def _sync_psycopg_autocommit() -> Iterator[object]:
    with psycopg.connect(shared().url, autocommit=True) as connection:
        yield connection


@contextlib.contextmanager
def _psycopg2_autocommit() -> Iterator[object]:
    connection = psycopg2.connect(shared().url)
    connection.autocommit = True
    yield connection
    connection.close()


@contextlib.contextmanager
def _sqlalchemy_autocommit() -> Iterator[object]:
    engine = sqlalchemy.create_engine(_url("psycopg2"), isolation_level="AUTOCOMMIT")
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextlib.contextmanager
def _django_autocommit() -> Iterator[object]:
    with _django() as within:
        connection = within.connection
    yield connection
    connection.close()


SYNC_AUTOCOMMIT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "psycopg": _sync_psycopg_autocommit,
    "psycopg2": _psycopg2_autocommit,
    "SQLAlchemy": _sqlalchemy_autocommit,
    "Django": _django_autocommit,
}
