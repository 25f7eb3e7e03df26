"""Guard of a lease in the caller's transaction, on the caller's connection.

* No driver is imported: the connection belongs to a library that the program has already imported.
* The guard executes one statement. The caller begins, commits and rolls back.
* Errors of the driver propagate, except the one by which the database reports that the lease is not
  held.
* The transaction status is checked after the statement, since most drivers begin a transaction with
  it.
"""

from __future__ import annotations

import sys
from typing import Any

from tenure._client.request import Request
from tenure.engines.contract import GuardStatement
from tenure.errors import InvalidArgument, LeaseLost, Misuse, Unsupported
from tenure.fencing.connections import rendered

_IDLE = 0  # libpq's status for no transaction, as psycopg and psycopg2 report it

_UNKNOWN_THERE = frozenset({"3F000", "42883", "42501"})
"""SQLSTATEs of a database without the store, or of an account without rights to it."""

_ASYNC = (
    "an AsyncConnection or AsyncCursor of psycopg, a Connection of asyncpg, or an AsyncConnection "
    "or AsyncSession of SQLAlchemy on one of these"
)
_SYNC = (
    "a Connection or Cursor of psycopg, a connection or cursor of psycopg2, a Connection or "
    "Session of SQLAlchemy on one of these, or Django's connection to PostgreSQL"
)


async def guard(request: Request, connection: object) -> None:
    """Guard a lease in the transaction of an asynchronous connection."""
    statement = _statement_for(request)
    try:
        inside = await _run(statement, connection)
    except Exception as error:
        code = _sqlstate(error)
        if code == statement.refusal:
            raise _refused(request) from error
        if code in _UNKNOWN_THERE:
            error.add_note(_elsewhere(request))
        raise
    if inside is None:
        raise _unknown(request, connection, _ASYNC)
    if not inside:
        raise _no_transaction(request)


def guard_in_thread(request: Request, connection: object) -> None:
    """Guard a lease in the transaction of a connection that the calling thread uses."""
    statement = _statement_for(request)
    try:
        inside = _run_in_thread(statement, connection)
    except Exception as error:
        code = _sqlstate(error)
        if code == statement.refusal:
            raise _refused(request) from error
        if code in _UNKNOWN_THERE:
            error.add_note(_elsewhere(request))
        raise
    if inside is None:
        raise _unknown(request, connection, _SYNC)
    if not inside:
        raise _no_transaction(request)


def _statement_for(request: Request) -> GuardStatement:
    request.check()
    if request.order_id is None:
        raise Unsupported(
            f"the lease of {request.name!r} on {request.node} cannot be guarded, because it has no "
            "fencing token",
            node=request.node,
            name=request.name,
        )
    return request.session.client.engine.guard(request.node, request.name, request.order_id)


# Connections. Each function returns whether a transaction is open, or None for an unknown type.


async def _run(statement: GuardStatement, connection: Any) -> bool | None:
    if _is(connection, "psycopg", "AsyncCursor"):
        connection = connection.connection
    if _is(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "async_scoped_session"):
        connection = await connection.connection()
    if _is(connection, "psycopg", "AsyncConnection"):
        psycopg = sys.modules["psycopg"]
        # The connection's own cursor and row factories may return other types.
        async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(*rendered(statement.sql, "format", statement.values))
            await cursor.fetchone()  # in a pipeline, waits for the answer
    elif _is(connection, "asyncpg", "Connection"):
        sql, _ = rendered(statement.sql, "numeric_dollar", statement.values)
        await connection.fetchval(sql, *statement.values)
    elif _is(connection, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        inside: bool | None = await connection.run_sync(_run_in_sqlalchemy, statement)
        return inside
    else:
        return None
    return _is_in_transaction(connection)


def _run_in_thread(statement: GuardStatement, connection: Any) -> bool | None:
    if _is(connection, "psycopg", "Cursor") or _is(connection, "psycopg2.extensions", "cursor"):
        connection = connection.connection
    if _is(connection, "sqlalchemy.orm", "Session", "scoped_session"):
        connection = connection.connection()
    sql, values = rendered(statement.sql, "format", statement.values)
    if _is(connection, "psycopg", "Connection"):
        psycopg = sys.modules["psycopg"]
        with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(sql, values)
            cursor.fetchone()
    elif _is(connection, "psycopg2.extensions", "connection"):
        with sys.modules["psycopg2.extensions"].cursor(connection) as cursor:
            cursor.execute(sql, values)
    elif _is(connection, "sqlalchemy.engine", "Connection"):
        return _run_in_sqlalchemy(connection, statement)
    elif _is_of_django(connection):
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
        return connection.in_atomic_block or not connection.get_autocommit()
    else:
        return None
    return _is_in_transaction(connection)


def _run_in_sqlalchemy(connection: Any, statement: GuardStatement) -> bool | None:
    driver = connection.connection.driver_connection
    if _is_in_transaction(driver) is None:
        return None
    style = connection.dialect.paramstyle
    connection.exec_driver_sql(*rendered(statement.sql, style, statement.values)).close()
    return _is_in_transaction(driver)


def _is_in_transaction(driver: Any) -> bool | None:
    if _is(driver, "asyncpg", "Connection"):
        inside: bool = driver.is_in_transaction()
        return inside
    if _is(driver, "psycopg", "Connection", "AsyncConnection") or _is(
        driver, "psycopg2.extensions", "connection"
    ):
        idle: bool = driver.info.transaction_status == _IDLE
        return not idle
    return None


def _is_of_django(connection: Any) -> bool:
    known = _is(connection, "django.db.backends.base.base", "BaseDatabaseWrapper") or _is(
        connection, "django.utils.connection", "ConnectionProxy"
    )
    return known and getattr(connection, "vendor", None) == "postgresql"


def _is(connection: object, module: str, *names: str) -> bool:
    """Return true if it is an instance of one of these classes of a library."""
    library = sys.modules.get(module)
    return library is not None and any(
        isinstance(connection, getattr(library, name)) for name in names
    )


# Errors


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, also when SQLAlchemy or Django wraps it."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        for attribute in ("sqlstate", "pgcode"):
            if isinstance(code := getattr(each, attribute, None), str):
                return code
    return None


def _refused(request: Request) -> LeaseLost:
    name, node = request.name, request.node
    text = (
        f"the lease of {name!r} on {node} is not held any more: the database has refused its "
        "guard. Roll back: the next holder may have written already"
    )
    if request.held:
        text += (
            f". This program has not learned of a loss: if there was none, the connection is not "
            f"to the database of {request.session.client.url}, or its transaction has a snapshot "
            f"from before the grant"
        )
    return LeaseLost(text, node=node, name=name, fencing_token=request.order_id)


def _elsewhere(request: Request) -> str:
    return (
        f"The guard of {request.name!r} on {request.node} needs a connection to the database of "
        f"{request.session.client.url}, of an account with USAGE on its schema and EXECUTE on its "
        f"function guard."
    )


def _no_transaction(request: Request) -> Misuse:
    return Misuse(
        f"no transaction is open on the connection, so the guard of {request.name!r} on "
        f"{request.node} ended at once: begin a transaction that contains the guard and the "
        f"writes (is autocommit on?)",
        node=request.node,
        name=request.name,
    )


def _unknown(request: Request, connection: object, known: str) -> InvalidArgument:
    kind = type(connection)
    return InvalidArgument(
        f"the lease of {request.name!r} on {request.node} is guarded on {known}, not on "
        f"{kind.__module__}.{kind.__qualname__}",
        node=request.node,
        name=request.name,
    )
