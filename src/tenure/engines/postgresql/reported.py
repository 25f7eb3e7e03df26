"""Findings about what a server reports: its version and role, a pooler, its settings, its clock."""

from __future__ import annotations

from typing import Any

import psycopg

from tenure.engines.contract import Finding
from tenure.engines.postgresql.login import login_failure
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import EngineError

__all__ = [
    "connected",
    "durability",
    "encoding",
    "isolation",
    "pooler",
    "role",
    "unreachable",
    "vacuum",
    "version",
]

OLDEST = 13
"""Oldest major version of PostgreSQL that has what the store uses."""


def unreachable(text: str) -> Finding:
    """Report why no connection was opened."""
    return Finding("failure", "connection", text, login_failure(text).remedy)


def connected(connection: psycopg.Connection[Any], took: float) -> Finding:
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
