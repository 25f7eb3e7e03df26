"""Protection keys of sessions whose clients send none.

A session's id is listed, so it is not a credential. Therefore the store has no session without a
key: if the client has none, the listener stores its own key. Such keys are *reserved*: no listener
accepts one from a client. So they need not be secret, and are the same after a restart and on every
server of the store.

A store behind another tenure server has other clients, and that server rejects reserved keys. There
the keys are secret, and last as long as this process.
"""

from __future__ import annotations

import hashlib
import os

from tenure.core.rules import ATTACH_KEY_BYTES
from tenure.errors import AuthenticationFailed, InvalidArgument
from tenure.server.auth.identity import Identity

_RESERVED = b"\0tenure"
_REMOTE = ("tenure://", "tenures://")


class SessionKeys:
    """Keys of the sessions that one server attaches for clients without a key.

    Args:
        store: the URL of the server's store.
    """

    def __init__(self, store: str) -> None:
        self._secret = os.urandom(32) if store.startswith(_REMOTE) else b""

    def of_identity(self, identity: Identity) -> bytes:
        """Return the key of YDB's sessions without a key: clients of one identity share it."""
        return self._key(f"ydb {identity.owner}")

    def of_dflockd(self) -> bytes:
        """Return the key of sessions that dflockd's listeners attach and take over."""
        return self._key("dflockd")

    def _key(self, owner: str) -> bytes:
        data = owner.encode(errors="surrogatepass")
        if self._secret:
            return hashlib.blake2b(data, key=self._secret, digest_size=ATTACH_KEY_BYTES).digest()
        digest = hashlib.blake2b(data, digest_size=ATTACH_KEY_BYTES - len(_RESERVED)).digest()
        return _RESERVED + digest


def check_new_key(key: bytes, node: str) -> None:
    """Check the key that a client chooses for a new session.

    Raises:
        InvalidArgument: it is reserved.
    """
    if key.startswith(_RESERVED):
        raise InvalidArgument(
            f"the key of a session on {node} starts with bytes that are reserved for the server; "
            "generate another one",
            node=node,
        )


def check_shown_key(key: bytes, node: str, number: int) -> None:
    """Check a key that a client sends for an existing session.

    Raises:
        AuthenticationFailed: it is empty or reserved.
    """
    if not key or key.startswith(_RESERVED):
        raise AuthenticationFailed(
            f"session {number} on {node} has another key than this client", node=node
        )
