"""Pauses between attempts."""

from __future__ import annotations

import random

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


def backoff(failures: int, longest: float = LONGEST_PAUSE) -> float:
    """Return the seconds before the next attempt.

    Pauses double up to a limit, with jitter, so that programs that lost the same server do not
    reconnect at the same time.

    Args:
        failures: number of consecutive failed attempts before the last one.
        longest: the limit in seconds; at least the first pause.
    """
    pause = FIRST_PAUSE * 2.0 ** min(failures, 16)
    return min(pause, max(longest, FIRST_PAUSE)) * random.uniform(0.5, 1.0)
