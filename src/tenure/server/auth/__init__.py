"""Authentication: which identity each connection has.

Read in this order: `permissions` and `quotas` (what an identity may do, and have), `identity` (the
value that everything else uses), `peer` (what a transport shows about the client), `tokens` (the
formats of a token file), `revocation` (lists of revoked certificates), `authenticator` (the
decision), `accounts` and `tallies` (what is counted for each identity), `guard` and
`guarded_session` (where permissions and quotas are enforced).

No message, log line and `repr` in this package contains a token.
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
