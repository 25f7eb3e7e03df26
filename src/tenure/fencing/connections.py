"""Adapter for SQL connections of drivers, SQLAlchemy and Django.

* Nothing is imported: SQLAlchemy and Django are recognised by attributes of their connections. The
  parameter style of a driver is the `paramstyle` of the module of the connection's class.
* The fence executes only a few statements. The caller begins, commits and rolls back.
* Statements have a ``?`` for each value, and no other question mark.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenure.errors import InvalidArgument

__all__ = ["STYLES", "AsyncBorrowed", "Borrowed", "Step", "borrow", "borrow_async", "rendered"]

STYLES = frozenset({"qmark", "numeric", "numeric_dollar", "named", "format", "pyformat"})
"""Parameter styles: those of PEP 249, and ``$1``."""

_PSYCOPG_IDLE = 0  # libpq's status for no transaction, as psycopg and psycopg2 report it


def rendered(
    statement: str, style: str, values: Sequence[object]
) -> tuple[str, Sequence[object] | Mapping[str, object]]:
    """Return a statement and its values in a parameter style."""
    mark = {
        "qmark": "?",
        "format": "%s",
        "numeric": ":{}",
        "numeric_dollar": "${}",
        "named": ":v{}",
        "pyformat": "%(v{})s",
    }[style]
    pieces = statement.split("?")
    text = pieces[0] + "".join(
        mark.format(number) + piece for number, piece in enumerate(pieces[1:], start=1)
    )
    if style in {"named", "pyformat"}:
        return text, {f"v{number}": value for number, value in enumerate(values, start=1)}
    return text, tuple(values)


@dataclass(frozen=True, slots=True)
class Step:
    """A statement to run on a connection, with or without an event loop.

    Attributes:
        statement: the text, with ``?`` for each value.
        values: the values.
        reads: whether it is a query for one number; otherwise the number of affected rows is
            returned.
    """

    statement: str
    values: tuple[object, ...] = ()
    reads: bool = False


class Borrowed:
    """A connection, for a few statements."""

    def __init__(self, driver: Any, style: str) -> None:
        """Use the driver's connection, with the driver's parameter style."""
        self._driver = driver
        self._style = style

    def run(self, steps: Generator[Step, int | None, None]) -> None:
        """Run statements in order; each may depend on the previous result."""
        result: int | None = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(result) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            run, result, failure = self.number if step.reads else self.change, None, None
            try:
                result = run(step.statement, *step.values)
            except Exception as error:
                failure = error

    def change(self, statement: str, *values: object) -> int:
        """Run a statement; return the number of affected rows, negative if unknown."""
        cursor = self._execute(statement, values)
        try:
            return int(cursor.rowcount)
        finally:
            cursor.close()

    def number(self, statement: str, *values: object) -> int | None:
        """Run a query for one number; return ``None`` if there is no row."""
        cursor = self._execute(statement, values)
        try:
            row = cursor.fetchone()
        finally:
            cursor.close()
        return _number_of(row)

    def _execute(self, statement: str, values: Sequence[object]) -> Any:
        cursor = self._driver.cursor()
        try:
            cursor.execute(*rendered(statement, self._style, values))
        except BaseException:
            cursor.close()
            raise
        return cursor

    def is_in_transaction(self) -> bool:
        """Return false if the connection is known to be in autocommit mode.

        PEP 249 does not define this; sqlite3, psycopg, psycopg2, asyncpg and Django report it.
        """
        return _is_in_transaction(self._driver_itself())

    def _driver_itself(self) -> Any:
        return self._driver


class _BorrowedOfSQLAlchemy(Borrowed):
    """A `sqlalchemy.Connection`: its driver, its events, its transaction."""

    def _execute(self, statement: str, values: Sequence[object]) -> Any:
        return self._driver.exec_driver_sql(*rendered(statement, self._style, values))

    def _driver_itself(self) -> Any:
        return self._driver.connection.driver_connection


class _BorrowedOfDjango(Borrowed):
    """A `django.db.connection`, whose parameter style is the same for every driver."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection, "format")

    def is_in_transaction(self) -> bool:
        return self._driver.in_atomic_block or not self._driver.get_autocommit()


