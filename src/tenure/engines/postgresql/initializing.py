"""Explicit creation of a store, by an administrator or by an account that may create schemas."""

from __future__ import annotations

import psycopg

from tenure.engines.postgresql import schema
from tenure.engines.postgresql.connecting import encoding_error
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import AuthenticationFailed, EngineError, EngineUnavailable, InvalidArgument

__all__ = ["initialize", "script"]

_END = "COMMIT;\n"
_EXISTS = frozenset({"42P06", "23505"})  # the second one: another program creates it now
_NO_RIGHTS = "42501"
_NO_ROLE = "42704"


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
    try:
        connection = psycopg.connect(address.conninfo, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise EngineUnavailable(f"{address.url}: {_line(error)}") from error
    failed = f"the schema {address.schema} was not created in {address.url}"
    try:
        if wrong := encoding_error(address.url, connection.info):
            raise wrong
        connection.execute(sql.encode())
    except psycopg.Error as error:
        if error.sqlstate in _EXISTS:
            return False
        if error.sqlstate == _NO_RIGHTS:
            raise AuthenticationFailed(
                f"{failed}: {_primary(error)}. Have an administrator run the SQL that "
                "--print-sql prints"
            ) from error
        if error.sqlstate == _NO_ROLE:
            raise EngineError(f"{failed}: {_primary(error)}. Create the role first") from error
        raise EngineError(f"{failed}: {_line(error)}") from error
    finally:
        connection.close()
    return True


def _primary(error: psycopg.Error) -> str:
    return error.diag.message_primary or _line(error)


def _line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
