"""Statements of one connection, as they are sent: prepared ones, and those behind a pooler.

A statement is prepared when it is sent for the second time. Behind a pooler none is, because there
the next statement may go to another connection of the server. Instead each carries a mark that its
reply has to repeat: a pooler may give the replies of a client that has gone to the next one.
PgBouncer 1.18 does so if several statements of that client were under way.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

MIXED_UP = "the pooler has passed on a reply to another client's statement"

_Parameters = list[bytes | None]


class StatementSender:
    """Sender of statements over one connection in libpq's pipeline mode.

    Args:
        connection: of libpq's.
        pooled: it leads to a pooler.
    """

    def __init__(self, connection: Any, *, pooled: bool) -> None:
        self._connection = connection
        self._pooled = pooled
        self._mark = b""
        self._names: dict[bytes, bytes] = {}  # by SQL; empty for one that was sent once
        self._numbers = count(1)

    def send(self, sql: bytes, parameters: _Parameters, *, recurs: bool) -> bool:
        """Send a statement, and its preparation if that is due.

        Args:
            sql: the statement.
            parameters: as text.
            recurs: it may be prepared.

        Returns:
            True if the statement is prepared with this; if it fails, call `forget`.
        """
        connection, preparing = self._connection, False
        if self._pooled:
            self._mark = new_mark()
            sql = b"%b, $%d::text" % (sql, len(parameters) + 1)
            connection.send_query_params(sql, [*parameters, self._mark])
        elif not recurs:
            connection.send_query_params(sql, parameters)
        elif name := self._names.get(sql):
            connection.send_query_prepared(name, parameters)
        elif name is None:
            self._names[sql] = b""
            connection.send_query_params(sql, parameters)
        else:
            preparing = True
            name = self._names[sql] = b"tenure_%d" % next(self._numbers)
            connection.send_prepare(name, sql)
            connection.send_query_prepared(name, parameters)
        connection.pipeline_sync()
        return preparing

    def is_reply(self, result: Any) -> bool:
        """Return whether a result without an error is that of the last statement."""
        return not self._pooled or repeats(result, self._mark)

    def forget(self) -> None:
        """Prepare all statements again, because one may not be prepared."""
        self._names.clear()


def new_mark() -> bytes:
    """Return a word for one statement, which no other statement has."""
    return os.urandom(8).hex().encode()


def repeats(result: Any, mark: bytes) -> bool:
    """Return whether the last column of a result is the mark of its statement."""
    if result is None or not result.ntuples:
        return False
    return bool(result.get_value(0, result.nfields - 1) == mark)
