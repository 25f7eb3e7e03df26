"""Schema of a store in the database: its SQL, its creation, its versions and their upgrades.

A change of the SQL is another version, with an entry in `MIGRATIONS`. An upgrade runs the entries
that the store does not have yet, and replaces the functions. Programs of version `SERVES` and later
can use the result, so they may run meanwhile.

The SQL has psql's form of variables: `:schema` is the schema's name, for example.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import psycopg

from tenure.engines._kit.commands.replies import config_text
from tenure.engines.postgresql.url import NO_RIGHT, PostgresUrl, cause, encoding_error, explained
from tenure.errors import AuthenticationFailed, EngineError, InvalidArgument
from tenure.model import DEFAULT_NODE, NodeConfig

VERSION = 2
SERVES = 1
"""Oldest version of programs that the functions serve, besides this one."""
MIGRATIONS: dict[int, str] = {
    2: """
CREATE TABLE :schema.rates (
    node integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    max_count bigint NOT NULL DEFAULT 0,     -- the limit
    per bigint NOT NULL DEFAULT 0,
    burst bigint NOT NULL DEFAULT 0,
    time_window bigint NOT NULL DEFAULT 0,
    seen bigint NOT NULL DEFAULT 0,          -- the latest change
    check_at bigint NOT NULL DEFAULT 0,      -- when to see whether it is over
    times bigint[] NOT NULL DEFAULT '{}',
    counts bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (node, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX rates_by_check ON :schema.rates (check_at);
""",
}
"""SQL that changes the tables for a version, if they are those of the version before.

Each is the body of a block in PL/pgSQL.
"""
_FUNCTIONS = ("functions", "sessions", "administration", "rates")
_PARTS = ("tables", *_FUNCTIONS)

_END = "COMMIT;\n"
EXISTS = frozenset({"42P06", "23505"})  # the second one: another program creates it now
_NO_ROLE = "42704"
_NO_STORE = frozenset({"3F000", "42P01", "42703"})  # no schema, or one of another program
_BUSY = frozenset({"40P01", "55P03"})
_ATTEMPTS = 10


@cache
def _text(part: str) -> str:
    return (resources.files(__package__) / "sql" / f"{part}.sql").read_text("utf-8")


def creation(schema: str) -> str:
    """Return the SQL that creates a store, one transaction.

    Two programs may run it at the same time; the second one finds the schema and fails. It waits
    for the first one, without the timeouts of its account.
    """
    return _filled("create", map(_text, _PARTS), schema, epoch=secrets.token_hex(8))


def upgrading(schema: str) -> str:
    """Return the SQL that brings a store to this version, one transaction.

    It changes nothing in a store of this version, and fails in a later one. It waits three seconds
    for a lock that a program has, so that others do not wait behind it for long.
    """
    steps = [_step(version, text) for version, text in sorted(MIGRATIONS.items())]
    return _filled("upgrade", [*steps, *map(_text, _FUNCTIONS)], schema)


def _filled(frame: str, parts: Iterable[str], schema: str, **values: object) -> str:
    text = _text(frame).replace("--#parts", "\n".join(parts))
    # The schema's name needs no quotes: it was checked when the URL was parsed.
    values |= {"schema": schema, "version": VERSION, "serves": SERVES}
    values |= {"node": DEFAULT_NODE, "config": config_text(NodeConfig())}
    for name, value in values.items():
        text = text.replace(f":{name}", str(value))
    return text


def _step(version: int, text: str) -> str:
    return f"""DO $upgrade$
BEGIN
    IF (SELECT version FROM :schema.meta) < {version} THEN
        UPDATE :schema.meta SET version = {version};
{text}
    END IF;
END $upgrade$;"""  # noqa: S608


def mismatch(version: int, serves: int) -> str:
    """Return what to do if this program cannot use a store, or an empty text.

    Args:
        version: of the store.
        serves: the oldest version of programs that the store serves.
    """
    if version < VERSION:
        return "have an administrator run 'tenure postgresql upgrade'"
    return "upgrade tenure here" if serves > VERSION else ""


# For administrators


def script(address: PostgresUrl, role: str | None = None) -> str:
    """Return the SQL that creates the store, one transaction.

    Args:
        address: names the schema.
        role: the account of the programs, which gets the rights to use the store and no others.

    Raises:
        InvalidArgument: the role's name is empty, or has a zero byte.
    """
    text = creation(address.schema)
    if role is None:
        return text
    if not role or "\0" in role:
        raise InvalidArgument(f"a role is named by a text without zero bytes, not by {role!r}")
    account = '"' + role.replace('"', '""') + '"'
    grants = (
        f"GRANT USAGE ON SCHEMA {address.schema} TO {account};\n"
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {address.schema} TO {account};\n"
    )
    return text.removesuffix(_END) + grants + _END


def initialize(address: PostgresUrl, role: str | None = None) -> bool:
    """Create the store; returns false if the schema exists already.

    Raises:
        InvalidArgument: the role's name is empty, or has a zero byte.
        EngineUnavailable: the server cannot be reached.
        AuthenticationFailed: the login was refused, or this account may not create the schema.
        EngineError: the server refused to create it, for example because there is no such role,
            or the database has an encoding that keeps no texts.
    """
    sql = script(address, role)
    remedy = "Have an administrator run the SQL that --print-sql prints"
    with _connection(address, "created", remedy) as connection:
        if wrong := encoding_error(address.url, connection.info):
            raise wrong
        try:
            connection.execute(sql.encode())
        except psycopg.Error as error:
            if error.sqlstate in EXISTS:
                return False
            raise
    return True


def upgrade(address: PostgresUrl) -> tuple[int, int]:
    """Upgrade the store to this version, in one transaction; programs may run meanwhile.

    Its functions are replaced in a store of this version too.

    Returns:
        The versions before and after.

    Raises:
        EngineUnavailable: the server cannot be reached.
        AuthenticationFailed: the login was refused, or this account does not own the store.
        EngineError: there is no store, it is of a later version, or programs use its tables all
            the time.
    """
    remedy = "Have its owner run the SQL that --print-sql prints"
    with _connection(address, "upgraded", remedy) as connection:
        before = _version(connection, address.schema)
        if before is None:
            raise EngineError(
                f"the schema {address.schema} was not upgraded in {address.url}: it is not there, "
                "or not one of tenure's. Create it with 'tenure postgresql init'"
            )
        _upgrade(connection, address.schema)
    return before, VERSION


def _version(connection: psycopg.Connection[Any], name: str) -> int | None:
    """Return the version of a store; ``None`` if there is no store in the schema."""
    try:
        found = connection.execute(
            f"SELECT version FROM {name}.meta WHERE only_row "  # noqa: S608
            f"AND to_regclass('{name}.witness') IS NOT NULL".encode()
        )
    except psycopg.Error as error:
        if error.sqlstate in _NO_STORE:
            return None
        raise
    row = found.fetchone()
    return None if row is None else int(row[0])


def _upgrade(connection: psycopg.Connection[Any], name: str) -> None:
    """Upgrade a store; another transaction that has a lock delays it."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            connection.execute(upgrading(name).encode())
        except psycopg.Error as error:
            connection.execute(b"ROLLBACK")
            if error.sqlstate not in _BUSY or not left:
                raise
        else:
            return


@contextmanager
def _connection(address: PostgresUrl, done: str, remedy: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect, and raise the errors of the store with what to do.

    Args:
        address: of the store.
        done: what is done to the schema.
        remedy: for an account without the right to do it.
    """
    try:
        connection = psycopg.connect(address.conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise explained(address, error) from error
    failed = f"the schema {address.schema} was not {done} in {address.url}"
    try:
        yield connection
    except psycopg.Error as error:
        reason = cause(error)
        if error.sqlstate == NO_RIGHT:
            raise AuthenticationFailed(f"{failed}: {reason}. {remedy}") from error
        if error.sqlstate == _NO_ROLE:
            raise EngineError(f"{failed}: {reason}. Create the role first") from error
        raise EngineError(f"{failed}: {reason}") from error
    finally:
        connection.close()
