"""URLs of Redis, in the forms of redis-py.

    redis://localhost:6379/0                         one server
    rediss://user:password@host                      inside TLS
    redis+unix:///run/redis/redis.sock?db=1          on a socket
    redis+sentinel://host1,host2:26379/mymaster/0    the master that the sentinels name
    redis+cluster://host1,host2:6379                 the node of a cluster that has the namespace

`docs/reference/urls.md` lists the parameters.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from tenure.core.rules import MAX_WINDOW, MIN_WINDOW
from tenure.engines._kit.url import (
    BUSY_POLL,
    CONNECT_TIMEOUT,
    PASSWORD,
    SOCKET_TIMEOUT,
    TLS,
    USERNAME,
    Endpoint,
    Parameter,
    StoreUrl,
    choice,
    flag,
    number,
    text,
)

_REDIS_PORT, _SENTINEL_PORT = 6379, 26379

Place = tuple[str, int] | str
"""Address of a server: (host, port), or the path of a socket."""

_CONNECT_TIMEOUT = replace(CONNECT_TIMEOUT, default=5.0)
_DB = number("db", 0, 0, 999_999_999)
_CLIENT_NAME = text("client_name", "tenure")
_PROTOCOL = choice("protocol", 3, {"3": 3, "2": 2})
_SSL = flag("ssl")
_CHECK_HOSTNAME = flag("ssl_check_hostname", default=True)
_SENTINEL_USERNAME = text("sentinel_username")
_SENTINEL_PASSWORD = text("sentinel_password", secret=True)
_PREFIX = text("prefix", "tenure")
_FRESH = flag("fresh")
_MAX_WINDOW = number("max_window", 30.0, MIN_WINDOW, MAX_WINDOW, aliases=("quarantine",))
_MIN_REPLICAS = number("min_replicas", 0, 0, 100)
_MAY_EVICT = choice("eviction", False, {"refuse": False, "warn": True})
PARAMETERS: tuple[Parameter[Any], ...] = (
    _DB,
    USERNAME,
    PASSWORD,
    _CLIENT_NAME,
    _PROTOCOL,
    _SSL,
    *TLS,
    _CHECK_HOSTNAME,
    SOCKET_TIMEOUT,
    _CONNECT_TIMEOUT,
    _SENTINEL_USERNAME,
    _SENTINEL_PASSWORD,
    _PREFIX,
    _FRESH,
    _MAX_WINDOW,
    _MIN_REPLICAS,
    _MAY_EVICT,
    BUSY_POLL,
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL.

    Attributes:
        url: the URL without secrets.
        places: the addresses of the server, of the sentinels, or of nodes of a cluster.
        service: the sentinels' name of the server; empty without sentinels.
        cluster: whether the server has to be a cluster; one may be found without that.
        tls: the TLS options, or ``None``.
        server_name: the name in the server's certificate; empty: its host.
        prefix: the prefix of all keys, in braces.
        fresh: whether the caller declares that a namespace without data is new.
        max_window: the namespace's longest recovery window in seconds, the same for every program.
        min_replicas: number of replicas that confirm a grant before it is reported.
        socket_timeout: timeout in seconds after which a silent connection is dropped.
        connect_timeout: timeout in seconds of one attempt to connect.
        busy_poll: maximum seconds of busy polling for an answer.
    """

    url: str
    places: tuple[Place, ...]
    service: str
    cluster: bool
    db: int
    username: str
    password: str = field(repr=False)
    sentinel_username: str
    sentinel_password: str = field(repr=False)
    tls: ssl.SSLContext | None
    server_name: str
    client_name: str
    protocol: int
    prefix: str
    fresh: bool
    max_window: float
    min_replicas: int
    may_evict: bool
    socket_timeout: float
    connect_timeout: float
    busy_poll: float


def parse(url: str) -> RedisUrl:
    """Parse a URL. Raises `InvalidArgument`."""
    place, mark, query = url.partition("?")
    query = query.replace("+", "%20")  # a space, as redis-py reads it; allowed in namespaces' names
    schemes = "redis", "rediss", "redis+cluster", "redis+sentinel", "redis+unix"
    given = StoreUrl(f"{place}{mark}{query}", schemes, PARAMETERS)
    endpoints, service, db = _server(given)
    if db and _DB in given and str(given[_DB]) != db:
        raise given.wrong("it names two databases")
    if db and not (db.isdecimal() and len(db) <= 9):
        raise given.wrong(f"a database is a number, not {db!r}")
    prefix = given[_PREFIX]
    if set("{}") & set(prefix):
        raise given.wrong("a prefix has no braces")
    tls = given.tls(inside=given.scheme == "rediss" or given[_SSL], scheme="rediss")
    if tls is not None and tls.verify == "full" and not given[_CHECK_HOSTNAME]:
        tls = replace(tls, verify="ca")
    username, password = given.account()
    return RedisUrl(
        url=given.shown,
        places=tuple(each.path or (each.host, each.port) for each in endpoints),
        service=service,
        cluster=given.scheme == "redis+cluster",
        db=int(db) if db else given[_DB],
        username=username,
        password=password,
        sentinel_username=given[_SENTINEL_USERNAME],
        sentinel_password=given[_SENTINEL_PASSWORD],
        tls=None if tls is None else tls.context(),
        server_name="" if tls is None else tls.server_name,
        client_name=given[_CLIENT_NAME],
        protocol=given[_PROTOCOL],
        prefix=f"{{{prefix}}}:",
        fresh=given[_FRESH],
        max_window=given[_MAX_WINDOW],
        min_replicas=given[_MIN_REPLICAS],
        may_evict=given[_MAY_EVICT],
        socket_timeout=given[SOCKET_TIMEOUT],
        connect_timeout=given[_CONNECT_TIMEOUT],
        busy_poll=given[BUSY_POLL],
    )


def _server(given: StoreUrl) -> tuple[tuple[Endpoint, ...], str, str]:
    """Return the server, or the sentinels, with the service's name and the database's number."""
    path = unquote(given.path).strip("/")
    if given.scheme == "redis+unix":
        return (given.socket(),), "", ""
    if given.scheme == "redis+sentinel":
        service, _, db = path.partition("/")
        if not service:
            raise given.wrong("it names no service: redis+sentinel://host1,host2:26379/mymaster/0")
        return given.endpoints(_SENTINEL_PORT, "localhost"), service, db
    endpoints = given.endpoints(_REDIS_PORT, "localhost")
    if len(endpoints) > 1 and given.scheme != "redis+cluster":
        raise given.wrong(
            "it names several hosts. Write redis+cluster://host1,host2 for the nodes of a cluster, "
            "and redis+sentinel://host1,host2/mymaster for sentinels"
        )
    return endpoints, "", path
