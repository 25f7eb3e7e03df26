"""The quarantine of a namespace, as one engine knows it: until when nothing is granted, and why."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tenure.clock import Clock
from tenure.errors import EngineError

if TYPE_CHECKING:
    from tenure.engines.redis.url import RedisUrl

__all__ = ["REASONS", "Quarantine"]

_log = logging.getLogger("tenure")

REASONS = {
    "fresh": "",
    "new": "its programs may still have to reconnect",
    "lost": "its data was lost, and former holders may still consider their leases held",
    "restarted": "its server started less than the longest recovery window ago, perhaps without "
    "its data",
    "promoted": "its server was a replica, which may lack the data of its master",
    "sentinel": "a server behind sentinels may lack the data of a former master",
    "flushed": "its server has forgotten its scripts, and with them whether the data was lost",
    "reset": "the statistics of its server were reset, and with them whether the data was lost",
    "unknown": "its server does not report whether the data was lost (INFO is denied or "
    "incomplete)",
    "clock": "the clock of its server differs from the clock of this client, so how long the "
    "server has been up is unknown",
    "moved": "its data was moved to another database, and former holders may still consider "
    "their leases held",
}
"""Why nothing is granted, by the code that the namespace keeps."""

_CERTAIN = frozenset({"lost", "moved"})
"""Reasons by which the data is known to be lost."""

_LATE = 3.0
"""Seconds by which an answer may be late without the wait seeming to be prolonged."""


class Quarantine:
    """The time for which nothing is granted in a namespace, because its data may be lost."""

    def __init__(self, address: RedisUrl, clock: Clock) -> None:
        self._address = address
        self._now = clock.now
        self._wall = clock.wall
        self._until = float("-inf")
        self._reason = ""
        self._warned_until = float("-inf")
        self._may_be_new = False

    @property
    def left(self) -> float:
        """Seconds until it ends; negative if it has ended."""
        return self._until - self._now()

    def update(self, left: float, reason: str, *, may_be_new: bool | None = None) -> None:
        """Note what the server says. One warning is logged, and one more if it is prolonged.

        Args:
            left: seconds until it ends; 0 for none.
            reason: a key of `REASONS`.
            may_be_new: ``?fresh=true`` would end it; ``None`` if the server did not say.
        """
        self._until = self._now() + left
        self._reason = reason
        if may_be_new is not None:
            self._may_be_new = may_be_new
        if reason in _CERTAIN:
            self._may_be_new = False
        if left > 0 and self._until > self._warned_until + _LATE:
            self._warned_until = self._until
            _log.warning("%s: %s.", self._address.url, self)

    def prolong(self, left: float) -> None:
        """Note that it ends no sooner."""
        if left > self.left:
            self.update(left, self._reason or "lost")

    def trouble(self) -> EngineError | None:
        """The reason why nothing is granted now; ``None`` while requests are granted."""
        return EngineError(str(self)) if self.left > 0 else None

    def __str__(self) -> str:
        left = max(self.left, 0.0)
        until = datetime.fromtimestamp(self._wall() + left, UTC).astimezone()
        why = REASONS.get(self._reason, REASONS["lost"])
        new = ""
        if self._may_be_new and self._reason != "new":
            new = "; if no program has ever used it, ?fresh=true ends the wait"
        namespace = self._address.prefix[1:-2]  # without braces and colon
        return (
            f"nothing is granted in namespace {namespace!r} for another {left:.1f} s "
            f"(until {until:%H:%M:%S}): {why}{new}"
        )
