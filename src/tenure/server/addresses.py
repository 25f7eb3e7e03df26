"""Addresses of ``--listen`` URLs: protocol, host and port or path, and TLS.

    tenure://127.0.0.1:7070             tenure's own protocol
    tenures://0.0.0.0:7070              the same inside TLS
    tenure+unix:///run/tenure.sock      the same on a Unix socket
    ydb://127.0.0.1:2136                YDB's coordination API
    ydbs://0.0.0.0:2136                 the same inside TLS
    dflockd://127.0.0.1:6388            dflockd's line protocol
    dflockds://0.0.0.0:6388             the same inside TLS

A missing host means all of this machine's addresses, a missing port the protocol's default, and
port 0 any free one. ``?tls-cert=FILE&tls-key=FILE&tls-client-ca=FILE`` override the settings of
these names for one listener; ``?mode=0660`` lets a Unix socket's group connect, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tenure.errors import InvalidArgument
from tenure.wire.places import host_and_port, is_local, parameters, shown, socket_path

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
"""Protocol of each scheme, and whether it uses TLS."""

_PORTS: dict[Protocol, int] = {"tenure": 7070, "ydb": 2136, "dflockd": 6388}

TLS_FILES = ("tls-cert", "tls-key", "tls-client-ca", "tls-client-crl")
"""Settings that a URL can have as parameters."""

_MODES = {"0600": 0o600, "0660": 0o660, "0666": 0o666}

_LONGEST_PATH = 100
"""Maximum bytes of a Unix socket's path on all systems."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        given: the original URL.
        url: the URL without its parameters.
        protocol: the protocol.
        tls: whether it uses TLS.
        host: a name or an IP address; empty for all addresses of this machine.
        port: the port; 0 for any free one.
        path: the absolute path of a Unix socket; empty for a port.
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
        """True if only this machine can reach it."""
        return is_local(self.host, self.path)


def parse(url: str) -> Address:
    """Parse a URL.

    Raises:
        InvalidArgument: a listener cannot use it; the message shows a valid example.
    """
    if "@" in url:  # first, because every other message shows the URL
        raise InvalidArgument(
            "an address to listen at has no user and no token; tokens are in --auth-token-file"
        )
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in SCHEMES:
        raise InvalidArgument(
            f"{url!r} is not an address to listen at; an example is tenure://127.0.0.1:7070. There "
            "are: " + ", ".join(f"{each}://" for each in SCHEMES)
        )
    protocol, tls = SCHEMES[scheme]
    place, _, query = rest.partition("?")
    names = ("mode",) if scheme == "tenure+unix" else TLS_FILES
    known = parameters(url, query, {each.replace("-", "_"): each for each in names})
    if scheme == "tenure+unix":
        mode = known.get("mode", "0600")
        if mode not in _MODES:
            raise InvalidArgument(
                f"{url!r}: mode is 0600 (this user alone), 0660 (its group too) or 0666 (everyone),"
                f" not {mode!r}"
            )
        path = _path(url, place)
        return Address(url, f"{scheme}://{place}", protocol, tls, "", 0, path, _MODES[mode])
    if known and not tls:
        raise InvalidArgument(
            f"{url!r} has a certificate and would not use it; with TLS the scheme is {protocol}s://"
        )
    host, port = host_and_port(url, place.removesuffix("/"), _PORTS[protocol], lowest=0)
    clean = f"{scheme}://{shown(host, port)}"
    return Address(url, clean, protocol, tls, host, port, "", files=tuple(known.items()))


def _path(url: str, place: str) -> str:
    path = socket_path(url, place)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidArgument(
            f"{url!r}: the path of a Unix socket has at most {_LONGEST_PATH} bytes, this one "
            f"{len(os.fsencode(path))}"
        )
    return path
