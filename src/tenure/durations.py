"""Durations given by programs: seconds, or a `timedelta`."""

from __future__ import annotations

import math
from datetime import timedelta

from tenure.errors import InvalidArgument

Duration = float | timedelta


def seconds(value: Duration, what: str) -> float:
    """Return a duration in seconds, zero or more; `what` names it in the error.

    Raises:
        InvalidArgument: it is negative, not finite, or not a number.
    """
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise InvalidArgument(f"{what} is seconds or a timedelta, not {value!r}")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"{what} is zero or more seconds, not {value!r}")
    return number


def timeout_seconds(value: Duration | None) -> float | None:
    """Return a timeout in seconds; ``None`` waits for ever."""
    if value is None:
        return None
    if isinstance(value, int | float) and value < 0:
        raise InvalidArgument(
            f"a timeout is zero or more seconds, not {value!r}; None, the default, waits for ever"
        )
    return seconds(value, "a timeout")
