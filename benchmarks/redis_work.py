"""Tasks that acquire and release, and what that costs at both ends."""

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

import redis

import tenure

SECONDS = 1.5


@dataclass
class Pairs:
    """What tasks did for a while, each a pair of acquire and release after the other.

    Attributes:
        client, server: seconds of processor time, which a busy machine changes less than the rate.
    """

    done: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0
    client: float = 0.0
    server: float = 0.0

    @property
    def rate(self) -> float:
        """Pairs per second."""
        return sum(self.done) / self.seconds

    @property
    def microseconds(self) -> tuple[float, float]:
        """Of processor time for a pair: the client's, and Redis's."""
        count = max(sum(self.done), 1) / 1e6
        return self.client / count, self.server / count


Pair = Callable[[int], Awaitable[float]]
"""Acquires and releases a key; returns when it was granted."""


@contextmanager
def spent(port: int, pairs: Pairs) -> Iterator[None]:
    """Note the time, and the processor time, that a block takes."""
    with redis.Redis(port=port) as eye:

        def server() -> float:
            cpu = eye.info("cpu")
            return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

        began, client, served = time.perf_counter(), _processor(), server()
        yield
        pairs.client = _processor() - client
        pairs.seconds = time.perf_counter() - began
        pairs.server = server() - served


async def work(port: int, tasks: int, pair: Pair, seconds: float = SECONDS) -> Pairs:
    """So many tasks, each with a number of its own."""
    pairs = Pairs([0] * tasks)

    async def one(number: int) -> None:
        while (asked := time.perf_counter()) < end:
            pairs.waits.append(await pair(number) - asked)
            pairs.done[number] += 1

    with spent(port, pairs):
        end = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(one(number))
    return pairs


@contextmanager
def a_server() -> Iterator[int]:
    """Yield the port of a Redis without persistence."""
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


async def ours(
    port: int,
    tasks: int,
    *,
    one_key: bool = False,
    parameters: str = "fresh=true",
    instrument: Callable[[tenure.Client], object] | None = None,
) -> Pairs:
    """Measure pairs through tenure, by default without telemetry."""
    url = f"redis://127.0.0.1:{port}?{parameters}"
    async with tenure.connect(url) as client, client.session() as session:
        if instrument is not None:
            instrument(client)

        async def pair(number: int) -> float:
            async with session.mutex("key" if one_key else f"key-{number}").lock():
                return time.perf_counter()

        return await work(port, tasks, pair)


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
