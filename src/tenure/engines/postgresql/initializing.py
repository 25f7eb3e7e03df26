"""Explicit creation and upgrade of a store, by an account that may create or that owns it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tenure.engines._kit.doctor import one_line
from tenure.engines.postgresql import schema
from tenure.engines.postgresql.connecting import encoding_error
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import AuthenticationFailed, EngineError, EngineUnavailable, InvalidArgument

__all__ = ["initialize", "script", "upgrade"]

_END = "COMMIT;\n"
_EXISTS = frozenset({"42P06", "23505"})  # the second one: another program creates it now
_NO_RIGHTS = "42501"
_NO_ROLE = "42704"
_NO_STORE = frozenset({"3F000", "42P01"})  # no schema, or one of another program
_BUSY = frozenset({"40P01", "55P03"})
_ATTEMPTS = 10


def script(address: PostgresUrl, role: str | None = None) -> str:
    """Return the SQL that creates the store, one transaction.

    Args:
        address: names the schema.
        role: the account of the programs, which gets the rights to use the store and no others.

    Raises:
        InvalidArgument: the role's name is empty, or has a zero byte.
    """
    text = schema.creation(address.schema)
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
        AuthenticationFailed: this account may not create the schema.
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
            if error.sqlstate in _EXISTS:
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
        AuthenticationFailed: this account does not own the store.
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
    return before, schema.VERSION


def _version(connection: psycopg.Connection[Any], name: str) -> int | None:
    """Return the version of a store; ``None`` if there is no store in the schema."""
    try:
        found = connection.execute(f"SELECT version FROM {name}.meta".encode())  # noqa: S608
    except psycopg.Error as error:
        if error.sqlstate in _NO_STORE:
            return None
        raise
    ((version,),) = found.fetchall()
    return int(version)


def _upgrade(connection: psycopg.Connection[Any], name: str) -> None:
    """Upgrade a store; another transaction that has a lock delays it."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            connection.execute(schema.upgrade(name).encode())
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
        raise EngineUnavailable(f"{address.url}: {one_line(error)}") from error
    failed = f"the schema {address.schema} was not {done} in {address.url}"
    try:
        yield connection
    except psycopg.Error as error:
        reason = error.diag.message_primary or one_line(error)
        if error.sqlstate == _NO_RIGHTS:
            raise AuthenticationFailed(f"{failed}: {reason}. {remedy}") from error
        if error.sqlstate == _NO_ROLE:
            raise EngineError(f"{failed}: {reason}. Create the role first") from error
        raise EngineError(f"{failed}: {one_line(error)}") from error
    finally:
        connection.close()
