"""Findings of `tenure doctor` about a ``postgresql://`` URL: server, settings, rights, schema.

Rules:

* Nothing is changed. Every transaction is read-only, and a missing schema is not created.
* One connection, and `TIMEOUT` for all of its transactions.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import psycopg

from tenure.engines._kit import doctor as common
from tenure.engines.contract import Finding
from tenure.engines.postgresql import schema
from tenure.engines.postgresql.connecting import connect_blocking, cut
from tenure.engines.postgresql.url import (
    READ_ONLY,
    PostgresUrl,
    cause,
    encoding_error,
    login_failure,
)
from tenure.errors import EngineError

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

CONNECT_TIMEOUT = 5
"""Seconds for one attempt to connect, at the most."""
TIMEOUT = 10.0
"""Seconds for the examination of a connected server."""

OLDEST = 13
"""Oldest major version of PostgreSQL that has what the store uses."""


def examine(address: PostgresUrl) -> Iterator[Finding]:
    """Examine the store at a URL. Errors become findings."""
    try:
        at = time.perf_counter()
        connection = _connect(address)
        took = time.perf_counter() - at
    except (psycopg.Error, OSError) as error:
        yield unreachable(cause(error))
        return
    late = threading.Event()
    timer = threading.Timer(TIMEOUT, _interrupt, (connection, late))
    timer.daemon = True
    timer.start()
    try:
        yield connected(connection, took)
        yield from _server(connection, address)
    except (psycopg.Error, OSError) as error:
        found = f"no answer within {TIMEOUT:g} s" if late.is_set() else f"failed: {cause(error)}"
        remedy = "see what the server is busy with, in pg_stat_activity and its log"
        yield Finding("failure", "examination", found, remedy)
    finally:
        timer.cancel()
        connection.close()


def _connect(address: PostgresUrl) -> Connection:
    """Connect to the server that programs use; without one, to any, such as a standby."""
    timeout = min(int(address.connect_timeout), CONNECT_TIMEOUT)
    try:
        connection = connect_blocking(address.conninfo, timeout)
    except psycopg.OperationalError as error:
        if "read-only" not in str(error):
            raise
        connection = connect_blocking(address.conninfo, timeout, target_session_attrs="any")
    connection.read_only = True
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def _interrupt(connection: Connection, late: threading.Event) -> None:
    late.set()
    cut(connection)


def _read(connection: Connection, sql: str, *args: Any) -> tuple[Any, ...]:
    """Return the row of a query, which cannot change anything."""
    with connection.transaction():
        connection.execute(f"SET LOCAL statement_timeout = {TIMEOUT * 1000:.0f}".encode())
        row = connection.execute(sql.encode(), args or None).fetchone()
    assert row is not None
    return row


def _server(connection: Connection, address: PostgresUrl) -> Iterator[Finding]:
    before = time.time()
    number, standby, read_only, pid, clock, *settings = _read(
        connection,
        "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), "
        "current_setting('default_transaction_read_only')::bool, pg_backend_pid(), "
        "extract(epoch FROM clock_timestamp())::float8, current_setting('fsync')::bool, "
        "current_setting('full_page_writes')::bool, current_setting('synchronous_commit'), "
        "current_setting('autovacuum')::bool AND current_setting('track_counts')::bool, "
        "current_setting('default_transaction_isolation')",
    )
    here = (before + time.time()) / 2
    yield version(number)
    characters = connection.info.parameter_status("server_encoding") or "unknown"
    yield encoding(characters, encoding_error(address.url, connection.info))
    yield role(standby=standby, read_only=read_only)
    yield pooler(connection.info.backend_pid, pid, address.listen)
    if connection.info.backend_pid != pid:
        yield isolation(settings[4])
    yield durability(address, *settings[:3])
    yield vacuum(running=settings[3])
    yield _round_trip(connection)
    yield common.clock(clock - here)
    yield from _schema(connection, address.schema, usable=not (standby or read_only))


def _round_trip(connection: Connection) -> Finding:
    took = []
    for _ in range(common.ROUNDS):
        at = time.perf_counter()
        connection.execute(b"SELECT 1")
        took.append(time.perf_counter() - at)
    return common.round_trip(took)


def _schema(connection: Connection, name: str, *, usable: bool) -> Iterator[Finding]:
    there, may_use, may_create, functions, refused = _read(
        connection,
        "SELECT n.oid IS NOT NULL, coalesce(has_schema_privilege(n.oid, 'USAGE'), false), "
        "has_database_privilege(current_database(), 'CREATE'), count(p.oid), "
        "count(p.oid) FILTER (WHERE NOT has_function_privilege(p.oid, 'EXECUTE')) "
        "FROM (VALUES (%s::name)) x (name) LEFT JOIN pg_namespace n ON n.nspname = x.name "
        "LEFT JOIN pg_proc p ON p.pronamespace = n.oid AND p.prosecdef GROUP BY n.oid",
        name,
    )
    if not there:
        found = f"{name} is not there yet"
        if may_create:
            yield Finding("ok", "schema", f"{found}; the first use creates it", absent=True)
        else:
            found = f"{found}, and this account may not create it"
            remedy = "have an administrator run what 'tenure postgresql init --print-sql' prints"
            yield Finding("failure", "schema", found, remedy)
    elif not functions:
        remedy = "choose another one with ?schema=NAME"
        yield Finding("failure", "schema", f"{name} is not one of tenure's", remedy)
    elif not may_use or refused:
        remedy = (
            f"have its owner run: GRANT USAGE ON SCHEMA {name} TO ACCOUNT; GRANT EXECUTE ON ALL "
            f"FUNCTIONS IN SCHEMA {name} TO ACCOUNT;"
        )
        yield Finding("failure", "schema", f"this account may not use {name}", remedy)
    elif usable:
        yield from _store(connection, name)


def _store(connection: Connection, name: str) -> Iterator[Finding]:
    try:
        found = json.loads(_read(connection, f"SELECT {name}.examine()")[0])
    except psycopg.Error as error:
        if error.sqlstate != READ_ONLY:
            raise
        yield Finding(
            "warning",
            "quarantine",
            "the server crashed, was promoted or was restored since the last use of the store",
            "nothing: the next program finds out whether a grant may be lost, and waits then",
        )
        return
    number, _, left, reason, serves, *_ = found
    if remedy := schema.mismatch(number, serves):
        found = f"{name} has version {number}, and this tenure needs {schema.VERSION}"
        yield Finding("failure", "schema", found, remedy)
        return
    yield Finding("ok", "schema", f"{name}, version {number}")
    yield common.quarantine(left, reason)
    nodes = json.loads(_read(connection, f"SELECT {name}.list_nodes()")[0])
    sessions = semaphores = 0
    for node in nodes:
        reply = json.loads(_read(connection, f"SELECT {name}.describe_node(%s)", node)[0])
        if reply[0] == "ok":  # it was not dropped meanwhile
            sessions, semaphores = sessions + reply[2], semaphores + reply[3]
    found = f"nodes: {len(nodes)}, sessions: {sessions}, semaphores: {semaphores}"
    yield Finding("ok", "contents", found)


# What the server reports


def unreachable(text: str) -> Finding:
    """Report why no connection was opened."""
    return Finding("failure", "connection", text, login_failure(text).remedy)


def connected(connection: Connection, took: float) -> Finding:
    """Report the connection, and the seconds that it took."""
    info, link = connection.info, connection.pgconn
    local = info.host.startswith("/")
    secured = "a socket" if local else "with TLS" if link.ssl_in_use else "not encrypted"
    place = info.host if local else f"{info.host}:{info.port}"
    return Finding(
        "ok",
        "connection",
        f"{place}, {secured}, database {info.dbname}, account {info.user}, connected in "
        f"{took * 1e3:.1f} ms",
    )


def encoding(database: str, wrong: EngineError | None) -> Finding:
    """Examine the encoding of texts, such as names."""
    if wrong is not None:
        found, _, remedy = str(wrong).partition(". ")
        return Finding("failure", "encoding", found, remedy)
    if database != "UTF8":
        remedy = "use names of its characters, or create a database with ENCODING 'UTF8'"
        return Finding("warning", "encoding", f"{database}, which lacks characters", remedy)
    return Finding("ok", "encoding", database)


def version(number: int) -> Finding:
    """Examine the version."""
    found = f"PostgreSQL {number // 10000}.{number % 10000}"
    if number // 10000 < OLDEST:
        remedy = f"use PostgreSQL {OLDEST} or newer"
        return Finding("failure", "server", f"{found} is too old", remedy)
    return Finding("ok", "server", found)


def role(*, standby: bool, read_only: bool) -> Finding:
    """Examine whether the server accepts writes."""
    if standby:
        remedy = "name the primary, or all servers: the one that accepts writes is chosen"
        return Finding("failure", "role", "a standby, which is read-only", remedy)
    if read_only:
        remedy = "turn default_transaction_read_only off for this account and database"
        return Finding("failure", "role", "transactions are read-only", remedy)
    return Finding("ok", "role", "primary")


def pooler(given: int, actual: int, listen: str) -> Finding:
    """Compare the process of the connection's greeting with the one that answers."""
    if given == actual:
        return Finding("ok", "pooler", "none")
    if listen:
        return Finding("ok", "pooler", "there is one, and ?listen= names the server")
    remedy = (
        "name the server's own address with ?listen=HOST:PORT, so that grants are notified; "
        "without it waiters poll"
    )
    return Finding("warning", "pooler", "there is one in front of the server", remedy)


