"""Prepared statements of one connection.

A statement is prepared when it is sent for the second time. Behind a pooler none is: there the next
statement may go to another connection of the server.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from psycopg import pq

__all__ = ["StatementSender"]

_Parameters = list[bytes | None]


class StatementSender:
    """Sender of statements over one connection.

    Args:
        connection: of libpq's.
        prepares: prepare the statements that are sent repeatedly.
    """

    def __init__(self, connection: Any, *, prepares: bool) -> None:
        """Start with nothing prepared."""
        self._connection = connection
        self._prepares = prepares
        self._names: dict[bytes, bytes] = {}  # by SQL; empty for one that was sent once
        self._preparing: tuple[bytes, bytes, _Parameters] | None = None
        self._numbers = count(1)

    def send(self, sql: bytes, parameters: _Parameters, *, recurs: bool) -> None:
        """Send a statement, or its preparation.

        Args:
            sql: the statement.
            parameters: as text.
            recurs: it may be prepared.
        """
        self._preparing = None
        if not recurs or not self._prepares:
            self._connection.send_query_params(sql, parameters)
        elif name := self._names.get(sql):
            self._connection.send_query_prepared(name, parameters)
        elif name is None:
            self._names[sql] = b""
            self._connection.send_query_params(sql, parameters)
        else:
            name = b"tenure_%d" % next(self._numbers)
            self._preparing = name, sql, parameters
            self._connection.send_prepare(name, sql)

    def was_prepared(self, result: Any) -> bool:
        """Send the statement itself if this is the result of its preparation.

        Returns:
            False if the result is that of the statement, or an error.
        """
        if self._preparing is None or result.status == pq.ExecStatus.FATAL_ERROR:
            return False
        name, sql, parameters = self._preparing
        self._preparing = None
        self._names[sql] = name
        self._connection.send_query_prepared(name, parameters)
        return True
