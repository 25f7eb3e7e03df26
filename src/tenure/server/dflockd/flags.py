"""Flags and variables of a dflockd server, and the corresponding settings.

A flag overrides its variable. Two variables have different names in versions 1 and 2; both names
are read. As in version 1, a variable that cannot be parsed is ignored, but one that is out of range
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from tenure.core.rules import check_path
from tenure.errors import InvalidArgument
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import NO_LIMIT, Limits
from tenure.server.settings import Settings, Wrong
from tenure.server.sources import load

Kind: TypeAlias = Literal["text", "count", "switch"]

_TRUE = frozenset({"1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})
_TRUE_FLAGS = _TRUE | {"t", "on"}
_FALSE_FLAGS = _FALSE | {"f", "off"}
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of dflockd's server.

    Attributes:
        name: the name without the dashes.
        kind: ``count`` is a whole number.
        default: the default value.
        about: a one-line description.
        least: the minimum of a count.
        variables: names of variables; the first that is set counts.
    """

    name: str
    kind: Kind
    default: Any
    about: str
    least: int = 1
    variables: tuple[str, ...] = ()


def _flag(name: str, kind: Kind, default: Any, about: str, least: int = 1) -> Flag:
    return Flag(name, kind, default, about, least, (_variable(name),))


def _seconds(name: str, default: int, about: str, former: str = "", least: int = 1) -> Flag:
    variables = *(f"DFLOCKD_{each}" for each in former.split()), f"{_variable(name)}_S"
    return Flag(name, "count", default, about, least, variables)


def _variable(name: str) -> str:
    return f"DFLOCKD_{name.upper().replace('-', '_')}"


FLAGS: tuple[Flag, ...] = (
    _flag("host", "text", "127.0.0.1", "The address to listen at; 0.0.0.0 is all of IPv4."),
    _flag("port", "count", 6388, "The port; 0 is any free one.", least=0),
    _seconds("default-lease-ttl", 33, "Seconds of a lease without a requested length."),
    _seconds("lease-sweep-interval", 1, "Seconds between two checks for expired leases."),
    _seconds("gc-interval", 5, "Seconds between two checks for unused keys.", "GC_LOOP_SLEEP"),
    _seconds("gc-max-idle", 60, "Seconds that an unused key is kept.", "GC_MAX_UNUSED_TIME", 0),
    _flag("max-locks", "count", 1024, "Maximum number of keys."),
    _flag("max-connections", "count", 0, "Maximum number of connections; 0: any number.", least=0),
    _flag(
        "max-waiters", "count", 0, "Maximum number of waiters for a key; 0: any number.", least=0
    ),
    _seconds("read-timeout", 23, "Seconds that a client may be silent."),
    _seconds("write-timeout", 5, "Seconds that a client may leave replies unread."),
    _seconds(
        "shutdown-timeout", 30, "Seconds for clients to finish at shutdown; 0: for ever.", least=0
    ),
    _flag("tls-cert", "text", None, "The certificate (PEM); with it, TLS is required."),
    _flag("tls-key", "text", None, "Its private key (PEM)."),
    _flag("auth-token", "text", None, "The token of all clients; other users see it in ps."),
    _flag("auth-token-file", "text", None, "A file with that token."),
    _flag("auto-release-on-disconnect", "switch", True, "Release the locks of a lost connection."),
    _flag("debug", "switch", False, "Log more."),
)


