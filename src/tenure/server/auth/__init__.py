"""Authentication: the identity of each connection.

Read in this order: `permissions` and `quotas`, `identity` (the value that everything else uses),
`peer` (a transport's facts about the client), `tokens` (the formats of a token file), `revocation`
(lists of revoked certificates), `authenticator` (the decision), `accounts` and `tallies` (the usage
of each identity), `guard` and `guarded_session` (the enforcement of permissions and quotas).

No message, log line or `repr` in this package contains a token.
"""

from __future__ import annotations

from tenure.server.auth.authenticator import REFUSAL_DELAY, Authenticator, Verdict
from tenure.server.auth.identity import ANONYMOUS, Identity, IdentityKind
from tenure.server.auth.peer import Peer, PeerCertificate, peer_of
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
