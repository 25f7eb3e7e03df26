"""Errors of connecting: their causes, which of them pass by themselves, and what to do about each.

libpq reports a failed login as text, without its SQLSTATE. So the texts of PostgreSQL and of
PgBouncer are sorted here, in the order of the table; the first match counts. A text that is not
known is an outage, which is tried again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import psycopg

from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    TenureError,
)

NO_RIGHT = "42501"
READ_ONLY = "25006"
_ISOLATED = "TN004"


@dataclass(frozen=True, slots=True)
class LoginFailure:
    """A kind of failure.

    Attributes:
        pattern: matches its texts.
        error: the error for it; `EngineUnavailable` for one that may pass by itself.
        remedy: what to do.
    """

    pattern: str
    error: type[TenureError]
    remedy: str


_OTHER = LoginFailure("", EngineUnavailable, "start the server, or correct the host and the port")
_TABLE = (
    LoginFailure(
        r"invalid .*value|invalid port|definition of service|service file|could not match",
        InvalidArgument,
        "correct the parameter in the URL, in libpq's variables (PG...) or in its service file",
    ),
    LoginFailure(
        r"authentication failed|no password supplied|no such user|login rejected",
        AuthenticationFailed,
        "check the user and the password (URL, PGPASSWORD, password file), and the server's "
        "pg_hba.conf",
    ),
    LoginFailure(
        r"pg_hba\.conf",
        AuthenticationFailed,
        "have an administrator allow this account, host and encryption in the server's pg_hba.conf",
    ),
    LoginFailure(
        r'role ".*" does not exist',
        AuthenticationFailed,
        "create it with 'createuser', or name another one in front of the host",
    ),
    LoginFailure(
        r"not permitted to log in|permission denied for database",
        AuthenticationFailed,
        "have an administrator grant it LOGIN, and CONNECT on the database",
    ),
    LoginFailure(
        r'database ".*" does not exist|no such database',
        EngineError,
        "create it with 'createdb', or name another one in the path of the URL",
    ),
    LoginFailure(
        r"not currently accepting connections",
        EngineError,
        "have an administrator run ALTER DATABASE ... ALLOW_CONNECTIONS true",
    ),
    LoginFailure(
        r"does not support SSL|SSL required",
        EngineError,
        "turn TLS on where it is off: in the server (ssl), or in the URL (sslmode)",
    ),
    LoginFailure(
        r"certificate|private key",
        EngineUnavailable,
        "correct tls_ca, tls_cert and tls_key in the URL, or the server's certificate and the host "
        "that it names",
    ),
    LoginFailure(
        r"too many (clients|connections)|connection slots|no more connections|query_wait_timeout",
        EngineUnavailable,
        "close connections that are not used, or raise the limit (max_connections, CONNECTION "
        "LIMIT; PgBouncer: max_client_conn, default_pool_size)",
    ),
    LoginFailure(
        r"starting up|shutting down|in recovery|recovery mode|not yet accepting",
        EngineUnavailable,
        "wait until the server accepts connections",
    ),
    LoginFailure(
        r"read-only|hot standby",
        EngineUnavailable,
        "name the primary, or all servers: the one that accepts writes is chosen. If it is the "
        "primary, turn default_transaction_read_only off for this account and database",
    ),
    LoginFailure(
        r"pgbouncer cannot connect|server login",
        EngineUnavailable,
        "start the server behind the pooler, or correct the pooler's settings",
    ),
    LoginFailure(
        r"failed to resolve|could not translate host name",
        EngineUnavailable,
        "check the name of the host, and this machine's DNS",
    ),
    LoginFailure(
        r"received invalid response|expected authentication request",
        EngineUnavailable,
        "correct the port: another service answers there",
    ),
    LoginFailure(
        r"timeout expired|timed out",
        EngineUnavailable,
        "start the server, or correct the host and the port, and have firewalls let it through",
    ),
)
_PREFIX = re.compile(r"(- host: .* hostaddr: \S+: )?((connection is bad|[a-z ]+ failed): )?")
_NOT_CAUSES = ("\t", "Multiple connection attempts", "Either provide")  # hints, and a repetition


def cause(error: Exception) -> str:
    """Return an error of psycopg's in one line: the message of the server or of libpq.

    The statement and libpq's hints are left out. Of several servers each cause is named once.
    """
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        said = (error.diag.message_primary, error.diag.message_hint)
        return ". ".join(" ".join(each.split()).rstrip(".") for each in said if each)
    lines = [each for each in str(error).splitlines() if not each.startswith(_NOT_CAUSES)]
    return "; ".join(dict.fromkeys(" ".join(_PREFIX.sub("", each, 1).split()) for each in lines))


def login_failure(text: str) -> LoginFailure:
    """Return the kind of failure that a text of libpq's reports."""
    return next((each for each in _TABLE if re.search(each.pattern, text)), _OTHER)


def explained(address: PostgresUrl, error: psycopg.Error) -> TenureError:
    """Return an error of psycopg's as one that says what to do."""
    text = cause(error)
    if error.sqlstate == _ISOLATED:
        return EngineError(
            f"{address.url} cannot be used: {text}. Run ALTER ROLE "
            "ACCOUNT SET default_transaction_isolation = 'read committed', and have the pooler "
            "reconnect"
        )
    if error.sqlstate == NO_RIGHT:
        return AuthenticationFailed(
            f"{address.url}: this account may not use the schema {address.schema}: {text}. Grant "
            "it USAGE on the schema and EXECUTE on its functions"
        )
    if isinstance(error, psycopg.OperationalError):
        failure = login_failure(text)
        remedy = f"{failure.remedy[0].upper()}{failure.remedy[1:]}"
        failed = {EngineUnavailable: "", InvalidArgument: " cannot be used"}
        what = failed.get(failure.error, " refused the login")
        return failure.error(f"{address.url}{what}: {text}. {remedy}")
    if error.sqlstate == READ_ONLY:  # a pooler leads to a standby, until it is promoted
        return EngineUnavailable(f"{address.url}: {text}")
    return EngineError(f"{address.url} cannot be used: {text}")


def encoding_error(url: str, info: psycopg.ConnectionInfo) -> EngineError | None:
    """Return the error for a connection whose texts the database would not understand.

    A text that is sent in one encoding and read in another one is another key, so that one name
    would be two locks.
    """
    database = info.parameter_status("server_encoding")
    if database == "SQL_ASCII":
        return EngineError(
            f"{url} cannot be used: the database's encoding is SQL_ASCII, which keeps no texts. "
            "Create the database with ENCODING 'UTF8'"
        )
    client = info.parameter_status("client_encoding")
    if client != "UTF8":
        return EngineError(
            f"{url} cannot be used: the connection's encoding is {client}, although UTF8 was "
            "requested. Have the pooler pass client_encoding on"
        )
    return None
