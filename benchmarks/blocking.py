"""The blocking API beside the asynchronous one, on one SQLite file: what the hops cost."""

from __future__ import annotations

import asyncio
import tempfile
import time

import tenure
from benchmarks.measure import Measured, in_turn
from tenure import blocking

SECONDS = 1.0


def _blocking(url: str) -> float:
    """Pairs a second of one thread."""
    done = 0
    with blocking.connect(url) as client, client.session() as session:
        mutex = session.mutex("key")
        start = time.perf_counter()
        while time.perf_counter() < start + SECONDS:
            with mutex.lock():
                done += 1
        return done / (time.perf_counter() - start)


async def _asynchronous(url: str) -> float:
    """Pairs a second of one task."""
    done = 0
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("key")
        start = time.perf_counter()
        while time.perf_counter() < start + SECONDS:
            async with mutex.lock():
                done += 1
        return done / (time.perf_counter() - start)


def measure() -> list[Measured]:
    """Uncontended pairs a second."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.db"
        ours, peer, ratio = in_turn(lambda: _blocking(url), lambda: asyncio.run(_asynchronous(url)))
    return [
        Measured(
            "sqlite, one thread, tenure.blocking",
            ours,
            "pairs/s",
            "tenure, one task",
            peer,
            ratio,
            at_least=0.5,
        )
    ]
