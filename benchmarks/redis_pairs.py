"""The Redis engine in one process, against other locks on the same server.

Beside the rates: the processor time of the client and of Redis for a pair, which a busy machine
changes less; what the same costs without sessions, queues and tokens; how even 32 contenders are
served; and what a session and a waiter take of Redis's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from operator import truediv
from statistics import median
from typing import Any

from redis.asyncio import Redis

import tenure
from benchmarks import redis_peers
from benchmarks.measure import Measured, in_turn, percentile
from benchmarks.redis_work import Pairs, a_server, ours

CONTENDERS = 32
_COSTS = "microseconds of processor time for a pair, of the client and of Redis"

Lock = Callable[[int, int], Coroutine[Any, Any, Pairs]]
"""What so many tasks do with locks of a library, given the port and their number."""

PEERS: list[tuple[str, Lock]] = [
    ("python-redis-lock", redis_peers.python_redis_lock),
    ("pottery's AIORedlock", redis_peers.pottery),
    ("tooz", redis_peers.tooz),
]


async def bytes_of_each(port: int, number: int) -> tuple[float, float]:
    """Measure the memory of a session and of a waiter in the server."""
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
            against = "redis-py's Lock"
            results.append(_beside(port, tasks, against, redis_peers.redis_py, at_least=bound))
        asleep = partial(ours, parameters="fresh=true&busy_poll=0")
        results.append(_beside(port, 1, "tenure, asleep while it waits", asleep))
        for tasks in (1, 64):
            against = "two scripts, and nothing else"
            results.append(_beside(port, tasks, against, redis_peers.bare))
        for peer, lock in PEERS:
            results.append(_beside(port, 64, peer, lock, rounds=3))
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


def _beside(
    port: int,
    tasks: int,
    peer: str,
    lock: Lock,
    *,
    at_least: float | None = None,
    rounds: int = 5,
) -> Measured:
    """Tasks on keys of their own: ours, and those of a peer."""
    costs: dict[str, list[tuple[float, float]]] = {"tenure": [], peer: []}

    def run(name: str, work: Lock) -> float:
        pairs = asyncio.run(work(port, tasks))
        costs[name].append(pairs.microseconds)
        return pairs.rate

    rate, peer_rate, ratio = in_turn(lambda: run("tenure", ours), lambda: run(peer, lock), rounds)
    return Measured(
        f"redis, {tasks} task{'s on distinct keys' if tasks > 1 else ''}",
        rate,
        "pairs/s",
        peer,
        peer_rate,
        ratio,
        at_least=at_least,
        notes={_COSTS: costs},
    )


def _contended(port: int) -> list[Measured]:
    """32 tasks on one key: the rate, the shares, and the longest wait against the fair one."""
    runs: list[Pairs] = []
    peers: list[Pairs] = []

    def one() -> float:
        runs.append(asyncio.run(ours(port, CONTENDERS, one_key=True)))
        return runs[-1].rate

    def other() -> float:
        peers.append(asyncio.run(redis_peers.redis_py(port, CONTENDERS, one_key=True)))
        return peers[-1].rate

    rate, peer, ratio = in_turn(one, other, rounds=3)
    last = runs[-1]
    waits = [percentile(each.waits, 0.99) for each in runs]
    fair = [CONTENDERS / each.rate for each in runs]
    return [
        Measured(
            *(f"redis, {CONTENDERS} tasks on one key", rate, "pairs/s"),
            *("redis-py's Lock", peer, ratio),
            at_least=2.0,
            notes={
                "least and most favoured": (min(last.done), max(last.done)),
                _COSTS: {
                    "tenure": [each.microseconds for each in runs],
                    "redis-py's Lock": [each.microseconds for each in peers],
                },
            },
        ),
        Measured(
            *("redis, the 99th of 100 waits", median(waits) * 1e3, "ms"),
            *("fair share", median(fair) * 1e3, median(map(truediv, waits, fair))),
            at_most=2.0,
            notes={"longest of each run, ms": [max(each.waits) * 1e3 for each in runs]},
        ),
    ]
