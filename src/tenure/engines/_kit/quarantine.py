"""Quarantine of a store after a loss of data, as far as this program knows it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from tenure.clock import Clock
from tenure.errors import EngineError

_log = logging.getLogger("tenure")

_LATE = 3.0
"""Seconds by which an answer may be late without counting as a longer wait."""


class Quarantine:
    """Time for which a store grants nothing, because its data may be lost.

    Args:
        url: the store's URL, for messages.
        clock: measures the rest.

    Attributes:
        url: the store's URL.
        reason: why there is one, or why the last one was.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self.url = url
        self.reason = ""
        self._now = clock.now
        self._wall = clock.wall
        self._until = float("-inf")
        self._warned_until = float("-inf")

    @property
    def left(self) -> float:
        """Seconds until it ends; negative if it has ended."""
        return self._until - self._now()

    def update(self, left: float, reason: str) -> None:
        """Record the store's report. One warning is logged, and another if it is prolonged.

        Args:
            left: seconds until it ends; 0 for none.
            reason: why there is one; empty for the reason known so far.
        """
        self._until = self._now() + left
        self.reason = reason or self.reason
        if left > 0 and self._until > self._warned_until + _LATE:
            self._warned_until = self._until
            _log.warning("quarantine: url=%s reason=%s", self.url, str(self))

    def prolong(self, left: float) -> None:
        """Record that it ends no sooner."""
        if left > self.left:
            self.update(left, "")

    def end(self) -> None:
        """Record that the store has rejected a request for another reason."""
        self._until = min(self._until, self._now())

    def trouble(self) -> EngineError | None:
        """Return the reason why nothing is granted now; ``None`` while requests are granted."""
        return EngineError(str(self)) if self.left > 0 else None

    @property
    def rest(self) -> str:
        """Rest of the quarantine, as a clause of a message."""
        left = max(self.left, 0.0)
        until = datetime.fromtimestamp(self._wall() + left, UTC).astimezone()
        return f"for another {left:.1f} s (until {until:%H:%M:%S})"

    def __str__(self) -> str:
        """Return a clause that says until when, and why, nothing is granted."""
        return f"{self.url} grants nothing {self.rest}: {self.reason}"
