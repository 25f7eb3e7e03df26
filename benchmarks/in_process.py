"""The memory engine and the bare core, against asyncio's own lock; and the import."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time

import tenure
from benchmarks.measure import Measured, in_turn

PAIRS = 20_000


async def _asyncio_lock() -> float:
    lock = asyncio.Lock()
    start = time.perf_counter()
    for _ in range(10 * PAIRS):
        async with lock:
            pass
    return 10 * PAIRS / (time.perf_counter() - start)


async def _public_api() -> float:
    async with tenure.connect("memory://") as client, client.session() as session:
        mutex = session.mutex("bench")
        start = time.perf_counter()
        for _ in range(PAIRS):
            async with mutex.lock():
                pass
        return PAIRS / (time.perf_counter() - start)


def _import_seconds(module: str, bytecode: str) -> float:
    """CPU time of a process that imports a module, compiled as an installed package is."""
    environment = dict(os.environ, PYTHONPYCACHEPREFIX=bytecode)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def import_cost() -> float:
    """Seconds that ``import tenure`` takes over ``import asyncio``.

    The least of many runs of each: whatever disturbs one makes it longer.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        pairs = [
            (_import_seconds("tenure", bytecode), _import_seconds("asyncio", bytecode))
            for _ in range(21)
        ]
    ours, peers = zip(*pairs[1:], strict=True)  # the first pair compiles
    best: float = min(ours) - min(peers)
    return best


def measure() -> list[Measured]:
    """Pairs a second with one task, and what an import costs."""
    from benchmarks.bare_core import pairs_per_second

    api, lock, api_ratio = in_turn(
        lambda: asyncio.run(_public_api()), lambda: asyncio.run(_asyncio_lock())
    )
    core, core_lock, core_ratio = in_turn(pairs_per_second, lambda: asyncio.run(_asyncio_lock()))
    extra = import_cost()
    return [
        Measured(
            "memory engine, public API, 1 task",
            api,
            "pairs/s",
            "asyncio.Lock",
            lock,
            api_ratio,
            at_least=1 / 40,
        ),
        Measured(
            "bare core, acquire and release",
            core,
            "pairs/s",
            "asyncio.Lock",
            core_lock,
            core_ratio,
            at_least=1 / 14,
        ),
        Measured(
            "import tenure, over import asyncio",
            extra * 1000,
            "ms",
            "40 ms",
            40,
            extra * 1000 / 40,
            at_most=1.0,
        ),
    ]
