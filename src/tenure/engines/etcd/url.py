"""URLs of an etcd cluster.

    etcd://host1[:2379],host2,host3          without TLS
    etcds://user:password@host1,host2        with TLS

`docs/reference/urls.md` lists the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tenure.engines._kit.url import (
    CONNECT_TIMEOUT,
    PASSWORD,
    SOCKET_TIMEOUT,
    TLS,
    USERNAME,
    Parameter,
    StoreUrl,
    Tls,
    text,
)

_PORT = 2379
_PREFIX = text("prefix", "tenure")
PARAMETERS: tuple[Parameter[Any], ...] = (
    _PREFIX,
    USERNAME,
    PASSWORD,
    SOCKET_TIMEOUT,
    CONNECT_TIMEOUT,
    *TLS,
)


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """A parsed URL.

    Attributes:
        url: the URL without secrets.
        endpoints: ``host:port`` of each member in the URL.
        tls: the TLS options, or ``None``.
        prefix: the beginning of all keys; it ends in a slash.
        user, password: the account; both empty without an account.
        timeout: longest time in seconds after which an unanswered call is sent to another member.
        connect_timeout: timeout in seconds of opening and of attaching.
    """

    url: str
    endpoints: tuple[str, ...]
    tls: Tls | None
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    timeout: float = SOCKET_TIMEOUT.default
    connect_timeout: float = CONNECT_TIMEOUT.default

    @property
    def transport(self) -> str:
        """The encryption required of the members, as text."""
        if self.tls is None:
            return "without TLS"
        return "with TLS and a certificate to be trusted (tls_ca=FILE, tls_server_name=NAME)"


def parse(url: str) -> EtcdUrl:
    """Parse a URL. Raises `InvalidArgument`."""
    given = StoreUrl(url, ("etcd", "etcds"), PARAMETERS)
    if given.path not in {"", "/"}:
        path = given.path[1:]
        raise given.wrong(
            f"it has the path {path!r}; the beginning of all keys is given as ?prefix={path}"
        )
    user, password = given.account()
    if bool(user) != bool(password):
        raise given.wrong("a user and a password go together")
    prefix = given[_PREFIX]
    if not prefix.strip("/") or not prefix.isprintable() or not prefix.isascii():
        raise given.wrong("a prefix is plain text, such as tenure or /apps/billing")
    return EtcdUrl(
        url=given.shown,
        endpoints=tuple(map(str, given.endpoints(_PORT, "localhost"))),
        tls=given.tls(inside=given.scheme == "etcds", scheme="etcds"),
        prefix=prefix.rstrip("/") + "/",
        user=user,
        password=password,
        timeout=given[SOCKET_TIMEOUT],
        connect_timeout=given[CONNECT_TIMEOUT],
    )
