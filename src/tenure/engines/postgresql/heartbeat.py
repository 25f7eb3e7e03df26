"""Heartbeat thread of the PostgreSQL engine: renews sessions over a connection of its own.

The connection is a direct one, if the URL names the database's own address. So leases last while
the transactions of others use up the pool of a pooler.
"""

from __future__ import annotations

import json
import select
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import pq

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines.postgresql.connecting import SETTINGS, connect_blocking, cut
from tenure.engines.postgresql.prepared import MIXED_UP, new_mark, repeats
from tenure.engines.postgresql.session import PostgresSession, alive_in
from tenure.engines.postgresql.url import PostgresUrl

_TIMEOUT = 2
_ACTIVITY = b"""
    SELECT CASE WHEN wait_event_type = 'Lock' THEN 'a lock of process '
            || coalesce(array_to_string(pg_blocking_pids(pid), ', '), '?')
        WHEN wait_event = 'SyncRep' THEN 'a synchronous standby'
        ELSE coalesce('the server (' || wait_event || ')', 'the server') END
    FROM pg_stat_activity
    WHERE pid = $1 AND state = 'active' AND wait_event_type IS DISTINCT FROM 'Client'"""
_RENEW = """
    SELECT {}.renew($1, $2, $4), $5::text FROM set_config('lock_timeout', '150ms', true)
    WHERE $1 OR NOT EXISTS (
        SELECT FROM pg_stat_activity WHERE usename = session_user AND wait_event = 'SyncRep'
            AND (pid = $3 OR clock_timestamp() - query_start > interval '1 s'))"""
"""Renews no session while commits wait for a synchronous standby: the renewal would wait too.

It waits for a lock no longer, because the thread examines the connection between two attempts.
"""
_LOCKED = b"55P03"


class PostgresHeartbeat(HeartbeatThread[PostgresSession]):
    """The heartbeat thread of one engine.

    Attributes:
        backend: number of the server's process for the engine's connection, or 0.
        epoch: of the store, at which the engine attached its sessions.
    """

    expected = (OSError, psycopg.Error)

    def __init__(
        self, address: PostgresUrl, clock: Clock, examined: Callable[[int, str], None]
    ) -> None:
        """Start without a thread and without a connection.

        Args:
            address: of the store.
            clock: of the engine.
            examined: called on the loop with a backend that executes a statement, and what the
                statement waits for.
        """
        super().__init__("tenure-postgresql-heartbeat", clock.now, f"heartbeats to {address.url}")
        self._address = address
        self._examined = examined
        self.backend = 0
        self.epoch = ""
        self._connection: psycopg.Connection[Any] | None = None

    def renew_now(self, requested: dict[PostgresSession, float]) -> None:
        """Renew these sessions, in the thread."""
        sessions = {each.id: each for each in requested if not each.over}
        if requested and not sessions:
            return
        if self._connection is None:
            self._connection = connect_blocking(self._address.direct, _TIMEOUT)
            pid = self._connection.pgconn.backend_pid
            self._connection.execute(SETTINGS, (pid,))
        connection = self._connection.pgconn
        backend = b"%d" % self.backend
        result = self._execute(connection, _ACTIVITY, [backend])
        if result.ntuples:
            waits_for = result.get_value(0, 0).decode()
            self._loop.call_soon_threadsafe(self._examined, int(backend), waits_for)
        if not sessions:
            return
        at, epoch = self._now(), self.epoch.encode()
        who = json.dumps([(each.id, each.token, each.held()) for each in sessions.values()])
        relaxed = b"t" if self._address.relaxed else b"f"
        sql = _RENEW.format(self._address.schema).encode()
        try:
            mark = new_mark()
            result = self._execute(connection, sql, [relaxed, who.encode(), backend, epoch, mark])
        except psycopg.errors.LockNotAvailable:
            for each in sessions.values():
                # At once: the lock may end just before the sessions do. A program that lives has
                # requested another renewal within half a window.
                if at - requested[each] < each.window / 2:
                    self.renew_again(each, requested[each])
            return
        if not result.ntuples:
            return
        if not repeats(result, mark):
            raise psycopg.OperationalError(MIXED_UP)
        alive = result.get_value(0, 0)
        if alive is None:
            raise psycopg.OperationalError("the store has lost data: the sessions are reattached")
        for number, missing in map(alive_in, json.loads(alive)):
            if not missing and not sessions[number].over:
                sessions[number].prove(at)

    def _execute(self, connection: Any, sql: bytes, parameters: list[bytes]) -> Any:
        """Run a statement that returns rows; a server that does not answer is an error."""
        connection.send_query_params(sql, parameters)
        connection.flush()
        found: Any = None
        while True:
            while connection.is_busy():
                if not select.select([connection.socket], [], [], _TIMEOUT)[0]:
                    raise TimeoutError("the server does not answer")
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                if found.error_field(pq.DiagnosticField.SQLSTATE) == _LOCKED:
                    raise psycopg.errors.LockNotAvailable(found.get_error_message())
                if found.status != pq.ExecStatus.TUPLES_OK:
                    raise psycopg.OperationalError(found.get_error_message())
                return found
            found = result

    def interrupt(self) -> None:
        """End what the connection reads."""
        connection = self._connection
        if connection is not None:
            cut(connection)

    def disconnect(self) -> None:
        """Close the connection of the thread."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
