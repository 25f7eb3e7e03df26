"""Findings of `tenure doctor` that are common to networked stores."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tenure.engines.contract import Finding

ROUNDS = 20
"""Round trips to measure."""
SLOW = 0.05
"""Seconds of a round trip above which a warning is given."""
FAR = 1.0
"""Seconds between two clocks above which a warning is given."""


def clock(ahead: float) -> Finding:
    """Compare the server's clock with this machine's.

    Args:
        ahead: seconds by which the server's clock is ahead.
    """
    if abs(ahead) < FAR:
        return Finding("ok", "clock", f"within {abs(ahead) * 1e3:,.0f} ms of this machine's")
    return Finding(
        "warning",
        "clock",
        f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
        "leases do not depend on it, but correct it slowly (NTP): a step forward of the server's "
        "clock ends every session",
    )


def round_trip(took: Sequence[float]) -> Finding:
    """Judge the durations of some round trips, in seconds."""
    middle = median(took)
    found = f"{middle * 1e3:.2f} ms (median of {len(took)}, at worst {max(took) * 1e3:.2f} ms)"
    if middle > SLOW:
        remedy = "find out whether the server is far or busy: each operation takes one round trip"
        return Finding("warning", "round trip", found, remedy)
    return Finding("ok", "round trip", found)


def quarantine(left: float, why: str, remedy: str = "wait") -> Finding:
    """Report the rest of a quarantine.

    Args:
        left: seconds; 0 or less if there is none.
        why: the reason.
        remedy: what to do.
    """
    if left <= 0:
        return Finding("ok", "quarantine", "none")
    found = f"nothing is granted for another {left:,.0f} s: {why}"
    return Finding("failure", "quarantine", found, remedy)
