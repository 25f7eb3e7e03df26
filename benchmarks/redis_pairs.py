"""The Redis engine in one process, against redis-py's asyncio Lock on the same server.

Beside the rates: the processor time of the client for a pair, which a busy machine does not change,
how even 32 contenders are served, and what a session and a waiter cost in Redis.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis

import tenure
from benchmarks.measure import Measured, in_turn, percentile

SECONDS = 1.5
CONTENDERS = 32


@contextmanager
def a_server() -> Iterator[int]:
    """The port of a Redis without persistence."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise RuntimeError("no redis-server here: apt-get install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                for line in server.stdout:
                    if "ready to accept connections" in line.lower():
                        break
                yield port
            finally:
                server.kill()


@dataclass
class Pairs:
    """What tasks did for a while, each a pair of acquire and release after the other."""

    done: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0

    @property
    def rate(self) -> float:
        return sum(self.done) / self.seconds

    @property
    def microseconds(self) -> float:
        """Of processor time for a pair."""
        return self.processor / max(sum(self.done), 1) * 1e6


Pair = Callable[[int], Awaitable[float]]
"""Acquires and releases a key; returns when it was granted."""


async def work(tasks: int, pair: Pair, seconds: float) -> Pairs:
    """So many tasks, each with a number of its own."""
    pairs = Pairs([0] * tasks)
    began, processor = time.perf_counter(), _processor()
    end = began + seconds

    async def one(number: int) -> None:
        while (asked := time.perf_counter()) < end:
            pairs.waits.append(await pair(number) - asked)
            pairs.done[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(tasks):
            group.create_task(one(number))
    pairs.seconds = time.perf_counter() - began
    pairs.processor = _processor() - processor
    return pairs


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def ours(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    url = f"redis://localhost:{port}?fresh=true"
    async with tenure.connect(url) as client, client.session() as session:

        async def pair(number: int) -> float:
            async with session.mutex("key" if one_key else f"key-{number}").lock():
                return time.perf_counter()

        return await work(tasks, pair, SECONDS)


async def redis_py(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    async with Redis(port=port) as client:

        async def pair(number: int) -> float:
            name = "lock:key" if one_key else f"lock:key-{number}"
            async with client.lock(name, timeout=10):
                return time.perf_counter()

        return await work(tasks, pair, SECONDS)


async def bytes_of_each(port: int, number: int) -> tuple[float, float]:
    """What a session, and what a waiter takes of the server's memory."""
    url = f"redis://localhost:{port}?fresh=true&prefix=memory"
    async with Redis(port=port) as eye, tenure.connect(url) as client:

        async def used() -> int:
            return int((await eye.info("memory"))["used_memory"])

        before = await used()
        sessions = [await client.session() for _ in range(number)]
        with_sessions = await used()
        await sessions[0].semaphore("pool").create(limit=1)
        lease = await sessions[0].semaphore("pool").acquire()
        async with asyncio.TaskGroup() as group:
            waiting = [
                group.create_task(session.semaphore("pool").acquire()) for session in sessions
            ]
            while True:
                described = await sessions[0].semaphore("pool").describe(waiters=True)
                if len(described.waiters) == number:
                    break
                await asyncio.sleep(0.01)
            with_waiters = await used()
            for task in waiting:
                task.cancel()
        await lease.release()
    return (with_sessions - before) / number, (with_waiters - with_sessions) / number


def measure() -> list[Measured]:
    """Pairs a second, alone and contended, and bytes."""
    results = []
    with a_server() as port:
        for tasks, bound in ((1, 1.3), (64, 8.0)):
            costs: list[tuple[float, float]] = []

            def one(tasks: int = tasks, costs: list[tuple[float, float]] = costs) -> float:
                pairs = asyncio.run(ours(port, tasks))
                costs.append((pairs.microseconds, 0.0))
                return pairs.rate

            def other(tasks: int = tasks, costs: list[tuple[float, float]] = costs) -> float:
                pairs = asyncio.run(redis_py(port, tasks))
                costs[-1] = (costs[-1][0], pairs.microseconds)
                return pairs.rate

            rate, peer, ratio = in_turn(one, other)
            results.append(
                Measured(
                    f"redis, {tasks} task{'s on distinct keys' if tasks > 1 else ''}",
                    rate,
                    "pairs/s",
                    "redis-py's Lock",
                    peer,
                    ratio,
                    at_least=bound,
                    notes={"client microseconds a pair, ours and theirs": costs},
                )
            )
        results += _contended(port)
        session, waiter = asyncio.run(bytes_of_each(port, 2000))
        for what, value, limit in (("session", session, 1024.0), ("waiter", waiter, 1024.0)):
            results.append(
                Measured(
                    *(f"redis, memory of a {what}", value, "bytes", "limit", limit, value / limit),
                    at_most=1.0,
                )
            )
    return results


def _contended(port: int) -> list[Measured]:
    """32 tasks on one key: the rate, the shares, and the longest wait against the fair one."""
    runs: list[Pairs] = []

    def one() -> float:
        runs.append(asyncio.run(ours(port, CONTENDERS, one_key=True)))
        return runs[-1].rate

    rate, peer, ratio = in_turn(
        one, lambda: asyncio.run(redis_py(port, CONTENDERS, one_key=True)).rate, rounds=3
    )
    last = runs[-1]
    fair = CONTENDERS / last.rate
    return [
        Measured(
            *(f"redis, {CONTENDERS} tasks on one key", rate, "pairs/s"),
            *("redis-py's Lock", peer, ratio),
            at_least=2.0,
            notes={"least and most favoured": (min(last.done), max(last.done))},
        ),
        Measured(
            *("redis, the 99th of 100 waits", percentile(last.waits, 0.99) * 1e3, "ms"),
            *("fair share", fair * 1e3, percentile(last.waits, 0.99) / fair),
            at_most=2.0,
            notes={"longest, ms": max(last.waits) * 1e3},
        ),
    ]