class AsyncBorrowed:
    """An ``AsyncConnection`` of psycopg."""

    def __init__(self, driver: Any, style: str) -> None:
        """Use the driver's connection, with the driver's parameter style."""
        self._driver = driver
        self._style = style

    async def run(self, steps: Generator[Step, int | None, None]) -> None:
        """Run statements in order; each may depend on the previous result."""
        result: int | None = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(result) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            result, failure = None, None
            try:
                result = await self._run(step)
            except Exception as error:
                failure = error

    async def _run(self, step: Step) -> int | None:
        async with self._driver.cursor() as cursor:
            await cursor.execute(*rendered(step.statement, self._style, step.values))
            return _number_of(await cursor.fetchone()) if step.reads else int(cursor.rowcount)

    def is_in_transaction(self) -> bool:
        """Return false if the connection is known to be in autocommit mode."""
        return _is_in_transaction(self._driver)


class _BorrowedOfAsyncpg(AsyncBorrowed):
    """A connection of asyncpg, from a pool or not."""

    async def _run(self, step: Step) -> int | None:
        statement, values = rendered(step.statement, self._style, step.values)
        if step.reads:
            return _number_of(await self._driver.fetchval(statement, *values))
        tag: str = await self._driver.execute(statement, *values)  # "UPDATE 1", or "SAVEPOINT"
        count = tag.rpartition(" ")[2]
        return int(count) if count.isdigit() else -1


def _is_in_transaction(driver: Any) -> bool:
    if isinstance(inside := getattr(driver, "in_transaction", None), bool):
        return inside
    if hasattr(driver, "is_in_transaction"):
        return bool(driver.is_in_transaction())
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    return status is None or status != _PSYCOPG_IDLE


def _number_of(row: Any) -> int | None:
    """Return the only number of a row, whose type depends on the connection."""
    if isinstance(row, Mapping):
        (row,) = row.values()
    elif row is not None and not isinstance(row, int):
        row = row[0]
    return None if row is None else int(row)


def borrow_async(connection: Any, paramstyle: str | None) -> AsyncBorrowed:
    """Adapt an asynchronous connection of psycopg or asyncpg to run statements on it.

    Raises:
        InvalidArgument: it is of another type.
    """
    if hasattr(connection, "is_in_transaction") and hasattr(connection, "fetchval"):
        return _BorrowedOfAsyncpg(connection, "numeric_dollar")
    is_async = inspect.iscoroutinefunction(getattr(connection, "commit", None))
    if is_async and hasattr(connection, "info") and not hasattr(connection, "run_sync"):
        return AsyncBorrowed(connection, paramstyle or "format")
    raise InvalidArgument(
        f"an AsyncConnection of psycopg, a Connection of asyncpg, or an AsyncConnection or "
        f"AsyncSession of SQLAlchemy is needed, not {connection!r}; with another driver make the "
        f"condition a part of your own statement, see docs/how-to/fencing.md"
    )


def borrow(connection: Any, paramstyle: str | None) -> Borrowed:
    """Adapt a connection to run statements on it.

    Raises:
        InvalidArgument: it is asynchronous, not a connection, or its style cannot be determined.
    """
    if hasattr(connection, "is_in_transaction"):
        raise InvalidArgument(
            f"{type(connection).__name__} of asyncpg is asynchronous: use "
            f"`await fence.admit_async(connection, lease)`"
        )
    commit = getattr(connection, "commit", None)
    if commit is None:
        raise InvalidArgument(
            f"a DB-API connection, SQLAlchemy's Connection or Session, or Django's connection is "
            f"needed, not {connection!r}"
        )
    if inspect.iscoroutinefunction(commit):
        raise InvalidArgument(
            f"{type(connection).__name__} is asynchronous: use "
            f"`await fence.admit_async(connection, lease)`; for the other methods SQLAlchemy has "
            f"`await connection.run_sync(fence.newest)`"
        )
    if hasattr(connection, "get_bind"):  # a Session, or a proxy of one
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        return _BorrowedOfSQLAlchemy(connection, paramstyle or connection.dialect.paramstyle)
    if hasattr(connection, "in_atomic_block"):
        return _BorrowedOfDjango(connection)
    style = paramstyle or next(_styles_of(type(connection)), None)
    if style is None:
        raise InvalidArgument(
            f"the module of {type(connection)} has no paramstyle; name the style, as in "
            f"SQLFence(..., paramstyle='format')"
        )
    return Borrowed(connection, style)


def _styles_of(kind: type) -> Iterator[str]:
    """Yield the paramstyles of the modules of a class and its bases."""
    for each in kind.__mro__:
        name = each.__module__
        while name:
            style = getattr(sys.modules.get(name), "paramstyle", None)
            if style in STYLES:
                yield style
            name = name.rpartition(".")[0]
