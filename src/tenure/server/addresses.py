"""Addresses of ``--listen`` URLs (protocol, host and port or path, TLS), and their sockets.

    tenure://127.0.0.1:7070             tenure's own protocol
    tenures://0.0.0.0:7070              the same inside TLS
    tenure+unix:///run/tenure.sock      the same on a Unix socket
    ydb://127.0.0.1:2136                YDB's coordination API
    ydbs://0.0.0.0:2136                 the same inside TLS
    dflockd://127.0.0.1:6388            dflockd's line protocol
    dflockds://0.0.0.0:6388             the same inside TLS
    http://127.0.0.1:7080               the console, metrics and health checks
    https://0.0.0.0:7080                the same inside TLS

A missing host means all of this machine's addresses, a missing port the protocol's default, and
port 0 any free one. ``?tls-cert=FILE&tls-key=FILE&tls-client-ca=FILE`` override the settings of
these names for one listener; ``?mode=0660`` lets a Unix socket's group connect, too.

**Sockets** are ports, Unix sockets, and those passed by systemd. A socket file outlives its server.
To detect a stale file, a connection to it is tried: only a socket that refuses connections is
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tenure.errors import EngineUnavailable, InvalidArgument
from tenure.wire.places import host_and_port, is_local, parameters, shown, socket_path

_TIMEOUT = 1.0
"""Timeout in seconds for connecting to a live server's Unix socket."""


async def bind_ports(address: Address) -> list[socket.socket]:
    """Return a socket for each address of a host, all on one port, bound and not yet listening.

    Raises:
        EngineUnavailable: it cannot be bound; the message says why.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return _bind_all(found)
    except OSError as error:
        raise EngineUnavailable(
            f"cannot listen at {address.url}: {error.strerror or error}"
        ) from error


def _bind_all(
    found: Sequence[tuple[int, int, int, str, tuple[object, ...]]],
) -> list[socket.socket]:
    """Return a socket for each address, all on one port."""
    bound: list[socket.socket] = []
    try:
        port = 0
        for family, kind, protocol, _, where in dict.fromkeys(found):
            try:
                made = socket.socket(family, kind, protocol)
            except OSError:
                continue  # an address family that this machine does not have
            bound.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            host, requested, *rest = where
            made.bind((host, requested or port, *rest))
            port = made.getsockname()[1]
    except BaseException:
        for each in bound:
            each.close()
        raise
    if not bound:
        raise OSError("this machine has none of its addresses")
    return bound


class SocketFile:
    """File of a Unix socket that a listener has bound.

    Another program, such as a cleaner of temporary files, may delete it. The socket then still
    exists, but no client can connect.

    Args:
        path: the path.
        mode: the permissions.
    """

    def __init__(self, path: str, mode: int) -> None:
        """Set the path; nothing is bound yet."""
        self.path = path
        self._mode = mode
        self._bound: tuple[int, int] | None = None  # device and inode

    def bind(self, timeout: float = _TIMEOUT) -> socket.socket:
        """Return a socket, bound and not yet listening.

        Args:
            timeout: seconds for another server's answer, if one listens there; 0 does not wait.

        Raises:
            EngineUnavailable: another server listens there, or the path cannot be bound.
        """
        bound = bind_unix(self.path, self._mode, timeout)
        try:
            self._bound = self._found()
        except OSError as error:
            bound.close()
            raise _cannot(self.path, error.strerror or str(error)) from None
        return bound

    def is_gone(self) -> bool:
        """Return true if the file is missing, or was replaced."""
        try:
            return self._found() != self._bound
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # it cannot be determined

    def remove(self) -> None:
        """Remove the file, unless it was replaced."""
        with contextlib.suppress(OSError):
            if self._found() == self._bound:
                os.unlink(self.path)

    def _found(self) -> tuple[int, int]:
        status = os.stat(self.path)
        return status.st_dev, status.st_ino


def bind_unix(path: str, mode: int, timeout: float = _TIMEOUT) -> socket.socket:
    """Return a Unix socket at a path, bound and not yet listening, with these permissions.

    Args:
        path: where to bind it.
        mode: the permissions.
        timeout: seconds for another server's answer, if one listens there; 0 does not wait.

    Raises:
        EngineUnavailable: a server listens there, or it cannot be bound; the message says why.
    """
    _remove_stale(path, timeout)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # No client can connect before listen(), so there is time to set the permissions.
        bound.bind(path)
        os.chmod(path, mode)
    except BaseException as error:
        bound.close()
        if isinstance(error, OSError):
            raise _cannot(path, error.strerror or str(error)) from None
        raise
    return bound


def _remove_stale(path: str, timeout: float) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot(path, error.strerror or str(error)) from None
    if not stat.S_ISSOCK(mode):
        raise _cannot(path, "the file is not a socket; remove it, or use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(timeout)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except FileNotFoundError:
            return
        except (TimeoutError, BlockingIOError):
            pass  # a full backlog: a server listens, and is slow
        except OSError as error:
            raise _cannot(path, error.strerror or str(error)) from None
    raise _cannot(path, "another server listens there")


def _cannot(path: str, why: str) -> EngineUnavailable:
    return EngineUnavailable(f"cannot listen at tenure+unix://{path}: {why}")


def claim(passed: list[socket.socket], address: Address) -> Sequence[socket.socket]:
    """Remove and return the passed sockets that are bound to an address."""
    mine = [each for each in passed if _is_at(each, address)]
    for each in mine:
        passed.remove(each)
    return mine


def _is_at(passed: socket.socket, address: Address) -> bool:
    name = passed.getsockname()
    if passed.family == socket.AF_UNIX:
        return bool(address.path) and os.path.realpath(name) == os.path.realpath(address.path)
    if address.path or passed.family not in {socket.AF_INET, socket.AF_INET6}:
        return False
    if name[1] != address.port:
        return False
    if not address.host:
        return name[0] in {"0.0.0.0", "::"}  # noqa: S104  what it is bound to already
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EngineUnavailable(
            f"{address.host!r} is not the name of a host: {error.strerror}"
        ) from error
    return name[0] in {each[4][0] for each in found}


Protocol: TypeAlias = Literal["tenure", "ydb", "dflockd", "http"]

SCHEMES: dict[str, tuple[Protocol, bool]] = {
    "tenure": ("tenure", False),
    "tenures": ("tenure", True),
    "tenure+unix": ("tenure", False),
    "ydb": ("ydb", False),
    "ydbs": ("ydb", True),
    "dflockd": ("dflockd", False),
    "dflockds": ("dflockd", True),
    "http": ("http", False),
    "https": ("http", True),
}
"""Protocol of each scheme, and whether it uses TLS."""

_PORTS: dict[Protocol, int] = {"tenure": 7070, "ydb": 2136, "dflockd": 6388, "http": 7080}

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
