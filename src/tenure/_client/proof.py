"""Times until which a session is proven to live in its store, and of its next renewal.

Deadline = proof + window - margin, where the proof counts from when the answered renewal was
*sent*, and margin = max(5% of the window, 100 ms, the longest stop time of a held lease).

Only the session's event loop changes the margin; proofs may be recorded from any thread.
"""

from __future__ import annotations


class Proof:
    """Proof of one session's life, from its renewals.

    Attributes:
        at: when the latest answered renewal was sent.
        sent: when the latest renewal was sent.
        span: seconds from a proof to the deadline that it gives.
    """

    __slots__ = ("_least_margin", "_stop_times", "_window", "at", "sent", "span")

    def __init__(self, window: float) -> None:
        self.at = 0.0
        self.sent = 0.0
        self._window = window
        self._least_margin = max(0.05 * window, 0.1)
        self._stop_times: dict[int, float] = {}
        self.span = window - self._least_margin

    @property
    def deadline(self) -> float:
        """Time until which the session is proven."""
        return self.at + self.span

    @property
    def interval(self) -> float:
        """Longest time between renewals, in seconds."""
        return self.span / 3

    @property
    def renew_at(self) -> float:
        """Time of the next renewal. An unanswered renewal gets some time before it is repeated."""
        return max(self.at + self.span / 3, self.sent + self.span / 12)

    def add_stop_time(self, request_id: int, stop_time: float) -> None:
        """Move the deadline forward by the time that a lease's work needs to stop."""
        self._stop_times[request_id] = stop_time
        self._measure()

    def drop_stop_time(self, request_id: int) -> None:
        """Remove the stop time of a lease that has ended. Safe for a lease that never had any."""
        if self._stop_times.pop(request_id, None) is not None:
            self._measure()

    def _measure(self) -> None:
        self.span = self._window - max([self._least_margin, *self._stop_times.values()])
