"""Time limit for an answer that does not count the time in which the event loop was late.

On a busy machine an answer may have arrived long ago and not have been read. So the time is counted
in ticks. A tick for which the loop was late is not counted, up to `_EXCUSED` of them: more are
counted, since the lease does not wait either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["give_time"]

_TICKS = 4
"""Number of ticks into which the time is divided."""

_EXCUSED = 4
"""Number of late ticks that are not counted, at the most."""

_LATE = 0.5
"""Fraction of a tick; a tick that comes later than by this much is late."""


def give_time(seconds: float, settled: Callable[[], bool], spent: Callable[[], None]) -> None:
    """Call `spent` when the time is over, unless the answer has come by then.

    Args:
        seconds: the time, as long as the loop keeps up.
        settled: returns true if no answer is expected any more.
        spent: called otherwise.
    """
    loop, tick = asyncio.get_running_loop(), seconds / _TICKS

    def wait(counted: int, excused: int) -> None:
        loop.call_at(due := loop.time() + tick, look, due, counted, excused)

    def look(due: float, counted: int, excused: int) -> None:
        if settled():
            return
        if loop.time() - due > _LATE * tick and excused < _EXCUSED:
            wait(counted, excused + 1)
        elif counted + 1 < _TICKS:
            wait(counted + 1, excused)
        else:
            spent()

    wait(0, 0)
