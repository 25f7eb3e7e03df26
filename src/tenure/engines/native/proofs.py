"""Last proof of a session, and its renewals that are under way."""

from __future__ import annotations

__all__ = ["Proofs"]

_REMEMBERED = 32
"""Renewals whose times of sending are remembered: an answer that comes later proves nothing."""


class Proofs:
    """The renewals of one session. On its loop, but for `note`.

    Attributes:
        last: the time of the latest proof; ``None``: there was none.
        asked: when the latest renewal was sent.
    """

    def __init__(self, window: float) -> None:
        self.last: float | None = None
        self.asked = 0.0
        self._window = window
        self._sent: dict[int, float] = {}
        self._number = 0

    def fresh(self, now: float) -> bool:
        """True if there is a proof that leaves most of the window."""
        return self.last is not None and now - self.last <= self._window / 3

    def send(self, now: float) -> int:
        """A renewal is about to be sent; returns its number."""
        self.asked = now
        self._number += 1
        self._sent[self._number] = now
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return self._number

    def answered(self, number: int, age: float) -> float | None:
        """A renewal was answered; returns what time that proves."""
        sent = self._sent.pop(number, None)
        if sent is None or not age >= 0:
            return None
        return sent - age

    def note(self, at: float) -> None:
        """It is proven that the session lived at that time. From any thread."""
        if self.last is None or at > self.last:
            self.last = at
