"""When something is tried again: a policy gives the seconds to wait before each further attempt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeAlias

from tenure.durations import Duration, seconds
from tenure.errors import InvalidArgument

__all__ = ["Retry", "recurs", "spaced"]

Retry: TypeAlias = Callable[[], Iterable[float]]
"""Called for each operation: the seconds to wait before the second attempt, the third, and so on;
at the end of them, it is given up."""


def spaced(interval: Duration) -> Retry:
    """Again and again, so many seconds apart."""
    pause = seconds(interval, "an interval")
    return lambda: itertools.repeat(pause)


def recurs(times: int) -> Retry:
    """So many further attempts, at once."""
    if not isinstance(times, int) or isinstance(times, bool) or times < 0:
        raise InvalidArgument(f"a number of attempts is a whole one from 0 on, not {times!r}")
    return lambda: itertools.repeat(0.0, times)
