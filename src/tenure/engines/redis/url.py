"""What a Redis URL says: where the server is, who asks, and how the namespace is used.

The forms are those of redis-py; see docs/redis.md for the parameters.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tenure.busy_poll import LONGEST, USUAL
from tenure.core.rules import MAX_WINDOW, MIN_WINDOW
from tenure.errors import InvalidArgument

__all__ = ["Address", "Place", "parse"]

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_PARAMETERS = (
    *("db", "username", "password", "client_name", "protocol", "ssl", "ssl_ca_certs"),
    *("ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ca_path"),
    *("socket_timeout", "socket_connect_timeout", "sentinel_username", "sentinel_password"),
    *("prefix", "fresh", "max_window", "quarantine", "min_replicas", "eviction", "busy_poll"),
)
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
_LONGEST_WINDOW = 30.0
"""Seconds; the default of ``max_window``, and the usual recovery window."""

Place = tuple[str, int] | str
"""Where a server listens: (host, port), or the path of a socket."""


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        url: without secrets.
        places: of the server, or of the sentinels.
        service: the name under which the sentinels know the server; empty without them.
        tls: how to encrypt, or ``None``.
        prefix: what the keys begin with, in braces.
        fresh: the caller says that a namespace without data is new.
        max_window: seconds of the namespace's longest recovery window, the same for every program.
        min_replicas: how many replicas confirm a grant before it is told.
        patience: seconds after which a silent connection is given up, at the most.
        connect_timeout: seconds for one attempt to connect.
        busy_poll: seconds that the loop stays awake for an answer, at the most.
    """

    url: str
    places: tuple[Place, ...]
    service: str
    db: int
    username: str
    password: str = field(repr=False)
    sentinel_username: str
    sentinel_password: str = field(repr=False)
    tls: ssl.SSLContext | None
    client_name: str
    protocol: int
    prefix: str
    fresh: bool
    max_window: float
    min_replicas: int
    may_evict: bool
    patience: float
    connect_timeout: float
    busy_poll: float


class _Parameters:
    """The part of a URL after the question mark."""

    def __init__(self, url: str, query: str) -> None:
        self.url = url
        self._given: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in _PARAMETERS:
                raise InvalidArgument(
                    f"{url!r}: there is no parameter {name!r}; there are {', '.join(_PARAMETERS)}"
                )
            if name in self._given:
                raise InvalidArgument(f"{url!r} has {name} twice")
            self._given[name] = value

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, default)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._given.get(name)
        if value is None:
            return default
        if value.lower() not in _TRUE | _FALSE:
            raise InvalidArgument(f"{self.url!r}: {name} is true or false, not {value!r}")
        return value.lower() in _TRUE

    def one_of(self, name: str, default: str, *others: str) -> str:
        value = self._given.get(name, default)
        if value not in {default, *others}:
            raise InvalidArgument(
                f"{self.url!r}: {name} is one of {', '.join((default, *others))}, not {value!r}"
            )
        return value

    def seconds(self, name: str, default: float, least: float, most: float) -> float:
        return self._number(name, default, least, most, float)

    def whole(self, name: str, default: int, most: int) -> int:
        return int(self._number(name, default, 0, most, int))

    def _number(
        self, name: str, default: float, least: float, most: float, kind: Callable[[str], float]
    ) -> float:
        value = self._given.get(name)
        if value is None:
            return default
        try:
            number = kind(value)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise InvalidArgument(
                f"{self.url!r}: {name} is a number from {least:g} to {most:g}, not {value!r}"
            )
        return number


