"""Clocks.

An engine and everything above it read one `Clock`, so that a test can replace it
(`tenure.testing` has one that jumps). Waiting is left to asyncio; a virtual clock
brings an event loop that runs on its time.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two readings of time, both in seconds."""

    @property
    def virtual(self) -> bool:
        """True if this time is not the machine's, so that waiting in a thread makes no sense."""
        ...

    def now(self) -> float:
        """Time that never jumps and counts while the machine is suspended.

        Two processes of one host that run since the same boot read the same clock.
        """
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch. It may jump: only numbers and reports are made of it."""
        ...


class SystemClock:
    """The machine's clocks: the boot-time clock, and the wall clock."""

    virtual = False

    # Linux has CLOCK_BOOTTIME. macOS counts suspended time in what Python calls
    # CLOCK_MONOTONIC_RAW's sibling, mach_continuous_time, which `time` does not
    # offer; its CLOCK_MONOTONIC is the continuous one.
    _ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    # Every lease reads them several times, and so they are not wrapped in functions of Python's.
    now = staticmethod(partial(time.clock_gettime, _ID))
    wall = staticmethod(time.time)
