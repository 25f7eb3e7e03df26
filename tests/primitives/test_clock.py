"""The machine's clock: never back, suspended time included; the wall clock for reports."""

from __future__ import annotations

import time

from tenure.clock import SystemClock


def test_it_reads_the_boot_time_clock() -> None:
    clock = SystemClock()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = clock.now()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert not clock.virtual


def test_the_wall_clock_is_the_epochs() -> None:
    assert abs(SystemClock().wall() - time.time()) < 60
