"""Time to answer in: what a program did not run itself is not counted against who is to answer.

On a busy machine an answer may have come long ago and not have been read. So the time is counted in
ticks, and one that the loop was late for is not counted, up to so many: then it is judged all the
same, since the lease does not wait either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["give_time"]

_TICKS = 4
"""In so many the time is divided."""

_EXCUSED = 4
"""So many ticks need not count."""

_LATE = 0.5
"""A tick is late by this much of itself."""


def give_time(seconds: float, settled: Callable[[], bool], spent: Callable[[], None]) -> None:
    """Call `spent` when the time is over, unless what it was given for is settled by then.

    Args:
        seconds: the time, as long as the loop keeps up.
        settled: whether nothing is waited for any more.
        spent: what to do otherwise.
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
