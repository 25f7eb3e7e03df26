"""The fence before tables: a row that the transaction of the write itself advances.

* The row is advanced by one conditional UPDATE, in the caller's transaction. From then on, until
  that transaction ends, the database lets no other transaction advance it, so that the write stands
  or falls with the admission, and admissions come one after the other.
* A statement decides, by how many rows it touched; what is read decides nothing, since it may be
  old by then (or, in a snapshot, always).
* A row is made when its resource is first written to. When two do so at once, one INSERT fails,
  behind a savepoint, and that transaction continues with the row of the other.
* Every admission changes the row (`writes`), because MySQL counts only rows that changed.
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

# The table's name is put in by `str.format`, and is checked before.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS {table} (resource VARCHAR(255) NOT NULL PRIMARY KEY, "
    "token BIGINT NOT NULL, writes BIGINT NOT NULL)"
)
_ADVANCE = "UPDATE {table} SET token = ?, writes = writes + 1 WHERE resource = ? AND token <= ?"
_INSERT = "INSERT INTO {table} (resource, token, writes) VALUES (?, ?, 1)"
_NEWEST = "SELECT token FROM {table} WHERE resource = ?"

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class SQLFence:
    """Fence that refuses the transaction of a holder whose token is no longer the newest.

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

    It has no state of its own: one may be made at import, and used with any number of connections.

    Args:
        resource: which row of the table: what is written to under one lock has one name.
        table: the table's name, with its schema's before a dot if need be.
        paramstyle: how the driver marks values, where that is not found out by itself: ``qmark``,
            ``numeric``, ``named``, ``format`` or ``pyformat`` of PEP 249, or ``numeric_dollar``.

    Raises:
        InvalidArgument: an argument is not valid.
    """

    __slots__ = ("_paramstyle", "resource", "table")

    def __init__(
        self, resource: str, *, table: str = "tenure_fences", paramstyle: str | None = None
    ) -> None:
        """Name the resource and its table; the database is not contacted."""
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
        """The statement that makes the table, for a migration."""
        return _SCHEMA.format(table=self.table)

    def create_table(self, connection: Any) -> None:
        """Make the table, which all fences of one database share, unless it is there.

        Do this where the program makes its other tables; to commit is the caller's business.

        Raises:
            InvalidArgument: see `admit`.
        """
        borrow(connection, self._paramstyle).change(self.schema)

    def admit(self, connection: Any, token: Token) -> None:
        """Let the transaction go on, unless a newer token has written before.

        Until the transaction ends, others who want to write under this fence wait here; call it
        before the first write.

        Args:
            connection: of a DB-API module, SQLAlchemy's Connection or Session, or Django's
                connection, in the very transaction that writes. For an asynchronous one use
                `admit_async`.
            token: the lease under which the transaction writes, or its fencing token.

        Raises:
            StaleToken: the holder comes too late: let this end the transaction by rolling back.
            InvalidArgument: it is no token, no connection, or an asynchronous one.
            Misuse: no transaction is open, so that the admission would be over before the write.
            Unsupported: the driver does not say how many rows a statement has touched.
            Exception: of the driver: nothing was admitted, roll back.
        """
        number = token_of(token)
        borrowed = borrow(connection, self._paramstyle)
        borrowed.run(self._admission(number, borrowed.is_in_transaction))

    async def admit_async(self, connection: Any, token: Token) -> None:
        """Let the transaction of an asynchronous connection go on, as `admit` does.

        Args:
            connection: an ``AsyncConnection`` of psycopg, a ``Connection`` of asyncpg, or an
                ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy.
            token: the lease under which the transaction writes, or its fencing token.

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
        if newest is None or newest <= number:  # the row came since, or what was read is old
            if (yield from self._advanced(number, inside)):
                return
            newest = yield self._newest
            if newest is None and refused is not None:
                raise refused
            if newest is not None and newest <= number:  # it still is
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
                "this driver does not say how many rows a statement has touched: make the "
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
        """Make the row, or say what refused it: most likely the row that another has made."""
        yield Step("SAVEPOINT tenure_fence")
        try:
            yield Step(_INSERT.format(table=self.table), (self.resource, number))
        except Exception as error:
            yield Step("ROLLBACK TO SAVEPOINT tenure_fence")
            return error
        return None
