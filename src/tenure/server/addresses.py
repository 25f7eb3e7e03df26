"""What a ``--listen`` URL says: which protocol, where, and whether inside TLS.

    tenure://127.0.0.1:7070             tenure's own protocol
    tenures://0.0.0.0:7070              the same inside TLS
    tenure+unix:///run/tenure.sock      the same on a Unix socket
    ydb://127.0.0.1:2136                YDB's coordination API
    ydbs://0.0.0.0:2136                 the same inside TLS
    dflockd://127.0.0.1:6388            dflockd's line protocol
    dflockds://0.0.0.0:6388             the same inside TLS

A missing host means all of this machine's addresses, a missing port the protocol's own, and port 0
any free one. ``?tls-cert=FILE&tls-key=FILE&tls-client-ca=FILE`` are for one listener what the
settings of these names are for all; ``?mode=0660`` lets a Unix socket's group connect too.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import unquote

from tenure.errors import InvalidArgument

__all__ = ["SCHEMES", "TLS_FILES", "Address", "Protocol", "parse"]

Protocol: TypeAlias = Literal["tenure", "ydb", "dflockd"]

SCHEMES: dict[str, tuple[Protocol, bool]] = {
    "tenure": ("tenure", False),
    "tenures": ("tenure", True),
    "tenure+unix": ("tenure", False),
    "ydb": ("ydb", False),
    "ydbs": ("ydb", True),
    "dflockd": ("dflockd", False),
    "dflockds": ("dflockd", True),
}
"""Which protocol a scheme means, and whether it is inside TLS."""

_PORTS: dict[Protocol, int] = {"tenure": 7070, "ydb": 2136, "dflockd": 6388}

TLS_FILES = ("tls-cert", "tls-key", "tls-client-ca")
"""The settings that a URL can have as parameters."""

_MODES = {"0600": 0o600, "0660": 0o660, "0666": 0o666}

_LONGEST_PATH = 100
"""Bytes of a Unix socket's path: what every system takes."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, understood.

    Attributes:
        given: the URL as it was given.
        url: without its parameters.
        protocol: what is spoken there.
        tls: whether inside TLS.
        host: a name or an IP address; empty for all of this machine's.
        port: 0 for any free one.
        path: of a Unix socket, absolute; empty for a port.
        mode: the permissions of a Unix socket.
        files: its own TLS files, by the names of the settings.
    """

    given: str
    url: str
    protocol: Protocol
    tls: bool
    host: str
    port: int
    path: str
    mode: int = 0o600
    files: tuple[tuple[str, str], ...] = ()

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(url: str) -> Address:
    """Understand a URL.

    Raises:
        InvalidArgument: it is none for a listener; the message says what one looks like.
    """
    if "@" in url:  # first of all, because every other message shows the URL
        raise InvalidArgument(
            "an address to listen at has no user and no token; tokens are in --auth-token-file"
        )
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise InvalidArgument(
            f"{url!r} is no address to listen at; write for example tenure://127.0.0.1:7070. There "
            "are: " + ", ".join(f"{each}://" for each in SCHEMES)
        )
    protocol, tls = SCHEMES[scheme]
    place, _, query = rest.partition("?")
    parameters = _parameters(url, query, ("mode",) if scheme == "tenure+unix" else TLS_FILES)
    if scheme == "tenure+unix":
        mode = parameters.get("mode", "0600")
        if mode not in _MODES:
            raise InvalidArgument(
                f"{url!r}: mode is 0600 (this user alone), 0660 (its group too) or 0666 (everyone),"
                f" not {mode!r}"
            )
        path = _path(url, place)
        return Address(url, f"{scheme}://{place}", protocol, tls, "", 0, path, _MODES[mode])
    if parameters and not tls:
        raise InvalidArgument(
            f"{url!r} has a certificate and would not use it; with TLS the scheme is {protocol}s://"
        )
    place = place.removesuffix("/")
    host, port = _host_and_port(url, place, _PORTS[protocol])
    shown = f"[{host}]" if ":" in host else host
    clean = f"{scheme}://{shown}:{port}"
    return Address(url, clean, protocol, tls, host, port, "", files=tuple(parameters.items()))


def _path(url: str, place: str) -> str:
    path = unquote(place)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidArgument(
            f"{url!r} names no socket; write the whole path after the two slashes, for example "
            "tenure+unix:///run/tenure/tenure.sock"
        )
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidArgument(
            f"{url!r}: the path of a Unix socket has at most {_LONGEST_PATH} bytes, this one "
            f"{len(os.fsencode(path))}"
        )
    return path


def _host_and_port(url: str, place: str, default: int) -> tuple[str, int]:
    if "/" in place or "#" in place:
        raise InvalidArgument(f"{url!r}: nothing follows the port, apart from parameters")
    if place.startswith("["):
        host, bracket, after = place[1:].partition("]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            bracket = ""
        if not bracket or (after and not after.startswith(":")):
            raise InvalidArgument(f"{url!r}: in brackets stands an IPv6 address, as in [::1]:7070")
        port = after[1:]
    else:
        host, _, port = place.partition(":")
        if ":" in port:
            raise InvalidArgument(f"{url!r}: write an IPv6 address in brackets, as in [::1]:7070")
        if host and not _HOST.fullmatch(host):
            raise InvalidArgument(f"{url!r}: {host!r} is not the name or the address of a host")
    if not port:
        return host, default
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidArgument(f"{url!r}: {port!r} is no port; a port is 0 to 65535")
    return host, int(port)


def _parameters(url: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in known:
            raise InvalidArgument(
                f"{url!r}: there is no parameter {name!r} here; there "
                + ("is " if len(known) == 1 else "are ")
                + ", ".join(known)
            )
        if name in parameters:
            raise InvalidArgument(f"{url!r} has {name} twice")
        if not value:
            raise InvalidArgument(f"{url!r}: {name} has no value")
        parameters[name] = unquote(value)
    return parameters
