"""Connecting to a store: preparing statements, greeting, creation, and reattaching of sessions.

**Preparing** (`StatementSender`). A statement is prepared when it is sent for the second time.
Behind a pooler none is, because there the next statement may go to another connection of the
server. Instead each carries a mark that its reply has to repeat: a pooler may give the replies of a
client that has gone to the next one. PgBouncer 1.18 does so if several statements of that client
were under way.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo

from tenure.engines._kit.commands.engine import new_token
from tenure.engines._kit.reconnect import backoff
from tenure.engines.postgresql import schema
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import DROPPED
from tenure.engines.postgresql.url import NO_RIGHT, PostgresUrl, cause, encoding_error
from tenure.errors import AuthenticationFailed, EngineError

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


T = TypeVar("T")

_NO_FUNCTION = "42883"

_PASSING = frozenset({"40001", "40P01", "55P03", "57014"})  # conflicts, timeouts of the account
_RETRIES = 6
_MOST_TOKENS = 8
"""Tokens of a session that are remembered: a store that has lost data may have an earlier one."""

_USE = "hashtext('tenure: programs')"
"""First half of the advisory locks of programs, as SQL."""
_DROPPED_WINDOW = 30.0
"""Seconds for which holders may consider leases held whose schema was dropped, unless they have set
longer recovery windows."""

SETTINGS = b"""
    SELECT set_config(name, CASE name WHEN 'client_connection_check_interval' THEN '2s'
        WHEN 'default_transaction_isolation' THEN 'read committed'
        WHEN 'array_nulls' THEN 'on' ELSE 'off' END, false)
    FROM pg_settings WHERE pg_backend_pid() = %s AND (name = 'default_transaction_isolation'
            AND setting NOT IN ('read committed', 'read uncommitted')
        OR name = 'client_connection_check_interval'
            AND setting = '0' AND version() LIKE '%%linux%%'
        OR name = 'array_nulls' AND setting = 'off'
        OR name IN ('enable_seqscan', 'jit') AND setting = 'on')"""
"""Settings of a direct connection to this process. A pooler's is shared, so it is left alone.

