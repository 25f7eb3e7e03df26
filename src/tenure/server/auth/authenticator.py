"""Authenticator, which determines the identity of a connection.

If a token is required, it determines the identity; a client certificate or a Unix user in the token
file needs none. Otherwise the identity is the subject of the client's certificate, else the uid of
a Unix peer, else `ANONYMOUS`.

A token is found by a keyed digest, with a key of this process. A client cannot choose any part of
that digest, so the time of an attempt reveals nothing about the valid tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from tenure.errors import AuthenticationFailed
from tenure.server.auth.accounts import CertificateId, certificate_id
from tenure.server.auth.identity import ANONYMOUS, PLAIN, Identity
from tenure.server.auth.tokens import Credentials, Rights, Token

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


REFUSAL_DELAY = 0.1
"""Seconds after which a rejected token is reported. Only that client waits."""

Verdict: TypeAlias = Callable[[Identity | None, Peer], str | None]
"""Returns the reason to end a connection, if any; the identity is ``None`` before the greeting."""

_ALL_RIGHTS = Rights()


def _utc() -> datetime:
    return datetime.now(UTC)


class Authenticator:
    """Authenticator that requires a token, if it has any.

    Args:
        tokens: the text of each token, with the name of its identity.
        utc: the time of day, by which tokens expire.
    """

    def __init__(
        self, tokens: Mapping[str, str] | None = None, utc: Callable[[], datetime] = _utc
    ) -> None:
        """Start with `tokens` as secrets by name; without any, no token is required."""
        self._key = secrets.token_bytes(32)
        self._utc = utc
        self._required = False
        self._tokens: dict[bytes, tuple[Token, Identity]] = {}
        self._listed = Credentials()
        self._revoked: frozenset[CertificateId] = frozenset()
        if tokens:
            self.replace(Credentials(tuple(Token.plain(*each) for each in tokens.items())))

    def __repr__(self) -> str:
        """Return the number of tokens, without their secrets."""
        return f"<Authenticator with {len(self._tokens)} tokens>"

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._tokens)

    @property
    def required(self) -> bool:
        """True if clients must authenticate."""
        return self._required

    @property
    def next_expiry(self) -> datetime | None:
        """Time at which the next of the valid tokens expires."""
        now = self._utc()
        ends = [token.expires for token, _ in self._tokens.values() if token.expires is not None]
        return min((each for each in ends if each > now), default=None)

    def replace(
        self, credentials: Credentials, revoked: Iterable[CertificateId] = frozenset()
    ) -> None:
        """Replace the credentials; from now on a token is required. `verdict` shows the effect.

        Args:
            credentials: the new tokens and identities.
            revoked: the revoked certificates.
        """
        self._required = True
        tokens = {}
        for token in credentials.tokens:
            key = self._keyed(token.digest)
            rights = token.rights
            identity = Identity(
                token.name,
                "token",
                key,
                rights.permissions,
                rights.quotas,
                PLAIN if token.unnamed else "",
            )
            tokens[key] = token, identity
        self._tokens = tokens
        self._listed = credentials
        self.revoke(revoked)

    def revoke(self, certificates: Iterable[CertificateId]) -> None:
        """Replace the revoked certificates."""
        self._revoked = frozenset(certificates)

    def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:
        """Return the identity of a client.

        Args:
            token: the client's token; empty if it sent none.
            peer: the client, as known to its transport.

        Raises:
            AuthenticationFailed: a token is required and this one is not valid, or the client's
                certificate is revoked.
        """
        if self._is_revoked(peer):
            raise AuthenticationFailed("the client's certificate is revoked")
        if not self._required:
            return _shown(peer, _ALL_RIGHTS)
        if token:
            digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
            known, identity = self._tokens.get(self._keyed(digest), (None, ANONYMOUS))
            if known is None:
                raise AuthenticationFailed(
                    "the server does not know this token; get a valid one from its administrator"
                )
            if known.is_expired(self._utc()):
                raise AuthenticationFailed(
                    f"the token {known.name} has expired; get another one from the server's "
                    "another one"
                )
            return identity
        rights = None
        if peer.certificate is not None:
            rights = self._listed.certificates.get(peer.certificate.subject)
        elif peer.uid is not None:
            rights = self._listed.uids.get(peer.uid)
        if rights is None:
            raise AuthenticationFailed(
                "the server requires a token; get one from its administrator"
            )
        return _shown(peer, rights)

    def verdict(self, identity: Identity | None, peer: Peer) -> str | None:
        """Return why a connection may not continue after a change or the expiry of a token.

        Args:
            identity: the connection's identity; ``None`` before its greeting.
            peer: the client, as known to its transport.
        """
        if self._is_revoked(peer):
            return "its client's certificate was revoked"
        if identity is None:
            return None
        if identity.kind == "token":
            token, current = self._tokens.get(identity.credential, (None, ANONYMOUS))
            if token is None:
                return f"the token {identity} was revoked"
            if token.is_expired(self._utc()):
                return f"the token {identity} has expired"
        else:
            try:
                current = self.authenticate("", peer)
            except AuthenticationFailed:
                return f"{identity} was revoked"
        rights = identity.permissions, identity.quotas
        if rights != (current.permissions, current.quotas):
            return f"permissions or quotas of {identity} were changed"
        return None

    def _is_revoked(self, peer: Peer) -> bool:
        if not self._revoked or peer.certificate is None:
            return False
        return certificate_id(peer.certificate.der) in self._revoked

    def _keyed(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


def _shown(peer: Peer, rights: Rights) -> Identity:
    """Return the identity given by the transport."""
    if peer.certificate is not None:
        name = peer.certificate.subject
        return Identity(name, "certificate", b"", rights.permissions, rights.quotas)
    if peer.uid is not None:
        return Identity(f"uid {peer.uid}", "uid", b"", rights.permissions, rights.quotas)
    return ANONYMOUS
