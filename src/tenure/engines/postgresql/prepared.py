"""Prepared statements of one connection.

A statement is prepared when it is sent for the second time. Behind a pooler none is: there the next
statement may go to another connection of the server.
"""

from __future__ import annotations

from itertools import count
from typing import Any

__all__ = ["StatementSender"]

_Parameters = list[bytes | None]


class StatementSender:
    """Sender of statements over one connection in libpq's pipeline mode.

    Args:
        connection: of libpq's.
        prepares: prepare the statements that are sent repeatedly.
    """

    def __init__(self, connection: Any, *, prepares: bool) -> None:
        """Start with nothing prepared."""
        self._connection = connection
        self._prepares = prepares
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
        if not recurs or not self._prepares:
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

    def forget(self) -> None:
        """Prepare all statements again, because one may not be prepared."""
        self._names.clear()
