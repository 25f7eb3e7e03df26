"""Quarantine of a store after a loss of data, as far as this program knows it."""

from __future__ import annotations

from tenure.clock import Clock
from tenure.errors import EngineError

__all__ = ["PostgresQuarantine"]


class PostgresQuarantine:
    """The rest of a quarantine, by the clock of this program."""

    def __init__(self, clock: Clock) -> None:
        """Start outside of one."""
        self._now = clock.now
        self._until = 0.0
        self._reason = ""

    def note(self, left: float, reason: str = "") -> None:
        """Note what the store says.

        Args:
            left: seconds; 0 outside a quarantine.
            reason: of the quarantine; empty: as before.
        """
        self._until = self._now() + left if left > 0 else 0.0
        self._reason = reason or self._reason

    def trouble(self, url: str) -> EngineError | None:
        """Return the reason why the store grants nothing, if it is this one."""
        left = self._until - self._now()
        if left <= 0:
            return None
        return EngineError(f"{url} grants nothing for {left:.1f} s more: {self._reason}")
