"""Engines, found by the scheme of a URL.

The engines of this package are in `BUILT_IN`, so that a checkout has them without installation.
Other engines are entry points of the group ``tenure.engines``, with the scheme as name and a
`tenure.engines.contract.Connector` as value. An engine is loaded on first use.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from tenure.clock import Clock, SystemClock
from tenure.engines.contract import Connector, Engine, Finding
from tenure.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = [
    "BUILT_IN",
    "GROUP",
    "ClientParameters",
    "connect_engine",
    "diagnose",
    "schemes",
    "split_client_parameters",
    "state_home",
]

GROUP = "tenure.engines"

BUILT_IN = {
    "memory": "tenure.engines.memory",
    "sqlite": "tenure.engines.sqlite",
    "redis": "tenure.engines.redis",
    "rediss": "tenure.engines.redis",
    "redis+cluster": "tenure.engines.redis",
    "redis+sentinel": "tenure.engines.redis",
    "redis+unix": "tenure.engines.redis",
    "postgresql": "tenure.engines.postgresql",
    "postgres": "tenure.engines.postgresql",
    "etcd": "tenure.engines.etcd",
    "etcds": "tenure.engines.etcd",
    "tenure": "tenure.engines.native",
    "tenures": "tenure.engines.native",
    "tenure+unix": "tenure.engines.native",
    "ydb": "tenure.engines.ydb",
    "ydbs": "tenure.engines.ydb",
    "dflockd": "tenure.engines.dflockd",
    "dflockds": "tenure.engines.dflockd",
}
"""Modules of the built-in engines by scheme; ``connect`` in each is the connector."""

_ANSWER_TIMEOUT, _REAPER = "answer_timeout", "reaper"

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def schemes() -> list[str]:
    """Return the URL schemes of the installed engines, sorted."""
    return sorted({*BUILT_IN, *_installed().names})


def _installed() -> EntryPoints:
    # Slow to import, and not needed by a program that only imports tenure.
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def connect_engine(url: str, clock: Clock) -> Engine:
    """Return the engine for a URL, not opened yet.

    Raises:
        InvalidArgument: the URL has no scheme, or its engine rejects it.
        Unsupported: no engine is installed for the scheme, or it needs what this system lacks.
    """
    connector = _connector(url)
    scheme = url.partition(":")[0]
    if scheme.endswith("+unix") and not hasattr(socket, "AF_UNIX"):
        raise Unsupported(
            f"{scheme}:// needs Unix sockets, which Python does not have on this system; connect "
            "to a port of the server"
        )
    return connector(split_client_parameters(url)[0], clock)


class ClientParameters(NamedTuple):
    """Parameters of a URL that the client applies on every engine; ``None``: not given.

    Attributes:
        answer_timeout: seconds.
        reaper: whether a reaper ends the sessions of the program after its death.
    """

    answer_timeout: float | None = None
    reaper: bool | None = None


def split_client_parameters(url: str) -> tuple[str, ClientParameters]:
    """Return the URL without the client's parameters, which engines do not see, and their values.

    Raises:
        InvalidArgument: ``answer_timeout`` is not a number of seconds from 0.1 to 600, or
            ``reaper`` is not true or false.
    """
    location, mark, query = url.partition("?")
    found: dict[str, list[str]] = {_ANSWER_TIMEOUT: [], _REAPER: []}
    rest: list[str] = []
    for each in query.split("&"):
        found.get(each.partition("=")[0], rest).append(each)
    if len(rest) == len(query.split("&")):
        return url, ClientParameters()
    values = ClientParameters(_answer_timeout(found[_ANSWER_TIMEOUT]), _reaper(found[_REAPER]))
    return location + (mark + "&".join(rest) if rest else ""), values


def _answer_timeout(found: list[str]) -> float | None:
    if not found:
        return None
    try:
        value = float(found[0].partition("=")[2])
    except ValueError:
        value = 0.0
    if len(found) > 1 or not 0.1 <= value <= 600:
        raise InvalidArgument(
            f"{_ANSWER_TIMEOUT} in a URL is a number of seconds from 0.1 to 600, given once, not "
            f"{'&'.join(found)!r}"
        )
    return value


def _reaper(found: list[str]) -> bool | None:
    if not found:
        return None
    value = found[0].partition("=")[2].lower()
    if len(found) > 1 or value not in _FLAGS:
        raise InvalidArgument(
            f"{_REAPER} in a URL is true or false, given once, not {'&'.join(found)!r}"
        )
    return _FLAGS[value]


def diagnose(url: str) -> Iterable[Finding]:
    """Return an engine's findings about the store at a URL. Raises as `connect_engine`."""
    return connect_engine(url, SystemClock()).diagnose()


def _connector(url: str) -> Connector:
    if not isinstance(url, str):
        raise InvalidArgument(f"a URL is a str, not {type(url).__name__}")
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme:
        raise InvalidArgument(_without_scheme(url))
    module = BUILT_IN.get(scheme.lower())
    if module is not None:
        return cast("Connector", import_module(module).connect)
    found = _installed().select(name=scheme.lower())
    if not found:
        from difflib import get_close_matches

        known = schemes()
        near = [f"did you mean {each}://?" for each in get_close_matches(scheme, known, n=1)]
        raise Unsupported(
            f"no engine is installed for {scheme}://; "
            + " ".join([*near, "there are:", ", ".join(f"{each}://" for each in known)])
        )
    connector: Connector = next(iter(found)).load()
    return connector


def _without_scheme(url: str) -> str:
    if not url:
        return "the URL is empty; write for example sqlite:///jobs.db or memory://"
    slip = re.fullmatch(r"([\w+]+)(:/?|//)(.+)", url)  # a colon or a slash is missing
    if slip is not None and slip[1] in schemes():
        scheme, written, rest = slip.groups()
        if scheme != "sqlite":
            return f"{url!r} is no URL; write {scheme}://{rest}"
        if written == ":":
            return f"{url!r} is no URL; write sqlite:///{rest}"
        return (
            f"{url!r} is no URL; write sqlite:////{rest} for the absolute path /{rest}, or "
            f"sqlite:///{rest} for a path that counts from the current folder"
        )
    return f"{url!r} is not a URL with a scheme; for a file write sqlite:///{url}"


def state_home(environment: Mapping[str, str]) -> str:
    """Return the user's folder for state, which contains the default stores.

    Raises:
        InvalidArgument: it is unknown, because the user has no home.
    """
    given = environment.get("XDG_STATE_HOME")
    home = given or os.path.expanduser("~/.local/state")
    if not given and home.startswith("~"):
        raise InvalidArgument(
            "no store is named, and there is no default: HOME and XDG_STATE_HOME are not set, and "
            "the user is not in /etc/passwd. Set HOME, or name a store, for example "
            "sqlite:////var/lib/jobs.db"
        )
    return home
