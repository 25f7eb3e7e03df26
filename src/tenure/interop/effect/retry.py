"""Retry policies: the pauses in seconds between attempts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeAlias

from tenure.durations import Duration, seconds
from tenure.errors import InvalidArgument

__all__ = ["Retry", "recurs", "spaced"]

Retry: TypeAlias = Callable[[], Iterable[float]]
"""Called for each operation; yields the pauses before the second attempt, the third, and so on. At
its end the operation has failed."""


def spaced(interval: Duration) -> Retry:
    """Return a policy that retries for ever, at an interval in seconds."""
    pause = seconds(interval, "an interval")
    return lambda: itertools.repeat(pause)


def recurs(times: int) -> Retry:
    """Return a policy of that many further attempts, without pauses."""
    if not isinstance(times, int) or isinstance(times, bool) or times < 0:
        raise InvalidArgument(f"a number of attempts is a whole one from 0 on, not {times!r}")
    return lambda: itertools.repeat(0.0, times)
