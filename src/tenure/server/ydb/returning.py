"""Admission of clients that reconnect for their sessions while the limit of connections is reached.

YDB's clients have no name before they attach a session, so a client is an identity at a source. It
is admitted while one of its sessions is detached here. It gets at most one connection for each of
its sessions, and a few more, because its former connections may be half open.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from tenure.server.admission import Source
from tenure.server.auth.identity import Identity

Client: TypeAlias = tuple[Identity, Source]

_HALF_OPEN = 3  # connections of a client that may be half open


class ReturningClients:
    """Sessions of each client of one listener, and its additionally admitted connections."""

    def __init__(self) -> None:
        self._sessions: Counter[Client] = Counter()
        self._detached: Counter[Client] = Counter()
        self._connections: Counter[Client] = Counter()

    def __len__(self) -> int:
        """Return the number of known clients."""
        return len(self._sessions.keys() | self._detached.keys() | self._connections.keys())

    def count_session(self, client: Client, more: int, *, detached: bool) -> None:
        """Count a session of a client, or with -1 uncount it."""
        _count(self._sessions, client, more)
        if detached:
            self.count_detached(client, more)

    def count_detached(self, client: Client, more: int) -> None:
        """Count a detached session of a client, or with -1 uncount it."""
        _count(self._detached, client, more)

    def let_in(self, client: Client) -> bool:
        """Count a connection of a returning client; false if it is another, or has enough."""
        most = self._sessions[client] + _HALF_OPEN
        if not self._detached[client] or self._connections[client] >= most:
            return False
        _count(self._connections, client, 1)
        return True

    def lost(self, client: Client) -> None:
        """Uncount a connection."""
        _count(self._connections, client, -1)


def _count(counter: Counter[Client], client: Client, more: int) -> None:
    counter[client] += more
    if not counter[client]:
        del counter[client]
