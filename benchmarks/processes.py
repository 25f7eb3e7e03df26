"""Several processes on one SQLite file: fairness on one key, hand-off, and takeover.

The workers are this module itself, run with ``python -m benchmarks.processes ROLE ...``; each
prints its figures as one line of JSON. All times are the boot-time clock's, which every process
of a host reads alike.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, cast

import filelock

import tenure
from benchmarks.measure import Measured, percentile

CONTENDERS = 8
SECONDS = 4.0
HANDOFFS = 200
TAKEOVERS = 15


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Workers


async def _contend(url: str, start: float, end: float) -> dict[str, Any]:
    grants, longest = 0, 0.0
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("contended")
        async with session.mutex(f"warm-{random.random()}").lock():
            print("ready", flush=True)
        await asyncio.sleep(start - _now())
        while (asked := _now()) < end:
            async with mutex.lock():
                longest = max(longest, _now() - asked)
                grants += 1
    return {"grants": grants, "longest": longest}


def _contend_filelock(path: str, start: float, end: float) -> dict[str, Any]:
    grants, longest = 0, 0.0
    lock = filelock.FileLock(path)
    print("ready", flush=True)
    time.sleep(max(0.0, start - _now()))
    while (asked := _now()) < end:
        try:
            with lock.acquire(timeout=end - asked + 0.001):
                longest = max(longest, _now() - asked)
                grants += 1
        except filelock.Timeout:
            longest = max(longest, _now() - asked)
    return {"grants": grants, "longest": longest}


async def _play(url: str, rounds: int) -> dict[str, Any]:
    """Take turns with another player at a mutex; return the times of grants and releases."""
    released, granted = [], []
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("ball")
        print("ready", flush=True)
        for left in reversed(range(rounds)):
            async with mutex.lock():
                granted.append(_now())
                if left:  # in the last round the other one may have gone
                    await _somebody_waits(mutex)
                released.append(_now())
    return {"released": released, "granted": granted}


async def _somebody_waits(mutex: tenure.Mutex) -> None:
    while True:
        holder = await mutex.inspect()
        if holder is not None and holder.waiting:
            return
        await asyncio.sleep(0.001)


async def _hold(url: str) -> None:
    async with tenure.connect(url) as client, client.mutex("held").lock():
        print("ready", flush=True)
        await asyncio.Event().wait()


# The measurements


@contextmanager
def _worker(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.processes", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        cast("IO[str]", process.stdout).close()


def _line(process: subprocess.Popen[str]) -> str:
    line = cast("IO[str]", process.stdout).readline().strip()
    if not line:
        raise RuntimeError(f"a worker ended early: {process.args!r}")
    return line


def _contention(role: str, where: str) -> list[dict[str, Any]]:
    start = _now() + 1.5
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(role, where, start, start + SECONDS))
            for _ in range(CONTENDERS)
        ]
        for worker in workers:
            assert _line(worker) == "ready"
        return [cast("dict[str, Any]", json.loads(_line(worker))) for worker in workers]


def fairness(folder: str) -> list[Measured]:
    """One key, 8 processes: who was granted how often, and the longest wait of all."""
    ours = _contention("contend", f"sqlite:///{folder}/fair.db")
    peer = _contention("contend-filelock", f"{folder}/fair.lock")

    def spread(results: list[dict[str, Any]]) -> float:
        grants = [result["grants"] for result in results]
        mean = sum(grants) / len(grants)
        return float(max(abs(each - mean) for each in grants) / mean)

    def waited(results: list[dict[str, Any]]) -> tuple[float, float]:
        total = sum(result["grants"] for result in results)
        return max(result["longest"] for result in results), CONTENDERS * SECONDS / total

    (longest, share), (peer_longest, peer_share) = waited(ours), waited(peer)
    grants = [result["grants"] for result in ours]
    peer_grants = [result["grants"] for result in peer]
    return [
        Measured(
            "one key, 8 processes: farthest from an equal share",
            spread(ours) * 100,
            "%",
            "filelock",
            spread(peer) * 100,
            spread(ours) / 0.10,
            at_most=1.0,
            notes={"grants": grants, "filelock": peer_grants, "bound": "10%"},
        ),
        Measured(
            "one key, 8 processes: longest wait, in fair shares",
            longest / share,
            "x",
            "filelock",
            peer_longest / peer_share,
            longest / share / 3,
            at_most=1.0,
            notes={
                "longest_ms": longest * 1000,
                "fair_share_ms": share * 1000,
                "pairs_per_second": sum(grants) / SECONDS,
                "filelock_longest_ms": peer_longest * 1000,
                "filelock_pairs_per_second": sum(peer_grants) / SECONDS,
                "bound": "3 fair shares",
            },
        ),
    ]


def handoff(folder: str) -> Measured:
    """From a release in one process to the grant in another that waits."""
    url = f"sqlite:///{folder}/ball.db"
    with _worker("play", url, HANDOFFS) as one, _worker("play", url, HANDOFFS) as other:
        for worker in (one, other):
            assert _line(worker) == "ready"
        results = [json.loads(_line(worker)) for worker in (one, other)]
    times = []
    for mine, theirs in (results, results[::-1]):
        for released in mine["released"]:
            later = [granted for granted in theirs["granted"] if granted > released]
            if later:
                times.append(min(later) - released)
    p50 = percentile(times, 0.5) * 1000
    return Measured(
        "hand-off between two processes, p50",
        p50,
        "ms",
        "3 ms",
        3.0,
        p50 / 3,
        at_most=1.0,
        notes={"p99_ms": percentile(times, 0.99) * 1000, "hand-offs": len(times)},
    )


async def _granted_at(mutex: tenure.Mutex) -> float:
    async with mutex.lock(timeout=60):
        return _now()


async def _takeovers(url: str) -> list[float]:
    times = []
    async with tenure.connect(url) as client, client.session() as session:
        for _ in range(TAKEOVERS):
            with _worker("hold", url) as holder:
                assert await asyncio.to_thread(_line, holder) == "ready"
                waiting = asyncio.create_task(_granted_at(session.mutex("held")))
                await _somebody_waits(session.mutex("held"))
                killed = _now()
                holder.send_signal(signal.SIGKILL)
                times.append(await waiting - killed)
    return times


def takeover(folder: str) -> Measured:
    """From ``kill -9`` of a holder to the grant of who waits."""
    times = asyncio.run(_takeovers(f"sqlite:///{folder}/takeover.db"))
    worst = max(times) * 1000
    return Measured(
        "takeover after kill -9, worst",
        worst,
        "ms",
        "200 ms",
        200.0,
        worst / 200,
        at_most=1.0,
        notes={"p50_ms": percentile(times, 0.5) * 1000, "takeovers": len(times)},
    )


def measure() -> list[Measured]:
    """Everything that takes several processes."""
    with tempfile.TemporaryDirectory() as folder:
        return [*fairness(folder), handoff(folder), takeover(folder)]


def main() -> None:
    """Play one role, and print what it measured as JSON."""
    role, where, *numbers = sys.argv[1:]
    if role == "contend":
        result = asyncio.run(_contend(where, *map(float, numbers)))
    elif role == "contend-filelock":
        result = _contend_filelock(where, *map(float, numbers))
    elif role == "play":
        result = asyncio.run(_play(where, int(numbers[0])))
    else:
        asyncio.run(_hold(where))
        return
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        for measured in measure():
            print(json.dumps({**measured.__dict__, "met": measured.met}))
