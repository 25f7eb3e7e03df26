"""Decision about the identity of a connection.

Where tokens are required, the token decides. Elsewhere the identity is the subject of the client's
certificate, else the uid of a Unix peer, else `ANONYMOUS`.

The authenticator compares keyed digests, and every digest for each attempt, so that the time of an
attempt reveals nothing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from tenure.errors import AuthenticationFailed
from tenure.server.auth.identity import ANONYMOUS, Identity
from tenure.server.auth.peer import UNKNOWN_PEER, Peer

__all__ = ["Anybody", "Authenticator"]


class Anybody:
    """Authenticator that requires nothing."""

    required = False

    def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:  # noqa: ARG002  (the protocol's)
        """Return the identity that the transport shows."""
        if peer.certificate is not None:
            return Identity(peer.certificate.subject, "certificate")
        if peer.uid is not None:
            return Identity(f"uid {peer.uid}", "uid")
        return ANONYMOUS


class Authenticator(Anybody):
    """Authenticator that requires a token, if it has any.

    Args:
        tokens: each with the name of its identity.
    """

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        self._key = secrets.token_bytes(32)
        self._known: tuple[tuple[bytes, Identity], ...] = ()
        self.replace(tokens or {})

    def __repr__(self) -> str:
        return f"<Authenticator with {len(self._known)} tokens>"

    def __len__(self) -> int:
        """Return the number of valid tokens."""
        return len(self._known)

    @property
    def required(self) -> bool:  # type: ignore[override]  # it depends on the tokens here
        """Whether a client has to show a token."""
        return bool(self._known)

    def replace(self, tokens: Mapping[str, str]) -> None:
        """Replace the valid tokens. Connections that are open stay open."""
        known = []
        for token, name in tokens.items():
            digest = self._digest(token)
            known.append((digest, Identity(name, "token", digest)))
        self._known = tuple(known)

    def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:
        """Return the identity of a client.

        Args:
            token: what the client shows; empty if it shows none.
            peer: what its transport shows.

        Raises:
            AuthenticationFailed: a token is required, and this is not a valid one.
        """
        if not self._known:
            return super().authenticate(token, peer)
        shown = self._digest(token)
        found = None
        for digest, identity in self._known:  # all of them: the time must not tell which one
            if hmac.compare_digest(digest, shown):
                found = identity
        if found is None:
            raise AuthenticationFailed(
                "the server does not know this token; ask its administrator for a valid one"
                if token
                else "the server requires a token; ask its administrator for one"
            )
        return found

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(errors="surrogatepass"), "sha256")
