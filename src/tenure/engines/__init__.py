"""Engines, found by the scheme of a URL.

Every engine, ours or a third party's, is an entry point of the group ``tenure.engines``:
its name is the scheme, its value a `tenure.engines.contract.Connector`. An engine is loaded
on first use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from tenure.clock import Clock
from tenure.engines.contract import Connector, Engine, Finding
from tenure.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["GROUP", "connect_engine", "diagnose", "schemes", "split_answer_timeout"]

GROUP = "tenure.engines"

_ANSWER_TIMEOUT = "answer_timeout"


def schemes() -> list[str]:
    """The URL schemes for which an engine is installed, sorted."""
    return sorted(_installed().names)


def _installed() -> EntryPoints:
    # Slow to import, and not needed by a program that only imports tenure.
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def connect_engine(url: str, clock: Clock) -> Engine:
    """The engine for a URL, not opened yet.

    Raises:
        InvalidArgument: the URL has no scheme, or its engine finds fault with it.
        Unsupported: no engine is installed for the scheme.
    """
    connector = _connector(url)
    return connector(split_answer_timeout(url)[0], clock)


def split_answer_timeout(url: str) -> tuple[str, float | None]:
    """The URL without the parameter ``answer_timeout``, and that in seconds, if it is given.

    It means the same on every engine, and the client applies it; engines do not see it.

    Raises:
        InvalidArgument: it is not a number of seconds from 0.1 to 600.
    """
    location, mark, query = url.partition("?")
    parameters = query.split("&")
    found = [each for each in parameters if each.partition("=")[0] == _ANSWER_TIMEOUT]
    if not found:
        return url, None
    try:
        value = float(found[0].partition("=")[2])
    except ValueError:
        value = 0.0
    if len(found) > 1 or not 0.1 <= value <= 600:
        raise InvalidArgument(
            f"{_ANSWER_TIMEOUT} in a URL is a number of seconds from 0.1 to 600, given once, not "
            f"{'&'.join(found)!r}"
        )
    rest = "&".join(each for each in parameters if each not in found)
    return location + (mark + rest if rest else ""), value


def diagnose(url: str) -> Iterable[Finding]:
    """What the engine for a URL finds out about the store there, opened or not.

    Nothing, where the engine has no examination to offer. Raises as `connect_engine`.
    """
    connector = _connector(url)
    offered = getattr(sys.modules[connector.__module__], "diagnose", None)
    return (
        () if offered is None else cast("Iterable[Finding]", offered(split_answer_timeout(url)[0]))
    )


def _connector(url: str) -> Connector:
    if not isinstance(url, str):
        raise InvalidArgument(f"a URL is a str, not {type(url).__name__}")
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme:
        raise InvalidArgument(_without_scheme(url))
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
