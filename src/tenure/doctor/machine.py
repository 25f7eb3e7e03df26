"""Checks of the machine: versions, clocks, limits of the process."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator

from tenure.clock import SystemClock
from tenure.engines.contract import Finding

EARLIEST = 1_735_689_600
"""Start of 2025 in Unix time; an earlier wall clock is wrong."""
FEW_FILES = 256
FEW_PROCESSES = 64


def look_at_machine() -> Iterator[Finding]:
    """Examine the machine, and this process on it."""
    yield _versions()
    yield from _clocks()
    yield from _limits()
    yield _deaths()
    yield _umask()


def _versions() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("tenure")
    except PackageNotFoundError:
        own = "not installed"
    return Finding(
        "ok",
        "versions",
        f"tenure {own}, Python {platform.python_version()} ({platform.python_implementation()}), "
        f"{platform.system()} {platform.release()}",
    )


def _clocks() -> Iterator[Finding]:
    clock = SystemClock()
    if hasattr(time, "CLOCK_BOOTTIME"):
        yield Finding("ok", "clock", f"CLOCK_BOOTTIME, up for {clock.now():,.0f} s")
    else:
        yield Finding(
            "ok" if sys.platform == "darwin" else "warning",
            "clock",
            "no CLOCK_BOOTTIME here; CLOCK_MONOTONIC is used",
            ""
            if sys.platform == "darwin"
            else "if it stands still during a suspension, leases are considered held for too long "
            "after one: do not suspend this machine",
        )
    wall = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock.wall()))
    if clock.wall() < EARLIEST:
        remedy = (
            "set it (NTP); fencing tokens of a new store start from it, leases are not affected"
        )
        yield Finding("warning", "wall clock", f"{wall} cannot be right", remedy)
    else:
        yield Finding("ok", "wall clock", wall)


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    for what, limit, few, remedy in (
        ("open files", resource.RLIMIT_NOFILE, FEW_FILES, "raise the limit (ulimit -n)"),
        ("processes", resource.RLIMIT_NPROC, FEW_PROCESSES, "raise the limit (ulimit -u)"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft == resource.RLIM_INFINITY:
            yield Finding("ok", what, "no limit")
        elif soft < few:
            yield Finding("warning", what, f"at most {soft}", remedy)
        else:
            yield Finding("ok", what, f"at most {soft:,}")


def _deaths() -> Finding:
    """Check whether the kernel can report the end of a process (pidfd)."""
    remedy = "deaths are noticed by polling, some tenths of a second later"
    if not hasattr(os, "pidfd_open"):
        return Finding("warning", "pidfd", "this Python or system has none", remedy)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding("warning", "pidfd", f"refused: {error.strerror}", remedy)
    return Finding("ok", "pidfd", "works: deaths are noticed at once")


def _umask() -> Finding:
    mask = os.umask(0o077)
    os.umask(mask)
    return Finding("ok", "umask", f"{mask:04o}; a store's permissions do not depend on it")
