"""Clients of other protocols: browsers, TLS clients at a port without TLS, the PROXY protocol.

Any web page can make a browser send a request to a port of its user's machine. The lines of the
body could be commands of a line protocol, so the connection is closed at the first line.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"  # of TLS, fatal: protocol_version

Foreign: TypeAlias = Literal["HTTP", "TLS", "PROXY"]

_EXPLAINED: dict[Foreign, str] = {
    "HTTP": "an HTTP client at a port that does not serve HTTP",
    "TLS": "a TLS client at a port without TLS",
    "PROXY": "a proxy announces its clients, and this server does not read the PROXY protocol; "
    "turn it off in the proxy (HAProxy: send-proxy; a balancer of AWS: proxy_protocol_v2)",
}

_METHODS = frozenset(
    each.encode()[:4]
    for each in (
        "GET ",
        "POST",
        "HEAD",
        "PUT ",
        "OPTIONS",
        "DELETE",
        "PATCH",
        "CONNECT",
        "TRACE",
        "PRI ",  # of HTTP/2
    )
)


def foreign(start: bytes) -> Foreign | None:
    """Return the protocol whose connections begin with these bytes, if four of them identify it."""
    if start[:2] == b"\x16\x03":
        return "TLS"
    if start[:4] == b"PROX" or (start[:4] == b"\r\n\r\n" and start[4:5] in {b"", b"\0"}):
        return "PROXY"  # version 1, or 2
    return "HTTP" if start[:4] in _METHODS else None


def is_http(line: str) -> bool:
    """Return true if a line is the first line of an HTTP request."""
    return line.rpartition(" ")[2].startswith("HTTP/")


def explain(found: Foreign) -> str:
    """Return the log text for a client that uses another protocol."""
    return _EXPLAINED[found]


def answer(found: Foreign, protocol: str) -> bytes:
    """Return the last reply to a client that uses another protocol than the port's.

    Args:
        found: the client's protocol, which is not ``PROXY``: behind such a proxy there is a
            client of the port's protocol.
        protocol: the port's protocol, for people.
    """
    if found == "TLS":
        return _ALERT  # so that its library reports a TLS error, and not a closed connection
    text = f"This port of a tenure server is for {protocol}. It does not serve HTTP.\n".encode()
    head = (
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text
