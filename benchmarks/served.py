"""`tenure serve`, reached over the native protocol, against what its connection could do at most.

Client and server are processes on a core each, both under uvloop. What the bounds ask for:

* One task: a pair is two round trips; 2.6 leave 0.6 of one for what both ends compute.
* Hand-offs: each is a round trip that nothing overlaps with, so that there are about as many a
  second as echoes over *one* connection. Over 32 connections there are many times as many echoes,
  since they hardly wake anybody. With a client that sleeps while it waits some 0.3 can be had.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import uvloop
from redis.asyncio import Redis
from redis.asyncio.lock import Lock

import tenure
from benchmarks.echo import EchoClient
from benchmarks.measure import Measured, in_turn
from benchmarks.servers import CLIENT, echo_server, on_core, redis_server, tenure_server

SECONDS = 1.0
TASKS = 64
CONTENDERS = 32

Work = Callable[[], Coroutine[Any, Any, None]]


async def _rate(works: list[Work]) -> tuple[float, list[int]]:
    """How many pieces of work a second, a task for each kind; and how often each was done."""
    counts = [0] * len(works)
    end = time.perf_counter() + SECONDS

    async def repeat(number: int, work: Work) -> None:
        while time.perf_counter() < end:
            await work()
            counts[number] += 1

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, work in enumerate(works):
            group.create_task(repeat(number, work))
    return sum(counts) / (time.perf_counter() - start), counts


async def _echoes(port: int, connections: int, in_flight: int = 1) -> float:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(connections):
        transport, client = await loop.create_connection(EchoClient, "127.0.0.1", port)
        clients.append((transport, client))
    rate, _ = await _rate([client.there_and_back for _, client in clients] * in_flight)
    for transport, _ in clients:
        transport.close()
    return rate


def _pair(session: tenure.Session, name: str) -> Work:
    mutex = session.mutex(name)

    async def pair() -> None:
        async with mutex.lock():
            pass

    return pair


async def _pairs(url: str, tasks: int) -> float:
    """Pairs a second of one session, on distinct keys."""
    async with tenure.connect(url) as client, client.session() as session:
        rate, _ = await _rate([_pair(session, f"key-{number}") for number in range(tasks)])
        return rate


async def _handoffs(url: str) -> tuple[float, list[int]]:
    """Hand-offs a second of one key among contenders that have a connection each."""
    async with AsyncExitStack() as stack:
        works = []
        for _ in range(CONTENDERS):
            client = await stack.enter_async_context(tenure.connect(url))
            session = await stack.enter_async_context(client.session())
            works.append(_pair(session, "contended"))
        return await _rate(works)


async def _redis_locks(socket: str) -> float:
    async with Redis(unix_socket_path=socket) as redis:

        def work(number: int) -> Work:
            async def pair() -> None:
                async with Lock(redis, f"key-{number}", timeout=30):
                    pass

            return pair

        rate, _ = await _rate([work(number) for number in range(TASKS)])
        return rate


def _many_tasks() -> Measured:
    with redis_server() as socket, tenure_server("memory://") as (_, url), on_core(CLIENT):
        ours, peer, ratio = in_turn(
            lambda: uvloop.run(_pairs(url, TASKS)), lambda: uvloop.run(_redis_locks(socket))
        )
    what = f"served, memory, {TASKS} tasks on distinct keys"
    return Measured(what, ours, "pairs/s", "redis-py's Lock", peer, ratio, at_least=4)


def _one_task() -> Measured:
    with echo_server() as port, tenure_server("memory://") as (_, url), on_core(CLIENT):
        ours, peer, _ = in_turn(
            lambda: uvloop.run(_pairs(url, 1)), lambda: uvloop.run(_echoes(port, 1))
        )
    return Measured(
        "served, memory, one task",
        ours,
        "pairs/s",
        "round trips/s; the ratio: round trips that a pair takes",
        peer,
        peer / ours,
        at_most=2.6,
    )


def _durable() -> Measured:
    with tempfile.TemporaryDirectory(prefix="tenure-") as folder:
        direct = f"sqlite:///{folder}/direct.db?durability=full"
        with tenure_server(f"sqlite:///{folder}/served.db?durability=full") as (_, url):
            ours, peer, ratio = in_turn(
                lambda: uvloop.run(_pairs(url, TASKS)), lambda: uvloop.run(_pairs(direct, TASKS))
            )
    what = f"served, sqlite with durability=full, {TASKS} tasks"
    return Measured(what, ours, "pairs/s", "the same, in the process", peer, ratio, at_least=0.4)


def _contended() -> list[Measured]:
    shares: list[list[int]] = []

    def handoffs(url: str) -> float:
        rate, counts = uvloop.run(_handoffs(url))
        shares.append(counts)
        return rate

    with echo_server() as port, tenure_server("memory://") as (_, url), on_core(CLIENT):
        ours, peer, ratio = in_turn(
            lambda: handoffs(url), lambda: uvloop.run(_echoes(port, CONTENDERS)) / 2
        )
    unequal = statistics.median((max(each) - min(each)) / statistics.mean(each) for each in shares)
    what = f"served, one key, {CONTENDERS} connections"
    return [
        Measured(what, ours, "hand-offs/s", "half the echoes/s", peer, ratio, at_least=0.4),
        Measured(
            f"{what}: most less least favoured",
            100 * unequal,
            "% of a share",
            "limit",
            10,
            10 * unequal,
            at_most=1,
        ),
    ]


def measure() -> list[Measured]:
    """Measure the native protocol: one task, many, durable, and all for one key."""
    return [_one_task(), _many_tasks(), _durable(), *_contended()]


if __name__ == "__main__":
    for measured in measure():
        print(measured)
