"""Check of the grants of a rate: proves from a history that no window exceeds the limit."""

from __future__ import annotations

from collections.abc import Iterable


def most_in_window(grants: Iterable[tuple[int, int]], window: int) -> int:
    """Return the greatest number of tokens in any window of that length.

    Args:
        grants: time and count of each grant, in any order.
        window: the length, in the unit of the times. A window contains one of its two ends.
    """
    ordered = sorted(grants)
    most = inside = first = 0
    for time, count in ordered:
        inside += count
        while ordered[first][0] <= time - window:
            inside -= ordered[first][1]
            first += 1
        most = max(most, inside)
    return most
