"""Durations as programs give them: seconds, or a `timedelta`."""

from __future__ import annotations

import math
from datetime import timedelta

from tenure.errors import InvalidArgument

__all__ = ["Duration", "seconds", "timeout_seconds"]

Duration = float | timedelta


def seconds(value: Duration, what: str) -> float:
    """A duration in seconds, zero or more; `what` names it in the error.

    Raises:
        InvalidArgument: it is negative, not finite, or not a number.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgument(f"{what} is seconds or a timedelta, not {value!r}")
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"{what} is zero or more seconds, not {value!r}")
    return float(value)


def timeout_seconds(value: Duration | None) -> float | None:
    """A timeout in seconds; ``None`` waits for ever."""
    return None if value is None else seconds(value, "a timeout")
