"""Heartbeat thread of the PostgreSQL engine: renews sessions over a connection of its own."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
from typing import Any, Protocol

import psycopg
from psycopg import pq

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines.postgresql.url import PostgresUrl

__all__ = ["PostgresHeartbeat", "RenewedSession"]

_TIMEOUT = 2


class RenewedSession(Protocol):
    """A session, as the heartbeat thread sees it."""

    id: int
    token: str
    over: bool

    def prove(self, at: float) -> None:
        """Report a proof of that time."""


class PostgresHeartbeat(HeartbeatThread[RenewedSession]):
    """The heartbeat thread of one engine."""

    expected = (OSError, psycopg.Error)

    def __init__(self, address: PostgresUrl, clock: Clock) -> None:
        """Start without a thread and without a connection."""
        failures = Failures(f"heartbeats to {address.url}", logging.getLogger("tenure"))
        super().__init__("tenure-postgresql-heartbeat", clock.now, failures)
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None

    def renew_now(self, requested: dict[RenewedSession, float]) -> None:
        """Renew these sessions, in the thread."""
        sessions = {each.id: each for each in requested if not each.over}
        if not sessions:
            return
        if self._connection is None:
            self._connection = psycopg.connect(
                self._address.conninfo,
                connect_timeout=_TIMEOUT,
                tcp_user_timeout=_TIMEOUT * 1000,
                autocommit=True,
                prepare_threshold=None,
            )
        at = self._now()
        who = json.dumps([(each.id, each.token) for each in sessions.values()])
        relaxed = b"t" if self._address.relaxed else b"f"
        result = self._execute(
            self._connection.pgconn,
            f"SELECT {self._address.schema}.renew($1,$2)".encode(),
            [relaxed, who.encode()],
        )
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.OperationalError(result.get_error_message())
        for number in json.loads(result.get_value(0, 0) or b"[]"):
            if not sessions[number].over:
                sessions[number].prove(at)

    def _execute(self, connection: Any, sql: bytes, parameters: list[bytes]) -> Any:
        """Run a statement; a server that does not answer is an error."""
        connection.send_query_params(sql, parameters)
        connection.flush()
        found = None
        while True:
            while connection.is_busy():
                if not select.select([connection.socket], [], [], _TIMEOUT)[0]:
                    raise TimeoutError("the server does not answer")
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                return found
            found = result

    def interrupt(self) -> None:
        """End what the connection reads."""
        connection = self._connection
        if connection is not None and not connection.closed:
            with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)

    def disconnect(self) -> None:
        """Close the connection of the thread."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