The functions must see what was committed while they waited for a lock, so they fail under a
stricter isolation level, which an account may have. The server notices the end of a connection
whose statement waits for a lock (PostgreSQL 14).
Plans are kept, and rows come and go faster than the planner's statistics: a plan that was made for
a small table must use the index too, and is not worth compiling.
"""

_Psycopg = psycopg.AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class StoreState:
    """State of a store, as a new connection finds it.

    Attributes:
        epoch: another one after each loss of data.
        left: seconds of quarantine.
        reason: why there is one.
    """

    epoch: str
    left: float
    reason: str


class SchemaDropped(EngineError):
    """The store that was in use is not there any more."""


@dataclass(frozen=True, slots=True)
class OpenedConnections:
    """Connections of psycopg's.

    Attributes:
        statements: for everything but notifications.
        notifications: the same one or another one; ``None`` behind a pooler, unless the URL names
            a direct address.
    """

    statements: _Psycopg
    notifications: _Psycopg | None

    @property
    def all(self) -> list[_Psycopg]:
        """Both connections."""
        found = [self.statements]
        return found if self.notifications is None else [*found, self.notifications]

    async def aclose(self) -> None:
        """Close them."""
        for each in self.all:
            await each.close()

    async def call(self, function: str, *args: Any) -> Any:
        """Call a function by its qualified name, and return its reply."""
        sql = f"SELECT {function}({','.join('%s' for _ in args)}), %s::text".encode()
        mark = new_mark().decode()
        for failures in count():
            try:
                cursor = await self.statements.execute(sql, (*args, mark))
                break
            except psycopg.Error as error:  # other programs may connect at the same time
                if error.sqlstate not in _PASSING or failures >= _RETRIES:
                    raise
            await asyncio.sleep(backoff(failures))
        row = await cursor.fetchone()
        if row is None or row[-1] != mark:
            raise psycopg.OperationalError(MIXED_UP)
        return json.loads(row[0])

    async def listen(self, *channels: str) -> None:
        """Receive the notifications of channels."""
        if self.notifications is not None:
            for channel in channels:
                await self.notifications.execute(f"LISTEN {channel}".encode())


def connect_blocking(conninfo: str, timeout: int, **parameters: str) -> psycopg.Connection[Any]:
    """Connect without an event loop.

    Args:
        conninfo: the connection string.
        timeout: seconds for the attempt, and until a server that does not respond is abandoned.
        parameters: of libpq's, instead of those in the string.
    """
    limits = {"connect_timeout": timeout, "tcp_user_timeout": timeout * 1000}
    conninfo = make_conninfo(conninfo, **limits, **parameters)
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None)


def cut(connection: psycopg.BaseConnection[Any]) -> None:
    """End what a connection reads and writes. On any thread."""
    if not connection.closed:
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
        with duplicate, suppress(OSError):  # it has ended already
            duplicate.shutdown(socket.SHUT_RDWR)


async def unless_silent(seconds: float, work: Coroutine[Any, Any, T], *connections: _Psycopg) -> T:
    """Execute statements, and cut their connections if the server does not answer in time.

    The same happens when the caller is cancelled. psycopg would have the server cancel its
    statement first, over a network that may be cut.

    Raises:
        TimeoutError: there was no answer within so many seconds.
    """
    working = asyncio.ensure_future(work)
    working.add_done_callback(lambda each: each.cancelled() or each.exception())  # retrieves it
    try:
        done, _ = await asyncio.wait([working], timeout=seconds)
    finally:
        if not working.done():
            for each in connections:
                cut(each)
            await asyncio.wait([working])
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return working.result()


async def open_connections(address: PostgresUrl) -> OpenedConnections:
    """Connect, and find out whether notifications can be received."""
    statements = await _connect(address, address.conninfo)
    notifications: _Psycopg | None = statements
    try:
        if address.listen:
            notifications = await _connect(address, address.listen)
        assert notifications is not None
        pair = statements, notifications
        if not await unless_silent(address.connect_timeout, _set_up(*pair), *pair):
            if address.listen:
                raise EngineError(
                    f"{address.url}: ?listen= names a pooler. Name the database's own address"
                )
            notifications = None
    except BaseException:
        await OpenedConnections(statements, notifications).aclose()
        raise
    return OpenedConnections(statements, notifications)


async def _set_up(statements: _Psycopg, notifications: _Psycopg) -> bool:
    """Set what a direct connection needs; return whether notifications have a direct one.

    A pooler makes up the process id that libpq sees, so that it differs from the server's.
    """
    cursor = await notifications.execute("SELECT pg_backend_pid()")
    row = await cursor.fetchone()
    await statements.execute(SETTINGS, (statements.pgconn.backend_pid,))
    return row == (notifications.pgconn.backend_pid,)


async def _connect(address: PostgresUrl, conninfo: str) -> _Psycopg:
    try:
        opened = await psycopg.AsyncConnection.connect(
            conninfo, autocommit=True, prepare_threshold=None
        )
    except BaseException as error:
        # psycopg's errors refer to the connection, which is closed when nothing refers to it.
        traceback.clear_frames(error.__traceback__)
        raise
    if wrong := encoding_error(address.url, opened.info):
        await opened.close()
        raise wrong
    return opened


async def greet(opened: OpenedConnections, address: PostgresUrl, *, create: bool) -> StoreState:
    """Return the state of the store.

    Args:
        opened: the connections.
        address: of the store.
        create: create the store if it does not exist.

    Raises:
        SchemaDropped: it does not exist, and `create` is false.
        AuthenticationFailed: it does not exist, and this account may not create it.
        EngineError: it is of a version that this program cannot use, or the schema is another
            program's.
    """
    try:
        found = await _hello(opened, address)
    except psycopg.Error as error:
        if error.sqlstate not in (DROPPED, _NO_FUNCTION):
            raise
        if not create:
            raise SchemaDropped(
                f"the schema {address.schema} of {address.url} was dropped: start the programs "
                "that use it again"
            ) from error
        if error.sqlstate == _NO_FUNCTION:
            raise EngineError(
                f"{address.url} cannot be used: the schema {address.schema} is there, and is not "
                "one of tenure's. Choose another one with ?schema=NAME, or drop it if it is empty"
            ) from error
        used = await _is_used(opened.statements, address.schema)
        if await _create(opened.statements, address) and used:
            await opened.statements.execute(
                f"UPDATE {address.schema}.meta SET longest_window = {_DROPPED_WINDOW:g}; "  # noqa: S608
                f"SELECT {address.schema}.data_was_restored()".encode()
            )
        found = await _hello(opened, address)
    version, epoch, left, reason, serves, *_ = found
    if remedy := schema.mismatch(version, serves):
        raise EngineError(
            f"{address.url} has version {version} of the schema {address.schema}, and this tenure "
            f"needs {schema.VERSION}: {remedy}"
        )
    return StoreState(epoch, left, reason)


async def _hello(opened: OpenedConnections, address: PostgresUrl) -> Any:
    """Call the function `hello` of the store.

    While another program creates the schema, the server may find the schema, and look for the
    function in a list that is older. The next statement finds both.
    """
    words = f"{address.schema}.hello", address.relaxed, address.synchronous
    try:
        return await opened.call(*words)
    except psycopg.Error as error:
        if error.sqlstate != _NO_FUNCTION:
            raise
    return await opened.call(*words)


async def note_use(opened: OpenedConnections, schema: str) -> None:
    """Show to a program that creates the schema again that this one may hold leases.

    A lock outlives the schema, and ends with the connection.
    """
    if opened.notifications is not None:
        await opened.notifications.execute(
            f"SELECT pg_try_advisory_lock_shared({_USE}, hashtext('{schema}'))".encode()
        )


async def _is_used(connection: _Psycopg, schema: str) -> bool:
    """Return whether a program is connected that has used a schema of this name.

    It takes no lock: each of two programs that create a store would see the lock of the other.
    """
    cursor = await connection.execute(
        "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' "  # noqa: S608
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        f"AND classid::bigint = {_USE} & 4294967295 AND mode = 'ShareLock' AND granted "
        f"AND objid::bigint = hashtext('{schema}') & 4294967295)".encode()
    )
    row = await cursor.fetchone()
    return row == (True,)


async def _create(connection: _Psycopg, address: PostgresUrl) -> bool:
    """Create the store; return false if another program has done so meanwhile."""
    try:
        await connection.execute(schema.creation(address.schema).encode())
    except psycopg.Error as error:
        if not connection.closed:
            await connection.execute("ROLLBACK")
        if error.sqlstate == NO_RIGHT:
            raise AuthenticationFailed(
                f"{address.url} has no schema {address.schema}, and this account may not create "
                f"it: {cause(error)}. Have an administrator run the SQL that 'tenure postgresql "
                "init --print-sql' prints"
            ) from error
        if error.sqlstate not in schema.EXISTS:
            raise
        return False
    return True


async def reattach(
    opened: OpenedConnections,
    schema: str,
    channel: str,
    sessions: Sequence[PostgresSession],
    epoch: str,
    now: Callable[[], float],
) -> str:
    """Attach sessions again; returns the store's epoch.

    A store that has lost data may know a session without its latest requests, or with requests that
    were released. So what it knows is compared with what this program knows, before anything is
    proven. Only the sessions that await a proof are renewed.

    Args:
        opened: the connections.
        schema: of the store.
        channel: for the events of the sessions.
        sessions: all of the engine.
        epoch: at which the store had everything that this program knows.
        now: the clock.
    """
    who = []
    for session in sessions:
        token = new_token(session.attach_number)
        session.tokens.append(token)
        who.append([session.id, session.tokens[:-1], token, session.awaits_proof])
    at = now()
    found, answers = await opened.call(f"{schema}.reattach", channel, json.dumps(who), epoch)
    for session, (*_, renewed), answer in zip(sessions, who, answers, strict=True):
        known = isinstance(answer, list)  # the requests of a session in a store that lost data
        if session.reattached(["ok" if known else answer]):
            session.tokens = session.tokens[-_MOST_TOKENS:]
            if known:
                session.compare(answer)
            if renewed:
                session.prove(at)
    return str(found)
