"""Facts that a transport knows about its client: a certificate, or a Unix user id."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from typing import Any

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: Linux's struct ucred
_SHORT_NAMES = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "userId": "UID",
}
_ESCAPED = frozenset(',+"\\<>;=')


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """Client certificate that the TLS handshake has verified.

    Attributes:
        subject: the distinguished name in the order of RFC 4514 (``CN=billing,O=Example``); without
            one, the first alternative name (``DNS:billing.example``).
        der: the certificate in DER form.
    """

    subject: str
    der: bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """Client of a connection, as known to its transport.

    Attributes:
        certificate: the client's certificate, if the listener requires one.
        uid: the client's user id, on a Unix socket if the system reports it.
    """

    certificate: PeerCertificate | None = None
    uid: int | None = None


UNKNOWN_PEER = Peer()


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """Read a connected transport's facts about its client."""
    ssl_object = transport.get_extra_info("ssl_object")
    if ssl_object is not None:
        der = ssl_object.getpeercert(binary_form=True)
        if der is None:
            return UNKNOWN_PEER
        return Peer(PeerCertificate(subject_of(ssl_object.getpeercert()), der))
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return Peer(uid=uid_of(sock))
    return UNKNOWN_PEER


def uid_of(sock: socket.socket) -> int | None:
    """Return the user id of a Unix socket's client, if the system reports it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    )
    return found[1]


def subject_of(shown: Any) -> str:
    """Format the subject in the result of `ssl.SSLSocket.getpeercert`."""
    parts = [
        "+".join(f"{_SHORT_NAMES.get(name, name)}={_escape(value)}" for name, value in part)
        for part in shown.get("subject", ())
    ]
    if parts:
        return ",".join(reversed(parts))
    for kind, value in shown.get("subjectAltName", ()):
        return f"{kind}:{value}"
    return f"serial {shown.get('serialNumber', '')}"


def _escape(value: str) -> str:
    """Escape a value, so that different subjects have different texts."""
    escaped = "".join(f"\\{each}" if each in _ESCAPED else each for each in value)
    if escaped[:1] in {" ", "#"}:
        escaped = "\\" + escaped
    if escaped.endswith(" "):
        escaped = escaped[:-1] + "\\ "
    return escaped
