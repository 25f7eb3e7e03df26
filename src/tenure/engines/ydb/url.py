"""What a ``ydb://`` or ``ydbs://`` URL says: where, over what, as whom, and with which choices.

    ydb://host[:2136]/database        without TLS
    ydbs://host[:2135]/database       with TLS

A password or a token in the URL is for the driver alone: `Address.url`, which messages and
descriptions show, has none of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

from tenure.errors import InvalidArgument

__all__ = ["Address", "parse"]

Credentials = Literal["environment", "anonymous", "metadata", "token", "static"]

_PORTS = {"ydb": 2136, "ydbs": 2135}
_OPTIONS = {
    "credentials": "environment, anonymous or metadata",
    "token": "an access token",
    "root_certificates": "a file",
    "certificate_chain": "a file",
    "private_key": "a file",
    "discovery": "on or off",
    "fencing": "on or off",
    "siblings": "a number",
    "connect_timeout": "seconds",
}
_SECRET = frozenset({"token"})
_TLS = ("root_certificates", "certificate_chain", "private_key")
_DATABASE = re.compile(r"(/[A-Za-z0-9._-]+)+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: as it may be shown.
        endpoints: ``host:port``, one or more; any of them tells of the others.
        database: its path, such as ``/local``.
        secure: whether with TLS.
        credentials: which kind of them.
        user, password: of the kind ``"static"``.
        token: of the kind ``"token"``.
        files: those of the TLS options that are given, by the option's name.
        discovery: whether to ask for the endpoints to use, or to use the given ones alone.
        fencing: whether to describe a semaphore after each grant, for the fencing token.
        siblings: how many sessions at the most to open beside each session of the program, for
            further requests for names that it has a request for.
        connect_timeout: seconds for connecting, and for attaching.
    """

    url: str
    endpoints: tuple[str, ...]
    database: str
    secure: bool
    credentials: Credentials = "environment"
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    files: tuple[tuple[str, str], ...] = ()
    discovery: bool = True
    fencing: bool = True
    siblings: int = 32
    connect_timeout: float = 10.0

    @property
    def spoken(self) -> str:
        """How the servers have to be spoken to, in words."""
        if not self.secure:
            return "without TLS"
        return "with TLS and a certificate to be trusted (root_certificates=FILE)"


def parse(url: str) -> Address:
    """Understand a URL."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    rest, fragment, _ = rest.partition("#")
    location, _, query = rest.partition("?")
    userinfo, at, location = location.rpartition("@")
    hosts, slash, database = location.partition("/")
    database = slash + database.rstrip("/")
    shown = f"{scheme}://{hosts}{database}"
    if fragment:
        raise InvalidArgument(f"{shown} is followed by a '#', which means nothing here")
    options = _options(shown, query)
    public = "&".join(f"{name}={value}" for name, value in options.items() if name not in _SECRET)
    shown += f"?{public}" if public else ""
    if scheme not in _PORTS:
        raise InvalidArgument(f"{shown}: the schemes here are ydb:// and ydbs:// (with TLS)")
    if not _DATABASE.fullmatch(database):
        raise InvalidArgument(
            f"{shown} names no database: ydb://localhost:2136/local is the database /local"
        )
    kind, user, password = _who(shown, userinfo, bool(at), options)
    files = tuple((name, unquote(options[name])) for name in _TLS if name in options)
    if files and scheme != "ydbs":
        raise InvalidArgument(f"{shown}: {files[0][0]} is for ydbs://, which uses TLS")
    if ("certificate_chain" in options) != ("private_key" in options):
        raise InvalidArgument(f"{shown}: certificate_chain and private_key go together")
    return Address(
        url=shown,
        endpoints=tuple(_endpoint(shown, host, _PORTS[scheme]) for host in hosts.split(",")),
        database=database,
        secure=scheme == "ydbs",
        credentials=kind,
        user=user,
        password=password,
        token=unquote(options.get("token", "")),
        files=files,
        discovery=_switch(shown, "discovery", options),
        fencing=_switch(shown, "fencing", options),
        siblings=int(_number(shown, "siblings", options, 32, whole=True)),
        connect_timeout=_number(shown, "connect_timeout", options, 10.0, whole=False),
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


def _who(
    shown: str, userinfo: str, given: bool, options: dict[str, str]
) -> tuple[Credentials, str, str]:
    ways = [
        *(["user:password@"] if given else []),
        *(name for name in ("token", "credentials") if name in options),
    ]
    if len(ways) > 1:
        raise InvalidArgument(f"{shown} says twice who connects: {' and '.join(ways)}")
    if given:
        user, _, password = userinfo.partition(":")
        if not user:
            raise InvalidArgument(f"{shown} has a password, and no user before it")
        return "static", unquote(user), unquote(password)
    if "token" in options:
        if not options["token"]:
            raise InvalidArgument(f"{shown}: the token is empty")
        return "token", "", ""
    match options.get("credentials", "environment"):
        case "environment" | "anonymous" | "metadata" as kind:
            return kind, "", ""
        case other:
            raise InvalidArgument(
                f"{shown}: credentials are {_OPTIONS['credentials']}, not {other!r}; a user and "
                "a password stand before the host, user:password@host"
            )


def _endpoint(shown: str, host: str, default: int) -> str:
    name, port = host, ""
    if not host.endswith("]"):
        name, colon, port = host.rpartition(":")
        if not colon:
            name, port = host, ""
    if not _HOST.fullmatch(name):
        raise InvalidArgument(f"{shown}: {host!r} is not a host, such as db.example.org:{default}")
    if not port:
        return f"{name}:{default}"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise InvalidArgument(f"{shown}: {port!r} is not a port")
    return f"{name}:{port}"


def _switch(shown: str, name: str, options: dict[str, str]) -> bool:
    value = options.get(name, "on")
    if value not in {"on", "off"}:
        raise InvalidArgument(f"{shown}: {name} is on or off, not {value!r}")
    return value == "on"


def _number(
    shown: str, name: str, options: dict[str, str], default: float, *, whole: bool
) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(int(text) if whole else float(text))
    except ValueError:
        value = -1.0
    if not (value >= 0 if whole else value > 0) or not math.isfinite(value):
        raise InvalidArgument(f"{shown}: {name} is {_OPTIONS[name]}, not {text!r}")
    return value