def parse(url: str) -> Address:
    """Understand a URL."""
    try:
        parts = urlsplit(url)
    except ValueError:  # which may quote a password
        raise InvalidArgument(
            f"the {url.partition(':')[0]}:// URL names no host: in brackets stands an IPv6 "
            "address, as in [::1]:6379"
        ) from None
    if "@" not in parts.netloc and "@" in url and ":" in parts.netloc:
        _check_no_secret(parts)
    safe = _without_secrets(parts)
    if parts.fragment:
        raise InvalidArgument(f"{safe!r} has a '#'; write it as %23")
    scheme = parts.scheme.lower()
    query = _Parameters(safe, parts.query)
    path = unquote(parts.path)
    service = ""
    places: tuple[Place, ...]
    if scheme == "redis+unix":
        if not path.strip("/") or _hosts(parts):
            raise InvalidArgument(f"{safe!r} names no socket: redis+unix:///run/redis/redis.sock")
        places, db = (path,), ""
    elif scheme == "redis+sentinel":
        service, _, db = path.strip("/").partition("/")
        if not service:
            raise InvalidArgument(
                f"{safe!r} names no service: redis+sentinel://host1,host2:26379/mymaster/0"
            )
        places = _places(safe, _hosts(parts), _SENTINEL_PORT)
    else:
        places, db = _places(safe, _hosts(parts), _REDIS_PORT), path.strip("/")
        if len(places) > 1:
            raise InvalidArgument(
                f"{safe!r} names several hosts; Redis Cluster is not supported. Use one server, "
                "or several sentinels: redis+sentinel://host1,host2/mymaster"
            )
    if db and query.text("db", db) != db:
        raise InvalidArgument(f"{safe!r} names two databases")
    prefix = query.text("prefix", "tenure")
    if not prefix or set("{}") & set(prefix):
        raise InvalidArgument(f"{safe!r}: a prefix is not empty, and has no braces")
    return Address(
        url=safe,
        places=places,
        service=service,
        db=_database(safe, db or query.text("db", "0")),
        username=unquote(parts.username or "") or query.text("username"),
        password=unquote(parts.password or "") or query.text("password"),
        sentinel_username=query.text("sentinel_username"),
        sentinel_password=query.text("sentinel_password"),
        tls=_tls(safe, query) if scheme == "rediss" or query.flag("ssl") else None,
        client_name=query.text("client_name", "tenure"),
        protocol=int(query.one_of("protocol", "3", "2")),
        prefix=f"{{{prefix}}}:",
        fresh=query.flag("fresh"),
        max_window=_longest_window(safe, query),
        min_replicas=query.whole("min_replicas", 0, 100),
        may_evict=query.one_of("eviction", "refuse", "warn") == "warn",
        patience=query.seconds("socket_timeout", 5.0, 0.1, 600.0),
        connect_timeout=query.seconds("socket_connect_timeout", 5.0, 0.1, 600.0),
        busy_poll=query.whole("busy_poll", USUAL, LONGEST) / 1e6,
    )


def _hosts(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _without_secrets(parts: SplitResult) -> str:
    name = parts.username or ""
    who = f"{name}@" if name else ""
    kept = [
        each
        for each in parts.query.split("&")
        if each and "password" not in each.partition("=")[0].lower()
    ]
    query = f"?{'&'.join(kept)}" if kept else ""
    return f"{parts.scheme}://{who}{_hosts(parts)}{parts.path}{query}"


def _check_no_secret(parts: SplitResult) -> None:
    """That what stands before an @ behind the host is none of a password; it is not shown."""
    try:
        _places("", parts.netloc, 0)
    except InvalidArgument:
        raise InvalidArgument(
            f"the {parts.scheme}:// URL has a user or a password with '/', '?' or '#' in it; write "
            "%2F, %3F or %23"
        ) from None


def _places(url: str, hosts: str, default: int) -> tuple[Place, ...]:
    found: list[Place] = []
    for each in hosts.split(",") if hosts else ["localhost"]:
        try:
            parts = urlsplit(f"//{each}")
            found.append((parts.hostname or "localhost", parts.port or default))
        except ValueError as error:
            raise InvalidArgument(f"{url!r}: {each!r} is not a host and a port") from error
    return tuple(found)


def _database(url: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InvalidArgument(f"{url!r}: a database is a number, not {text!r}")
    return int(text)


def _longest_window(url: str, query: _Parameters) -> float:
    """The value of ``max_window``, or of ``quarantine``, its former name."""
    windows = {
        name: query.seconds(name, _LONGEST_WINDOW, MIN_WINDOW, MAX_WINDOW)
        for name in ("max_window", "quarantine")
        if query.text(name)
    }
    if len(set(windows.values())) > 1:
        raise InvalidArgument(
            f"{url!r} has two values for one parameter: quarantine is a former name of max_window. "
            "Write max_window alone"
        )
    return max(windows.values(), default=_LONGEST_WINDOW)


def _tls(url: str, query: _Parameters) -> ssl.SSLContext:
    needed = query.one_of("ssl_cert_reqs", "required", "optional", "none")
    try:
        context = ssl.create_default_context(
            cafile=query.text("ssl_ca_certs") or None, capath=query.text("ssl_ca_path") or None
        )
        if query.text("ssl_certfile"):
            context.load_cert_chain(query.text("ssl_certfile"), query.text("ssl_keyfile") or None)
    except OSError as error:
        raise InvalidArgument(f"{url!r}: a certificate cannot be read: {error}") from error
    context.check_hostname = needed != "none" and query.flag("ssl_check_hostname", default=True)
    context.verify_mode = {
        "required": ssl.CERT_REQUIRED,
        "optional": ssl.CERT_OPTIONAL,
        "none": ssl.CERT_NONE,
    }[needed]
    return context