def settings_of(
    given: Mapping[str, str | None],
    environment: Mapping[str, str],
    *,
    store: str | None,
    node: str,
    log_format: str | None,
    ignore: Callable[[str], None] = lambda _: None,
) -> Settings:
    """Return the settings given by the flags and the environment.

    Args:
        given: the flags' values as typed, by name.
        environment: the environment variables.
        store: the URL of the store; ``None`` for the default of `tenure serve`.
        node: the node of the locks.
        log_format: as for `tenure serve`.
        ignore: called with a message for each ignored variable.

    Raises:
        Wrong: a flag or a variable is invalid.
    """
    faults: list[str] = []
    environment = _parseable(environment, ignore)
    values = {flag.name: _value(flag, given, environment, faults) for flag in FLAGS}
    tokens = _tokens(given, values, faults)
    try:
        check_path(node)
    except InvalidArgument as error:
        faults.append(f"--node: {error}")
    if (values["tls-cert"] is None) is not (values["tls-key"] is None):
        faults.append("TLS needs both --tls-cert and --tls-key")
    if faults:
        raise Wrong(faults)
    host = f"[{values['host']}]" if ":" in values["host"] else values["host"]
    scheme = "dflockd" if values["tls-cert"] is None else "dflockds"
    end = values["shutdown-timeout"]
    most = str(values["max-connections"] or NO_LIMIT)
    settings = load(
        {
            "store": store,
            "listen": (f"{scheme}://{host}:{values['port']}",),
            "tls-cert": values["tls-cert"],
            "tls-key": values["tls-key"],
            "max-connections": most,
            "max-connections-per-source": most,
            "max-connections-per-second": str(NO_LIMIT),
            "max-greetings": str(max(int(most), Limits().greetings)),
            "max-greeting-time": str(values["read-timeout"]),
            "max-sessions": most,
            "drain-time": str(end + 10 if end else NO_LIMIT),
            "log-format": log_format,
            "log-level": "debug" if values["debug"] else None,
        },
        {name: text for name, text in environment.items() if not name.startswith("TENURE_SERVE_")},
    )
    options = DflockdOptions(
        node=node,
        default_lease=values["default-lease-ttl"],
        sweep_interval=values["lease-sweep-interval"],
        gc_interval=values["gc-interval"],
        gc_max_idle=values["gc-max-idle"],
        max_locks=values["max-locks"],
        max_waiters=values["max-waiters"],
        read_timeout=values["read-timeout"],
        write_timeout=values["write-timeout"],
        shutdown_time=end or None,
        auto_release=values["auto-release-on-disconnect"],
    )
    return replace(settings, dflockd=options, tokens=tokens)


def _parseable(environment: Mapping[str, str], ignore: Callable[[str], None]) -> dict[str, str]:
    """Return the environment without the variables that dflockd would ignore."""
    left = dict(environment)
    for flag in FLAGS:
        for name in flag.variables:
            text = left.get(name)
            if not text:
                continue
            if flag.kind == "count" and not _NUMBER.fullmatch(text):
                ignore(f"{name} is ignored: it is a whole number, not {text!r}")
            elif flag.kind == "switch" and text.lower() not in _TRUE | _FALSE:
                ignore(f"{name} is ignored: it is true or false, not {text!r}")
            else:
                continue
            del left[name]
    return left


def _value(
    flag: Flag, given: Mapping[str, str | None], environment: Mapping[str, str], faults: list[str]
) -> Any:
    text, origin = given.get(flag.name), f"--{flag.name}"
    if text is None:
        origin = next((each for each in flag.variables if environment.get(each)), "")
        if not origin:
            return flag.default
        text = environment[origin]
    read: Callable[[Flag, str], Any] = {"text": _text, "count": _count, "switch": _switch}[
        flag.kind
    ]
    try:
        return read(flag, text)
    except ValueError as error:
        faults.append(f"{origin} {error}")
        return flag.default


def _text(_: Flag, text: str) -> str | None:
    return text or None


def _count(flag: Flag, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = flag.least - 1
    if not flag.least <= number <= NO_LIMIT or (flag.name == "port" and number > 65535):
        raise ValueError(f"is a whole number, {flag.least} or more, not {text!r}")
    return number


def _switch(_: Flag, text: str) -> bool:
    if text.lower() in _TRUE_FLAGS:
        return True
    if text.lower() in _FALSE_FLAGS:
        return False
    raise ValueError(f"is true or false, not {text!r}")


def _tokens(
    given: Mapping[str, str | None], values: Mapping[str, Any], faults: list[str]
) -> dict[str, str]:
    """Return the token, if any: a flag precedes a variable, then a token precedes a token file."""
    token, file = values["auth-token"], values["auth-token-file"]
    if given.get("auth-token-file") and not given.get("auth-token"):
        token = None
    if token is None and file is not None:
        try:
            with open(file, encoding="utf-8") as opened:
                token = opened.read().rstrip()
        except (OSError, UnicodeDecodeError) as error:
            faults.append(f"the token file {file} cannot be read: {error}")
            return {}
        if not token:
            faults.append(f"the token file {file} is empty")
            return {}
    if token is None:
        return {}
    token = token.strip()
    if not token or "\n" in token or "\r" in token:
        faults.append("a token is one line, and not empty")
        return {}
    return {token: "the token"}
