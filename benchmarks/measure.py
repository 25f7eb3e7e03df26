"""Taking two figures side by side, and what a finished measurement looks like."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        what: what was measured.
        value: the figure itself.
        unit: its unit.
        peer: what it is compared with, or "".
        peer_value: the peer's figure in the same run.
        ratio: value / peer_value (for a limit on the value itself: value / limit).
        at_least, at_most: the bound on the ratio that the project sets itself.
        notes: figures beside it, for the JSON file.
    """

    what: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    at_least: float | None = None
    at_most: float | None = None
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the ratio is within its bound."""
        return not (
            (self.at_least is not None and self.ratio < self.at_least)
            or (self.at_most is not None and self.ratio > self.at_most)
        )


def rate(work: Callable[[], int], seconds: float) -> float:
    """How many units of work a second; `work` does some and returns how many."""
    start = time.perf_counter()
    done = 0
    while (elapsed := time.perf_counter() - start) < seconds:
        done += work()
    return done / elapsed


def in_turn(
    one: Callable[[], float], other: Callable[[], float], rounds: int = 5
) -> tuple[float, float, float]:
    """Measure both in turn, some rounds; the medians of each, and of the ratios one / other."""
    pairs = [(one(), other()) for _ in range(rounds)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
