"""Sessions that do nothing, at a server: 10,000 over 100 connections, on a store in memory.

The server is a process of its own, so that what it takes can be read from the kernel. Its clients
are ours, as programs have them but for the leases: each session is renewed as often as a program
renews it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from typing import Any

from benchmarks.measure import Measured
from benchmarks.servers import CLIENT, on_core, tenure_server
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine, EngineSession

CONNECTIONS = 100
SESSIONS = 100  # on each
WINDOW = 30.0
SECONDS = 20.0

MOST_MEMORY = 300.0  # megabytes
MOST_OF_A_CORE = 0.10


class _Silent:
    """A session that nobody listens to."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


async def _attach_all(url: str) -> tuple[list[Engine], list[EngineSession]]:
    engines, sessions = [], []
    for _ in range(CONNECTIONS):
        engine = connect_engine(url, SystemClock())
        await engine.open()
        engines.append(engine)
        how = Attach("/default", WINDOW)
        sessions += await asyncio.gather(*(engine.attach(how, _Silent()) for _ in range(SESSIONS)))
    return engines, sessions


async def _keep(sessions: list[EngineSession]) -> None:
    """Renew each session as often as a program does, evenly spread."""
    interval = 0.95 * WINDOW / 3
    random.shuffle(sessions)
    start, done = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - start) / interval * len(sessions))
        for number in range(done, due):
            sessions[number % len(sessions)].renew()
        done = max(done, due)
        await asyncio.sleep(0.01)


def _megabytes(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        (line,) = [line for line in file if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def _processor_time(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(pid: int, url: str) -> tuple[float, float, float]:
    """Megabytes with no session and with all of them, and the share of a core that they take."""
    empty = _megabytes(pid)
    engines, sessions = await _attach_all(url)
    keeping = asyncio.create_task(_keep(sessions))
    try:
        await asyncio.sleep(2.0)  # what attaching has left behind
        before, start = _processor_time(pid), time.monotonic()
        await asyncio.sleep(SECONDS)
        share = (_processor_time(pid) - before) / (time.monotonic() - start)
        full = _megabytes(pid)
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await asyncio.gather(*(engine.aclose() for engine in engines))
    return empty, full, share


def measure() -> list[Measured]:
    """Measure the server's memory and its use of the processor."""
    with tenure_server("memory://") as (server, url), on_core(CLIENT):
        empty, full, share = asyncio.run(_measure(server.pid, url))
    count = CONNECTIONS * SESSIONS
    notes: dict[str, object] = {
        "connections": CONNECTIONS,
        "window": WINDOW,
        "megabytes without sessions": empty,
    }
    return [
        Measured(
            f"{count:,} idle native sessions: the server's memory",
            full,
            "MB",
            "limit",
            MOST_MEMORY,
            full / MOST_MEMORY,
            at_most=1.0,
            notes=notes,
        ),
        Measured(
            f"{count:,} idle native sessions: share of a core",
            share,
            "cores",
            "limit",
            MOST_OF_A_CORE,
            share / MOST_OF_A_CORE,
            at_most=1.0,
            notes=notes,
        ),
    ]
