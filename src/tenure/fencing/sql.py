"""Fence for tables: a row that is updated by the transaction of the write itself.

* One conditional UPDATE in the caller's transaction advances the row. Until that transaction ends,
  the database lets no other transaction advance the row. So the write and the admission are atomic,
  and admissions are serialised.
* Only the number of rows that a statement changed counts. A value that was read may be outdated
  (and always is in a snapshot).
* The first write to a resource inserts its row. If two transactions do so at once, one INSERT
  fails, after a savepoint, and that transaction continues with the row of the other.
* Every admission changes the row (`writes`), because MySQL counts only changed rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from tenure.errors import InvalidArgument, Misuse, Unsupported
from tenure.fencing.connections import STYLES, Step, borrow, borrow_async
from tenure.fencing.tokens import Token, name_of, stale, token_of

__all__ = ["SQLFence"]

R = TypeVar("R")
Steps: TypeAlias = Generator[Step, int | None, R]

# `str.format` inserts the table's name, which was checked before.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS {table} (resource VARCHAR(255) NOT NULL PRIMARY KEY, "
    "token BIGINT NOT NULL, writes BIGINT NOT NULL)"
)
_ADVANCE = "UPDATE {table} SET token = ?, writes = writes + 1 WHERE resource = ? AND token <= ?"
_INSERT = "INSERT INTO {table} (resource, token, writes) VALUES (?, ?, 1)"
_NEWEST = "SELECT token FROM {table} WHERE resource = ?"

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class SQLFence:
    """Fence that rejects the transaction of a holder whose token is no longer the newest.

    Example::

        import sqlite3
        from tenure.fencing import SQLFence

        connection = sqlite3.connect("invoices.db")
        connection.execute("CREATE TABLE invoices (number INTEGER)")
        fence = SQLFence("invoices")
        fence.create_table(connection)
        async with session.mutex("invoices").lock() as lease:
            with connection:  # one transaction: commit or roll back
                fence.admit(connection, lease)  # raises StaleToken, which rolls back
                connection.execute("INSERT INTO invoices VALUES (1)")
        connection.close()

    It has no state of its own: it can be made at import, and used with any number of connections.

    Args:
        resource: the name of the data that is written under one lock; it identifies a row of the
            table.
        table: the table's name, optionally with its schema (``schema.table``).
        paramstyle: the driver's parameter style, if it cannot be determined automatically:
            ``qmark``, ``numeric``, ``named``, ``format`` or ``pyformat`` of PEP 249, or
            ``numeric_dollar``.

    Raises:
        InvalidArgument: an argument is not valid.
    """

    __slots__ = ("_paramstyle", "resource", "table")

    def __init__(
        self, resource: str, *, table: str = "tenure_fences", paramstyle: str | None = None
    ) -> None:
        """Set the resource and its table; the database is not contacted."""
        self.resource = name_of(resource)
        if not isinstance(table, str) or not _TABLE.fullmatch(table):
            raise InvalidArgument(
                f"a table's name is of letters, digits and _, with at most one dot, not {table!r}"
            )
        if paramstyle is not None and paramstyle not in STYLES:
            raise InvalidArgument(f"a paramstyle is one of {sorted(STYLES)}, not {paramstyle!r}")
        self.table = table
        self._paramstyle = paramstyle

    def __repr__(self) -> str:
        """Return the resource and its table, for people."""
        return f"<{type(self).__name__} {self.resource!r} in {self.table}>"

    @property
    def schema(self) -> str:
        """The statement that creates the table, for a migration."""
        return _SCHEMA.format(table=self.table)

    def create_table(self, connection: Any) -> None:
        """Create the table, shared by all fences of one database, if it does not exist.

        Call it where the program creates its other tables. The caller commits.

        Raises:
            InvalidArgument: see `admit`.
        """
        borrow(connection, self._paramstyle).change(self.schema)

    def admit(self, connection: Any, token: Token) -> None:
        """Let the transaction continue, unless a newer token has written before.

        Call it before the first write. Until the transaction ends, other writers wait here.

        Args:
            connection: a connection of a DB-API module, SQLAlchemy's Connection or Session, or
                Django's connection, in the transaction that writes. For an asynchronous connection
                use `admit_async`.
            token: the lease that protects the write, or its fencing token.

        Raises:
            StaleToken: the write is too late: roll the transaction back.
            InvalidArgument: it is not a token, not a connection, or an asynchronous connection.
            Misuse: no transaction is open, so the admission would end before the write.
            Unsupported: the driver does not report the number of affected rows.
            Exception: an error of the driver: nothing was admitted, roll back.
        """
        number = token_of(token)
        borrowed = borrow(connection, self._paramstyle)
        borrowed.run(self._admission(number, borrowed.is_in_transaction))

    async def admit_async(self, connection: Any, token: Token) -> None:
        """Let the transaction of an asynchronous connection continue; see `admit`.

        Args:
            connection: an ``AsyncConnection`` of psycopg, a ``Connection`` of asyncpg, or an
                ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy.
            token: the lease that protects the write, or its fencing token.

        Raises:
            StaleToken, InvalidArgument, Misuse, Unsupported, Exception: as for `admit`.
        """
        number = token_of(token)
        if hasattr(connection, "run_sync"):
            await connection.run_sync(self.admit, number)
            return
        borrowed = borrow_async(connection, self._paramstyle)
        await borrowed.run(self._admission(number, borrowed.is_in_transaction))

    def _admission(self, number: int, inside: Callable[[], bool]) -> Steps[None]:
        if (yield from self._advanced(number, inside)):
            return
        newest, refused = (yield self._newest), None
        if newest is None:
            refused = yield from self._made(number)
            if refused is None:
                return
        # The row was inserted since, or the value read is outdated.
        if newest is None or newest <= number:
            if (yield from self._advanced(number, inside)):
                return
            newest = yield self._newest
            if newest is None and refused is not None:
                raise refused
            if newest is not None and newest <= number:  # the token is still newer
                newest = None
        raise stale(self.resource, number, newest)

    def newest(self, connection: Any) -> int | None:
        """Return the newest token that was admitted; ``None`` before the first.

        Raises:
            InvalidArgument: see `admit`.
        """
        step = self._newest
        return borrow(connection, self._paramstyle).number(step.statement, *step.values)

    def _advanced(self, number: int, inside: Callable[[], bool]) -> Steps[bool]:
        advance = _ADVANCE.format(table=self.table)
        touched = yield Step(advance, (number, self.resource, number))
        if touched is None or touched < 0:
            raise Unsupported(
                "this driver does not report the number of affected rows: make the "
                "condition a part of your own statement, see docs/how-to/fencing.md"
            )
        if not inside():
            raise Misuse(
                f"no transaction is open: the fence before {self.resource!r} and the write must be "
                f"in one, or a newer holder's write can come between them; begin one first (is "
                f"autocommit on?)"
            )
        return touched > 0

    @property
    def _newest(self) -> Step:
        return Step(_NEWEST.format(table=self.table), (self.resource,), reads=True)

    def _made(self, number: int) -> Steps[Exception | None]:
        """Insert the row; return the error if it fails, most likely because the row exists."""
        yield Step("SAVEPOINT tenure_fence")
        try:
            yield Step(_INSERT.format(table=self.table), (self.resource, number))
        except Exception as error:
            yield Step("ROLLBACK TO SAVEPOINT tenure_fence")
            return error
        return None
