"""URLs of PostgreSQL: libpq's own, with a few parameters of the engine.

Hosts, credentials and libpq's parameters mean what they mean to libpq, which also reads the service
file, the password file and the environment. The kit's names for TLS are translated to libpq's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

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
from tenure.errors import InvalidArgument
from tenure.wire.places import host_and_port

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
