"""Where something listens, as URLs write it: a host and a port, or the path of a socket.

Every function takes the URL as it may be shown, for the message of the error that it raises.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote

from tenure.errors import InvalidArgument

__all__ = ["host_and_port", "is_host", "is_local", "parameters", "shown", "socket_path"]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DIGITS = 5  # of a port
_LONGEST_LABEL = 63  # characters between two dots, of which there are some


def host_and_port(url: str, place: str, default: int, *, lowest: int = 1) -> tuple[str, int]:
    """What ``host:port`` says; the host may be missing, and so may the port.

    Raises:
        InvalidArgument: it says something else.
    """
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
        if host and not is_host(host):
            raise InvalidArgument(f"{url!r}: {host!r} is not the name or the address of a host")
    if not port:
        return host, default
    is_number = port.isascii() and port.isdigit() and len(port) <= _DIGITS
    if not (is_number and lowest <= int(port) < 1 << 16):
        raise InvalidArgument(f"{url!r}: {port!r} is no port; a port is {lowest} to 65535")
    return host, int(port)


def is_host(text: str) -> bool:
    """Whether that can be the name of a host, or an IPv4 address."""
    labels = text.split(".")
    return bool(_HOST.fullmatch(text)) and all(0 < len(x) <= _LONGEST_LABEL for x in labels)


def shown(host: str, port: int) -> str:
    """A host and a port, written together."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(url: str, place: str) -> str:
    """The path of a Unix socket.

    Raises:
        InvalidArgument: it is none, or not absolute.
    """
    path = unquote(place)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidArgument(
            f"{url!r} names no socket; write the whole path after the two slashes, for example "
            "tenure+unix:///run/tenure/tenure.sock"
        )
    return path


def is_local(host: str, path: str) -> bool:
    """Whether that host, or socket if there is a path, is reached within this machine alone."""
    if path or host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parameters(url: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    """What stands behind the question mark.

    Raises:
        InvalidArgument: one of them is unknown, empty, or there twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in known:
            raise InvalidArgument(
                f"{url!r}: there is no parameter {name!r} here; there "
                + ("is " if len(known) == 1 else "are ")
                + ", ".join(known)
            )
        if name in found:
            raise InvalidArgument(f"{url!r} has {name} twice")
        if not value:
            raise InvalidArgument(f"{url!r}: {name} has no value")
        found[name] = unquote(value)
    return found
