"""Clocks.

An engine and everything above it read one `Clock`, so that a test can replace it (`tenure.testing`
has a virtual one). Waiting is done by asyncio; a virtual clock provides an event loop that runs on
its time.
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
        """True if this is not the machine's time, so that waiting in a thread is useless."""
        ...

    def now(self) -> float:
        """Time that never jumps, and advances while the machine is suspended.

        All processes of one host read the same clock, until the next boot.
        """
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch. It may jump, so only order ids and reports use it."""
        ...


class SystemClock:
    """The machine's clocks: one that counts suspensions, and the wall clock.

    Attributes:
        name: the name of the first one on this system.
    """

    virtual = False

    # Linux has CLOCK_BOOTTIME. On macOS, CLOCK_MONOTONIC advances during a suspension, and
    # `time.monotonic` is another clock, which does not. On Windows, `time.monotonic` advances.
    name = next(
        (each for each in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC") if hasattr(time, each)),
        time.get_clock_info("monotonic").implementation,
    )

    # Every lease reads the clocks several times, so they are not wrapped in Python functions.
    now = staticmethod(
        partial(time.clock_gettime, getattr(time, name)) if hasattr(time, name) else time.monotonic
    )
    wall = staticmethod(time.time)
