"""Authentication: the identity of each connection.

Read in this order: `identity` (the value that everything else uses, with its permissions and
quotas), `tokens` (the formats of a token file), `authenticator` (the decision, from a transport's
facts about the client), `accounts` and `tallies` (the usage of each identity, and lists of revoked
certificates), `guard` (the enforcement of permissions and quotas), `guarded` (the store as one
identity may use it).

No message, log line or `repr` in this package contains a token.
"""

from __future__ import annotations

from tenure.server.auth.authenticator import (
    REFUSAL_DELAY,
    Authenticator,
    Peer,
    PeerCertificate,
    Verdict,
    peer_of,
)
from tenure.server.auth.identity import ANONYMOUS, Identity, IdentityKind
from tenure.server.auth.tokens import Credentials, Token, read_tokens, readable_by_others

__all__ = [
    "ANONYMOUS",
    "REFUSAL_DELAY",
    "Authenticator",
    "Credentials",
    "Identity",
    "IdentityKind",
    "Peer",
    "PeerCertificate",
    "Token",
    "Verdict",
    "peer_of",
    "read_tokens",
    "readable_by_others",
]
