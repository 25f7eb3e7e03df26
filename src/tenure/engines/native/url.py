"""URLs of tenure's own server.

    tenure://coord.example                      one server, at port 7070
    tenure://TOKEN@coord.example:7070           with a token; else TENURE_TOKEN is the token
    tenure://a.example,b.example:7071,[::1]     several servers on one store
    tenures://coord.example                     inside TLS
    tenure+unix:///run/tenure/tenure.sock       a socket on this machine

`docs/reference/urls.md` lists the parameters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from tenure.busy_poll import USUAL
from tenure.engines._kit.url import BUSY_POLL, TLS, Endpoint, Parameter, StoreUrl, Tls
from tenure.errors import InvalidArgument

DEFAULT_PORT = 7070
PARAMETERS: tuple[Parameter[Any], ...] = (BUSY_POLL, *TLS)
_LONGEST_TOKEN = 4096


@dataclass(frozen=True, slots=True)
class NativeUrl:
    """A parsed URL.

    Attributes:
        url: the URL without secrets and parameters.
        endpoints: the servers, in their order.
        tls: the TLS options, or ``None``.
        token: the client's credential; empty: none.
        busy_poll: maximum seconds of busy polling for an answer.
    """

    url: str
    endpoints: tuple[Endpoint, ...]
    tls: Tls | None = None
    token: str = field(default="", repr=False)
    busy_poll: float = USUAL / 1e6


def parse(url: str) -> NativeUrl:
    """Parse a URL.

    Raises:
        InvalidArgument: the URL is malformed; the message does not contain the token.
    """
    given = StoreUrl(url, ("tenure", "tenures", "tenure+unix"), PARAMETERS, token=True)
    tls = given.tls(inside=given.scheme == "tenures", scheme="tenures")
    if given.scheme == "tenure+unix":
        endpoints: tuple[Endpoint, ...] = (given.socket(),)
        place = given.hosts + given.path
    else:
        if given.path not in {"", "/"}:
            raise given.wrong("only parameters may follow the port")
        endpoints = given.endpoints(DEFAULT_PORT)
        place = ",".join(map(str, endpoints))
    return NativeUrl(f"{given.scheme}://{place}", endpoints, tls, _token(given), given[BUSY_POLL])


def _token(given: StoreUrl) -> str:
    token = given.secret or os.environ.get("TENURE_TOKEN", "")
    if len(token) > _LONGEST_TOKEN or not token.isprintable():
        raise InvalidArgument(
            f"the token for {given.shown!r} is invalid: it is not printable text of at most "
            f"{_LONGEST_TOKEN} characters. In a URL, write special characters as %XX"
        )
    return token
