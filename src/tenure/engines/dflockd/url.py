"""URLs of dflockd servers.

    dflockd://lock.example                      one server, at port 6388
    dflockd://TOKEN@a.example,b.example:7000    several, sharded by key, with a token
    dflockds://lock.example                     inside TLS

`docs/reference/urls.md` lists the parameters.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, cast

from tenure.engines._kit.url import (
    CONNECT_TIMEOUT,
    SOCKET_TIMEOUT,
    TLS,
    Endpoint,
    Parameter,
    StoreUrl,
    number,
    text,
)
from tenure.wire import lines

DEFAULT_PORT = 6388

_READ_TIMEOUT = number("read_timeout", 23.0, 1.0, 86400.0)
_RENEW_RATIO = cast("Parameter[float | None]", number("renew_ratio", None, 0.01, 0.99))
_CONNECTIONS = number("connections", 256, 2, 65536)
_TOKEN_FILE = text("auth_token_file")
PARAMETERS: tuple[Parameter[Any], ...] = (
    CONNECT_TIMEOUT,
    SOCKET_TIMEOUT,
    _READ_TIMEOUT,
    _RENEW_RATIO,
    _CONNECTIONS,
    _TOKEN_FILE,
    *TLS,
)
_LARGEST_TOKEN_FILE = 128 * 1024


@dataclass(frozen=True, slots=True)
class DflockdUrl:
    """A parsed URL.

    Attributes:
        url: the URL without secrets and parameters.
        endpoints: the servers, in the order used for sharding.
        token: the client's credential; empty: none.
        tls: the TLS options, or ``None``.
        server_name: the name in the certificates; empty: the host of each.
        connect_timeout: timeout in seconds of one attempt to connect.
        answer_timeout: timeout in seconds of a server's answer.
        read_timeout: seconds of silence after which a server closes a connection.
        renew_ratio: the fraction of a lease after which it is renewed; ``None``: a third.
        connections: maximum number of connections to one server.
    """

    url: str
    endpoints: tuple[Endpoint, ...]
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    connect_timeout: float = CONNECT_TIMEOUT.default
    answer_timeout: float = SOCKET_TIMEOUT.default
    read_timeout: float = _READ_TIMEOUT.default
    renew_ratio: float | None = None
    connections: int = _CONNECTIONS.default


def parse(url: str) -> DflockdUrl:
    """Parse a URL.

    Raises:
        InvalidArgument: it is wrong; the message shows it without its token.
    """
    given = StoreUrl(url, ("dflockd", "dflockds"), PARAMETERS, token=True)
    if given.path not in {"", "/"}:
        raise given.wrong("only parameters may follow the port; remove the path")
    endpoints = given.endpoints(DEFAULT_PORT)
    tls = given.tls(inside=given.scheme == "dflockds", scheme="dflockds")
    return DflockdUrl(
        url=f"{given.scheme}://{','.join(map(str, endpoints))}",
        endpoints=endpoints,
        token=_token(given),
        tls=None if tls is None else tls.context(),
        server_name="" if tls is None else tls.server_name,
        connect_timeout=given[CONNECT_TIMEOUT],
        answer_timeout=given[SOCKET_TIMEOUT],
        read_timeout=given[_READ_TIMEOUT],
        renew_ratio=given[_RENEW_RATIO],
        connections=given[_CONNECTIONS],
    )


def _token(given: StoreUrl) -> str:
    token, file = given.secret, given[_TOKEN_FILE]
    if token and file:
        raise given.wrong("the token is given twice; remove it, or auth_token_file")
    if file:
        try:
            with open(file, encoding="utf-8") as opened:
                token = opened.read(_LARGEST_TOKEN_FILE).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise given.wrong(f"auth_token_file cannot be read: {error}") from error
        if not token:
            raise given.wrong(f"auth_token_file {file!r} is empty; write the token into it")
    if not token.isprintable():
        raise given.wrong("the token has control characters; it must be one line of printable text")
    if token:
        lines.auth(token)  # checks its length
    return token
