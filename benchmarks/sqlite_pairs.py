"""The SQLite engine in one process, against filelock: one task, and 64 on distinct keys."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock

import tenure
from benchmarks.measure import Measured, in_turn

SECONDS = 1.0


def _filelock(folder: str, threads: int) -> float:
    """Pairs a second of as many threads, each with a lock file of its own."""
    stop = threading.Event()

    def work(number: int) -> int:
        lock = filelock.FileLock(Path(folder) / f"{number}.lock")
        done = 0
        while not stop.is_set():
            with lock:
                done += 1
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, number) for number in range(threads)]
        stop.wait(SECONDS)
        stop.set()
        done = sum(future.result() for future in futures)
    return done / (time.perf_counter() - start)


async def _tenure(folder: str, tasks: int) -> float:
    done = 0
    url = f"sqlite:///{folder}/bench.db"
    async with tenure.connect(url) as client, client.session() as session:
        end = time.perf_counter() + SECONDS

        async def work(number: int) -> None:
            nonlocal done
            mutex = session.mutex(f"key-{number}")
            while time.perf_counter() < end:
                async with mutex.lock():
                    done += 1

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(work(number))
        return done / (time.perf_counter() - start)


def measure() -> list[Measured]:
    """Uncontended pairs a second."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for tasks, bound in ((1, 0.7), (64, 3.0)):
            ours, peer, ratio = in_turn(
                lambda tasks=tasks: asyncio.run(_tenure(folder, tasks)),  # type: ignore[misc]
                lambda tasks=tasks: _filelock(folder, tasks),  # type: ignore[misc]
            )
            results.append(
                Measured(
                    f"sqlite, {tasks} task{'s on distinct keys' if tasks > 1 else ''}",
                    ours,
                    "pairs/s",
                    "filelock",
                    peer,
                    ratio,
                    at_least=bound,
                )
            )
    return results