def isolation(level: str) -> Finding:
    """Examine the isolation level that an account has behind a pooler."""
    if level in ("read committed", "read uncommitted"):
        return Finding("ok", "isolation", level)
    remedy = (
        "run ALTER ROLE ACCOUNT SET default_transaction_isolation = 'read committed', and have the "
        "pooler reconnect"
    )
    return Finding("failure", "isolation", f"transactions are {level} by default", remedy)


def durability(address: PostgresUrl, fsync: bool, pages: bool, commit: str) -> Finding:
    """Examine the settings on which confirmed commits depend."""
    switches = {"fsync": fsync, "full_page_writes": pages}
    off = [name for name, on in switches.items() if not on]
    if commit == "off" and not address.relaxed:  # durability=process allows for it
        off.append("synchronous_commit")
    if off:
        plural = "are" if len(off) > 1 else "is"
        return Finding(
            "warning",
            "durability",
            f"{' and '.join(off)} {plural} off",
            "turn on what is off: a crash may damage the database, or undo a confirmed grant",
        )
    found = f"fsync and full_page_writes are on, synchronous_commit is {commit}"
    return Finding("ok", "durability", found)


def vacuum(*, running: bool) -> Finding:
    """Examine whether dead rows are removed."""
    if running:
        return Finding("ok", "autovacuum", "on")
    remedy = "turn autovacuum and track_counts on: every lock leaves dead rows"
    return Finding("warning", "autovacuum", "off", remedy)
