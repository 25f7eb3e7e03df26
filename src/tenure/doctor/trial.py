"""The trial: attaches sessions, and locks, releases and hands over a mutex, with timing.

Its mutex has a unique name, and disappears afterwards.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from statistics import median

from tenure._client.client import client_core, connect
from tenure.clock import SystemClock
from tenure.engines.contract import Finding
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT
from tenure.reaper.program import missing, settled

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
    if clock.name != "CLOCK_MONOTONIC" or sys.platform == "darwin":
        yield Finding("ok", "clock", f"{clock.name}, up for {clock.now():,.0f} s")
    else:
        yield Finding(
            "warning",
            "clock",
            "no CLOCK_BOOTTIME here; CLOCK_MONOTONIC is used",
            "if it stands still during a suspension, leases are considered held for too long "
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


TIMEOUT = 15.0
"""Timeout of the store's answers in seconds."""
ROUNDS = 20
SLOW = 0.25
"""Median seconds for one lock and release above which the trial warns."""


def try_out(url: str) -> Iterator[Finding]:
    """Use the store. Raises nothing; takes at most `TIMEOUT` and a few seconds."""
    findings: list[Finding] = []

    async def collect() -> None:
        async for finding in _trial(url):
            findings.append(finding)  # noqa: PERF401  kept when a later step fails

    try:
        asyncio.run(_in_time(collect()))
    except TimeoutError:
        findings.append(
            Finding(
                "failure",
                "trial",
                f"no answer within {TIMEOUT:g} s",
                "another program blocks all writes: see the writers above, or run this again"
                if url.partition(":")[0].lower() == "sqlite"
                else "the server does not answer, or the network drops its packets",
            )
        )
    except TenureError as error:
        findings.append(Finding.of_error("trial", error, f"{type(error).__name__}: "))
    except OSError as error:
        findings.append(Finding("failure", "trial", f"the system refused: {error}"))
    yield from findings


async def _in_time(work: Coroutine[None, None, None]) -> None:
    async with asyncio.timeout(TIMEOUT):
        await work


async def _trial(url: str) -> AsyncIterator[Finding]:
    name = f"tenure.doctor/{os.getpid()}-{time.time_ns()}"
    at = time.perf_counter()
    async with (
        connect(url) as client,
        client.session(description="tenure doctor") as one,
        client.session(description="tenure doctor") as other,
    ):
        yield Finding("ok", "sessions", f"two attached in {_shown(time.perf_counter() - at)}")
        if any(each.is_registered for each in client_core(client).sessions):
            yield await asyncio.to_thread(_reaper)
        alone = []
        for _ in range(ROUNDS):
            at = time.perf_counter()
            async with one.mutex(name).lock():
                pass
            alone.append(time.perf_counter() - at)
        yield _judged("lock", "locked and released in", alone)
        # As a mutex: an ephemeral semaphore, acquired whole.
        ways = [each.semaphore(name, ephemeral=True) for each in (one, other)]
        lease = await ways[0].acquire(EPHEMERAL_LIMIT)
        handed = []
        for turn in range(1, ROUNDS + 1):
            ticket = await ways[turn % 2].enqueue(EPHEMERAL_LIMIT)
            at = time.perf_counter()
            await lease.release()
            lease = await ticket.wait()
            handed.append(time.perf_counter() - at)
        await lease.release()
        yield _judged("hand-over", "from one session to the next in", handed)


def _reaper() -> Finding:
    if settled():
        return Finding("ok", "reaper", "ends the sessions of a dead program at once")
    why = missing() or "its process ended at once"
    return Finding(
        "warning",
        "reaper",
        f"none: {why}. The sessions of a dead program end with their recovery windows",
        "choose a short recovery window, or end programs in order (client.release_on_signals)",
    )


def _judged(what: str, doing: str, took: list[float]) -> Finding:
    middle, worst = median(took), max(took)
    found = f"{doing} {_shown(middle)} (median of {len(took)}, at worst {_shown(worst)})"
    if middle > SLOW:
        return Finding("warning", what, found, "a busy disk or machine, or many writers?")
    return Finding("ok", what, found)


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 0.001 else f"{seconds * 1e3:,.1f} ms"
