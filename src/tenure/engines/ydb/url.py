"""URLs of YDB.

    ydb://host[:2136]/database        without TLS
    ydbs://host[:2135]/database       with TLS

`docs/reference/urls.md` lists the parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from tenure.engines._kit.url import (
    CONNECT_TIMEOUT,
    TLS,
    Parameter,
    StoreUrl,
    Tls,
    flag,
    number,
    text,
)

Credentials = Literal["environment", "anonymous", "metadata", "token", "static"]

_PORTS = {"ydb": 2136, "ydbs": 2135}
_DATABASE = re.compile(r"(/[A-Za-z0-9._-]+)+")

_CREDENTIALS = text("credentials", "environment")
_TOKEN = text("token", secret=True)
_DISCOVERY = flag("discovery", default=True)
_FENCING = flag("fencing", default=True)
_SIBLINGS = number("siblings", 32, 0, 65536)
# gRPC always checks certificates itself, and needs a name for all servers at once.
_FILES = tuple(each for each in TLS if each.name in {"tls_ca", "tls_cert", "tls_key"})
PARAMETERS: tuple[Parameter[Any], ...] = (
    _CREDENTIALS,
    _TOKEN,
    _DISCOVERY,
    _FENCING,
    _SIBLINGS,
    CONNECT_TIMEOUT,
    *_FILES,
)


@dataclass(frozen=True, slots=True)
class YdbUrl:
    """A parsed URL.

    Attributes:
        url: the URL without secrets.
        endpoints: one or more ``host:port``; each of them lists the others.
        database: the path of the database, such as ``/local``.
        tls: the TLS options, or ``None``.
        credentials: the kind of the credentials.
        user, password: for the kind ``"static"``.
        token: for the kind ``"token"``.
        discovery: whether to connect to the servers listed by the endpoints, instead of the
            endpoints.
        fencing: whether to describe a semaphore after each grant, for the fencing token.
        siblings: maximum number of additional sessions for each session of the program, for further
            requests for a name.
        connect_timeout: timeout in seconds of connecting, and of attaching.
    """

    url: str
    endpoints: tuple[str, ...]
    database: str
    tls: Tls | None
    credentials: Credentials
    user: str
    password: str = field(repr=False)
    token: str = field(repr=False)
    discovery: bool
    fencing: bool
    siblings: int
    connect_timeout: float

    @property
    def transport(self) -> str:
        """Encryption that the servers must have, for messages."""
        if self.tls is None:
            return "without TLS"
        return "with TLS and a trusted certificate (tls_ca=FILE)"


def parse(url: str) -> YdbUrl:
    """Parse a URL. Raises `InvalidArgument`."""
    given = StoreUrl(url, tuple(_PORTS), PARAMETERS)
    database = given.path.rstrip("/")
    if not _DATABASE.fullmatch(database):
        raise given.wrong("it names no database; write one as in ydb://localhost:2136/local")
    tls = given.tls(inside=given.scheme == "ydbs", scheme="ydbs")
    if tls is not None and bool(tls.cert) != bool(tls.key):
        raise given.wrong("tls_cert and tls_key go together; set both")
    return YdbUrl(
        url=given.shown,
        endpoints=tuple(map(str, given.endpoints(_PORTS[given.scheme]))),
        database=database,
        tls=tls,
        credentials=_kind(given),
        user=given.user,
        password=given.secret,
        token=given[_TOKEN],
        discovery=given[_DISCOVERY],
        fencing=given[_FENCING],
        siblings=given[_SIBLINGS],
        connect_timeout=given[CONNECT_TIMEOUT],
    )


def _kind(given: StoreUrl) -> Credentials:
    account = bool(given.user or given.secret)
    ways = [
        *(["user:password@"] if account else []),
        *(each.name for each in (_TOKEN, _CREDENTIALS) if each in given),
    ]
    if len(ways) > 1:
        raise given.wrong(f"the credentials are given twice, by {' and '.join(ways)}; remove one")
    if account:
        if not given.user:
            raise given.wrong("the password has no user; write user:password@host")
        return "static"
    if _TOKEN in given:
        return "token"
    match given[_CREDENTIALS]:
        case "environment" | "anonymous" | "metadata" as kind:
            return kind
        case other:
            raise given.wrong(
                f"credentials must be environment, anonymous or metadata, not {other!r}; write a "
                "user and a password before the host, user:password@host"
            )
