"""What an ``etcd://`` or ``etcds://`` URL says: which members, over what, as whom, and where.

    etcd://host1[:2379],host2,host3          without TLS
    etcds://user:password@host1,host2        with TLS

The password is for the members alone: `Address.url`, which messages and descriptions show, has
none.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from tenure.errors import InvalidArgument
from tenure.wire.places import is_host

__all__ = ["Address", "parse"]

_PORT = 2379
_OPTIONS = {
    "prefix": "what all keys begin with",
    "user": "a name",
    "password": "the user's",
    "root_certificates": "a file",
    "certificate_chain": "a file",
    "private_key": "a file",
    "server_name": "the name in the members' certificates",
    "timeout": "seconds",
    "connect_timeout": "seconds",
}
_SECRET = frozenset({"password"})
_FILES = ("root_certificates", "certificate_chain", "private_key")
_IN_BRACKETS = re.compile(r"\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: as it may be shown.
        endpoints: ``host:port`` of each member that is named.
        secure: whether with TLS.
        prefix: what all keys begin with; it ends in a slash.
        user, password: who asks; both empty where nobody is asked.
        files: those of the TLS options that are given, by the option's name.
        server_name: what the members' certificates call them; empty for the host.
        timeout: seconds after which an unanswered call is asked of another member, at the most.
        connect_timeout: seconds for opening, and for attaching.
    """

    url: str
    endpoints: tuple[str, ...]
    secure: bool
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    files: tuple[tuple[str, str], ...] = ()
    server_name: str = ""
    timeout: float = 5.0
    connect_timeout: float = 10.0

    @property
    def spoken(self) -> str:
        """How the servers have to be spoken to, in words."""
        if not self.secure:
            return "without TLS"
        return "with TLS and a certificate to be trusted (root_certificates=FILE, server_name=NAME)"


def parse(url: str) -> Address:
    """Understand a URL.

    Raises:
        InvalidArgument: it says what means nothing here.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    rest, fragment, _ = rest.partition("#")
    location, _, query = rest.partition("?")
    userinfo, at, location = location.rpartition("@")
    hosts, _, path = location.partition("/")
    user, _, password = userinfo.partition(":")
    shown = f"{scheme}://{user + at}{hosts}"
    if fragment:
        raise InvalidArgument(f"{shown} is followed by a '#', which means nothing here")
    if scheme not in {"etcd", "etcds"}:
        raise InvalidArgument(f"{shown}: the schemes here are etcd:// and etcds:// (with TLS)")
    if path:
        raise InvalidArgument(
            f"{shown} is followed by the path {path!r}; what all keys begin with is given as "
            f"?prefix={path}"
        )
    options = _options(shown, query)
    public = "&".join(f"{name}={value}" for name, value in options.items() if name not in _SECRET)
    shown += f"?{public}" if public else ""
    files = tuple((name, unquote(options[name])) for name in _FILES if name in options)
    secure = scheme == "etcds"
    if (files or "server_name" in options) and not secure:
        raise InvalidArgument(f"{shown}: certificates are for etcds://, which uses TLS")
    if ("certificate_chain" in options) != ("private_key" in options):
        raise InvalidArgument(f"{shown}: certificate_chain and private_key go together")
    if at and ("user" in options or "password" in options):
        raise InvalidArgument(f"{shown} says twice who asks")
    user = unquote(user or options.get("user", ""))
    password = unquote(password or options.get("password", ""))
    if bool(user) != bool(password):
        raise InvalidArgument(f"{shown}: a user and a password go together")
    prefix = unquote(options.get("prefix", "tenure"))
    if not prefix.strip("/") or not prefix.isprintable() or not prefix.isascii():
        raise InvalidArgument(f"{shown}: a prefix is plain text, such as tenure or /apps/billing")
    return Address(
        url=shown,
        endpoints=tuple(_endpoint(shown, host) for host in (hosts or "localhost").split(",")),
        secure=secure,
        prefix=prefix.rstrip("/") + "/",
        user=user,
        password=password,
        files=files,
        server_name=unquote(options.get("server_name", "")),
        timeout=_seconds(shown, "timeout", options, 5.0),
        connect_timeout=_seconds(shown, "connect_timeout", options, 10.0),
    )


def _options(shown: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            raise InvalidArgument(
                f"{shown}: there is no parameter {name!r}; there are "
                + ", ".join(f"{known} ({what})" for known, what in _OPTIONS.items())
            )
        if name in options:
            raise InvalidArgument(f"{shown} has {name} twice")
        options[name] = value
    return options


def _endpoint(shown: str, host: str) -> str:
    name, port = host, ""
    if not host.endswith("]"):
        name, colon, port = host.rpartition(":")
        if not colon:
            name, port = host, ""
    if not (is_host(name) or _IN_BRACKETS.fullmatch(name)):
        raise InvalidArgument(f"{shown}: {host!r} is not a host, such as one.example.org:{_PORT}")
    if not port and not host.endswith(":"):
        return f"{name}:{_PORT}"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidArgument(f"{shown}: {port!r} is not a port")
    return f"{name}:{port}"


def _seconds(shown: str, name: str, options: dict[str, str], default: float) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 600 or not math.isfinite(value):
        raise InvalidArgument(f"{shown}: {name} is a number of seconds, 0.1 to 600, not {text!r}")
    return value
