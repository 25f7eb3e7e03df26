"""The machine's clock: never back, suspended time included; the wall clock for reports."""

from __future__ import annotations

import subprocess
import sys
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


AS_ON_MACOS = """
import subprocess
import sys
import time
del time.CLOCK_BOOTTIME
time.monotonic = lambda: 0.0  # the clock that stands still during a suspension
from tenure.clock import SystemClock
before = time.clock_gettime(time.CLOCK_MONOTONIC)
assert before <= SystemClock.now() <= time.clock_gettime(time.CLOCK_MONOTONIC)
assert SystemClock.name == "CLOCK_MONOTONIC"
"""


def test_on_macos_it_reads_the_one_that_counts_suspensions() -> None:
    subprocess.run([sys.executable, "-c", AS_ON_MACOS], check=True)
