"""URLs of PostgreSQL, and errors of the connections that they name.

Hosts, credentials and libpq's parameters mean what they mean to libpq, which also reads the service
file, the password file and the environment. The kit's names for TLS are translated to libpq's.

**Failures** (`login_failure`) have a cause, may pass by themselves, and say what to do. libpq
reports a failed login as text, without its SQLSTATE. So the texts of PostgreSQL and of PgBouncer
are sorted here, in the order of the table; the first match counts. A text that is not known is an
outage, which is tried again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from tenure.engines._kit.url import (
    BUSY_POLL,
    SOCKET_TIMEOUT,
    TLS,
    Parameter,
    StoreUrl,
    choice,
    text,
)
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    TenureError,
)
from tenure.wire.places import host_and_port

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


_SCHEMES = ("postgresql", "postgres")
_SCHEMA = text("schema", "tenure")
_LISTEN = text("listen")
_DURABILITY = choice("durability", "full", {"process": "process", "full": "full"})
_SYNCHRONOUS = choice("failover", False, {"asynchronous": False, "synchronous": True})
_PORT = 5432
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_MODES = {"full": "verify-full", "ca": "verify-ca", "none": "require"}


def _libpq() -> list[Parameter[Any]]:
    known = {each.keyword.decode(): each.dispchar for each in pq.Conninfo.get_defaults()}
    return [text(name, secret=sign == b"*") for name, sign in known.items()]


_PASSED = _libpq()
_TLS: tuple[Parameter[Any], ...] = tuple(each for each in TLS if each.name != "tls_server_name")
OWN: tuple[Parameter[Any], ...] = (
    _SCHEMA,
    _LISTEN,
    _DURABILITY,
    _SYNCHRONOUS,
    SOCKET_TIMEOUT,
    BUSY_POLL,
    *_TLS,
)
PARAMETERS: tuple[Parameter[Any], ...] = (*OWN, *_PASSED)


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """The parts of a URL.

    Attributes:
        url: without secrets, for messages.
        conninfo: the connection string for libpq.
        listen: the connection string of the connection that receives notifications; empty: the
            first one, if there is no pooler.
        schema: the schema of the store.
        relaxed: commits do not wait for the disk.
        synchronous: a promoted standby has lost nothing.
        connect_timeout: seconds for one attempt to connect.
        socket_timeout: seconds after which a server that does not answer is abandoned.
        busy_poll: seconds that the loop stays awake for an answer, at the most.
    """

    url: str
    conninfo: str = field(repr=False)
    listen: str = field(repr=False)
    schema: str
    relaxed: bool
    synchronous: bool
    connect_timeout: float
    socket_timeout: float
    busy_poll: float

    @property
    def direct(self) -> str:
        """The connection string that leads past a pooler, as far as the URL names one."""
        return self.listen or self.conninfo


def parse(url: str) -> PostgresUrl:
    """Parse a URL.

    Raises:
        InvalidArgument: it is malformed; the message shows it without secrets.
    """
    given = StoreUrl(url, _SCHEMES, PARAMETERS)
    passed = {each.name: given[each] for each in _PASSED if each in given}
    for setting, value in _places(given).items():
        if passed.setdefault(setting, value) != value:
            raise given.wrong(f"the {setting} is given twice, in front of '?' and as a parameter")
    ca, cert, key, verify = (given[each] for each in _TLS)
    files = {"sslrootcert": ca, "sslcert": cert, "sslkey": key}
    passed |= {name: value for name, value in files.items() if value}
    if any(each in given for each in _TLS):
        passed["sslmode"] = _MODES[verify]
    passed.setdefault("connect_timeout", "10")
    passed.setdefault("target_session_attrs", "read-write")
    passed.setdefault("application_name", "tenure")
    passed["client_encoding"] = "UTF8"  # the environment's would make two keys of one name
    for setting, value in passed.items():
        if "\0" in value:  # libpq would ignore it, and all that follows
            raise given.wrong(f"the {setting} contains a NUL character")
    try:
        timeout = max(float(passed["connect_timeout"]), 2.0)
    except ValueError:
        raise given.wrong(
            f"connect_timeout is a number of seconds, not {passed['connect_timeout']!r}"
        ) from None
    try:
        conninfo = make_conninfo(**passed)
        listen = make_conninfo(conninfo, **_listening(given)) if _LISTEN in given else ""
    except InvalidArgument:
        raise
    except Exception as error:  # of libpq, and of text that is not Unicode
        raise given.wrong(str(error).strip()) from None
    schema = given[_SCHEMA]
    if not _NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise given.wrong(f"schema is a name of a-z, 0-9 and _, not {schema!r}")
    return PostgresUrl(
        given.shown,
        conninfo,
        listen,
        schema,
        given[_DURABILITY] == "process",
        given[_SYNCHRONOUS],
        timeout,
        given[SOCKET_TIMEOUT],
        given[BUSY_POLL],
    )


def _listening(given: StoreUrl) -> dict[str, str]:
    """Return the address of the connection for notifications, as libpq's parameters."""
    place = given[_LISTEN]
    if place.startswith("/"):  # the folder of a socket
        host, _, port = place.rpartition(":") if re.search(r":\d+$", place) else (place, "", _PORT)
    else:
        host, port = host_and_port(given.shown, place, _PORT)
    return {"host": host, "port": str(port), "hostaddr": ""}


def _places(given: StoreUrl) -> dict[str, str]:
    """Return what stands in front of the parameters, as libpq's parameters."""
    found = {"user": given.user, "password": given.secret, "dbname": unquote(given.path[1:])}
    if given.hosts:
        if "%" not in given.hosts:  # the path of a socket is for libpq
            given.endpoints(_PORT)  # refuses what is no host
        hosts, ports = [], []
        for each in given.hosts.split(","):
            host, _, port = each.rpartition(":") if re.search(r":\d*$", each) else (each, "", "")
            hosts.append(unquote(host.strip("[]")))
            ports.append(port)
        found["host"] = ",".join(hosts)
        found["port"] = ",".join(ports) if any(ports) else ""
    return {name: value for name, value in found.items() if value}
