"""The trial: attaches sessions, and locks, releases and hands over a mutex, with timing.

Its mutex has a unique name, and disappears afterwards.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from statistics import median

from tenure._client.client import connect
from tenure._client.internals import client_core
from tenure.engines.contract import Finding
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT
from tenure.reaper.program import missing, settled

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
