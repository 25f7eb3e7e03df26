"""Renewals of one session, and the latest proof from its store.

The answer to a renewal waits for the store's proof while it is useful: for a third of the window.
Its age is that at the arrival of the renewal: 0 if the server sent its own renewal later.
"""

from __future__ import annotations

from collections import deque

from tenure.clock import Clock
from tenure.engines.contract import EngineSession
from tenure.server.sessions.connection import HolderConnection
from tenure.wire.messages import Proven, Unproven

NEVER = float("-inf")

_MOST = 16  # maximum unanswered renewals of one session; older ones get no proof


class Renewals:
    """Renewals that wait for an answer, as `(connection, channel, number, arrival time)`.

    Args:
        unproven: contains this object while renewals wait.

    Attributes:
        proof: the latest time at which the store's session is proven to have lived.
    """

    __slots__ = ("_now", "_unproven", "_waiting", "_worth", "proof")

    def __init__(self, clock: Clock, window: float, unproven: set[Renewals]) -> None:
        self.proof = NEVER
        self._now = clock.now
        self._worth = window / 3
        self._unproven = unproven
        self._waiting: deque[tuple[HolderConnection, int, int, float]] = deque()

    def age(self, requested_at: float) -> float | None:
        """Return the age of the server's own proof at the renewal; ``None`` if it is too old."""
        if self._now() - self.proof > self._worth:
            return None
        return max(0.0, requested_at - self.proof)

    def renew(
        self, store: EngineSession, connection: HolderConnection, channel: int, number: int
    ) -> None:
        """Renew the session, and answer on that connection with the proof."""
        requested_at = self._now()
        store.renew()
        if self.proof >= requested_at:
            connection.send(Proven(channel, number, 0.0))
            return
        if len(self._waiting) >= _MOST:
            self._drop_first()
        self._waiting.append((connection, channel, number, requested_at))
        self._unproven.add(self)

    def prove(self, at: float) -> None:
        """Record a proof that the store's session lived at that time; answer waiting renewals."""
        self.proof = max(self.proof, at)
        if self._waiting and self.age(self.proof) is not None:
            for connection, channel, number, requested_at in self._waiting:
                connection.send(Proven(channel, number, max(0.0, requested_at - self.proof)))
            self.forget()

    def drop_old(self, now: float) -> None:
        """Answer renewals that have waited too long with `Unproven`."""
        while self._waiting and now - self._waiting[0][3] > self._worth:
            self._drop_first()
        if not self._waiting:
            self._unproven.discard(self)

    def drop_all(self) -> None:
        """Answer all renewals with `Unproven`: the session has ended."""
        while self._waiting:
            self._drop_first()
        self._unproven.discard(self)

    def forget(self) -> None:
        """Drop the waiting renewals, without answering them."""
        self._waiting.clear()
        self._unproven.discard(self)

    def _drop_first(self) -> None:
        connection, channel, number, _ = self._waiting.popleft()
        connection.send(Unproven(channel, number))
