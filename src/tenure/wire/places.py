"""Parser for addresses in URLs: a host and a port, or the path of a socket.

The parsing functions take the URL without secrets, for error messages.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import unquote

from tenure.errors import InvalidArgument

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DIGITS = 5  # of a port
_LONGEST_LABEL = 63  # characters of a label of a host name


def host_and_port(url: str, place: str, default: int, *, lowest: int = 1) -> tuple[str, int]:
    """Parse ``host:port``; a missing host is "", a missing port the default.

    Raises:
        InvalidArgument: the text is not a host and port.
    """
    if "/" in place or "#" in place:
        raise InvalidArgument(f"{url!r}: only parameters may follow the port")
    if place.startswith("["):
        host, bracket, after = place[1:].partition("]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            bracket = ""
        if not bracket or (after and not after.startswith(":")):
            raise InvalidArgument(
                f"{url!r}: brackets are for an IPv6 address, as in [::1]:{default}"
            )
        port = after[1:]
    else:
        host, _, port = place.partition(":")
        if ":" in port:
            raise InvalidArgument(
                f"{url!r}: write an IPv6 address in brackets, as in [::1]:{default}"
            )
        if host and not is_host(host):
            raise InvalidArgument(f"{url!r}: {host!r} is not the name or the address of a host")
    if not port:
        return host, default
    is_number = port.isascii() and port.isdigit() and len(port) <= _DIGITS
    if not (is_number and lowest <= int(port) < 1 << 16):
        raise InvalidArgument(f"{url!r}: {port!r} is not a port; a port is {lowest} to 65535")
    return host, int(port)


def is_host(text: str) -> bool:
    """Return whether the text can be a host name or an IPv4 address."""
    labels = text.split(".")
    return bool(_HOST.fullmatch(text)) and all(0 < len(x) <= _LONGEST_LABEL for x in labels)


def shown(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_path(url: str, place: str) -> str:
    """Parse the path of a Unix socket.

    Raises:
        InvalidArgument: the path names no file, or is not absolute.
    """
    path = unquote(place)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidArgument(
            f"{url!r} names no socket; write the whole path after the two slashes, for example "
            f"{url.partition(':')[0]}:///run/tenure/tenure.sock"
        )
    return path


def is_local(host: str, path: str) -> bool:
    """Return true if the host, or the socket if there is a path, is on this machine."""
    if path or host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parameters(url: str, query: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the decoded values of the query parameters, by their names.

    Args:
        url: the URL without secrets, for errors.
        query: the text after the question mark.
        known: the names of the parameters, by each accepted spelling; with underscores for hyphens.

    Raises:
        InvalidArgument: one of them is unknown, empty, or repeated.
    """
    found: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        written, _, value = part.partition("=")
        spelling = written.replace("-", "_")
        name = known.get(spelling)
        if name is None:
            raise InvalidArgument(f"{url!r}: {_unknown(written, spelling, known)}")
        if name in found:
            alias = f" ({written} is another name of it)" if spelling != name else ""
            raise InvalidArgument(f"{url!r} has {name} twice{alias}")
        if not value:
            raise InvalidArgument(f"{url!r}: {written} has no value")
        found[name] = unquote(value)
    return found


def _unknown(written: str, spelling: str, known: Mapping[str, str]) -> str:
    from difflib import get_close_matches  # only needed for mistakes

    near = get_close_matches(spelling, known, n=1)
    names = list(dict.fromkeys(known.values()))
    return (
        f"there is no parameter {written!r} here; "
        + (f"did you mean {near[0]}? " if near else "")
        + f"{'There' if near else 'there'} {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    )
