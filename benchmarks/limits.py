"""Limits for each key, and several locks as one: whose turn it is, and what they cost.

One tenant floods a semaphore, and nine small ones come after it. Beside that stands the same
semaphore without a limit for each key, where they wait until the flood is over.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count

import tenure
from benchmarks.measure import Measured, in_turn, percentile
from benchmarks.servers import CLIENT, on_core, redis_server

SECONDS = 1.0
LIMIT, PER_KEY = 4, 2
HOLD = 0.002
"""Seconds for which a job holds its token."""

FLOOD, SMALL, JOBS, COUNTED = 1000, 9, 10, 60
"""Jobs of the flooding tenant, number of small tenants, jobs of each, and grants that count for
fairness: all tenants wait as long as these are granted."""

_names = count(1)


class Flood:
    """Grants while one tenant floods.

    Attributes:
        served: the tenant of each grant, in order.
        waits: seconds that the small tenants' requests waited.
    """

    def __init__(self) -> None:
        self.served: list[int] = []
        self.waits: list[float] = []

    async def run(self, *, by_key: bool) -> Flood:
        """Run all jobs; the small tenants come when the flood is in the queue."""
        name = f"jobs-{next(_names)}"
        async with tenure.connect("memory://") as client:
            jobs = client.semaphore(name, limit=LIMIT, per_key=PER_KEY if by_key else None)

            async def work(tenant: int) -> None:
                asked = time.perf_counter()
                async with jobs.acquire(key=f"tenant-{tenant}" if by_key else None):
                    self.served.append(tenant)
                    if tenant:
                        self.waits.append(time.perf_counter() - asked)
                    await asyncio.sleep(HOLD)

            async with asyncio.TaskGroup() as group:
                for _ in range(FLOOD):
                    group.create_task(work(0))
                await asyncio.sleep(0.1)
                self.served.clear()
                for number in range(SMALL * JOBS):
                    group.create_task(work(1 + number % SMALL))
        return self

    @property
    def fairness(self) -> float:
        """Jain's index of the first grants: 1 is an equal share for each tenant."""
        shares = Counter(self.served[:COUNTED])
        return sum(shares.values()) ** 2 / ((1 + SMALL) * sum(each**2 for each in shares.values()))


def _floods() -> list[Measured]:
    ours, plain = (asyncio.run(Flood().run(by_key=by_key)) for by_key in (True, False))
    wait, peer_wait = (1000 * percentile(each.waits, 0.99) for each in (ours, plain))
    peer = "the same without keys"
    return [
        Measured(
            f"limit for each key: p99 of waits of {SMALL} small tenants beside a flood",
            *(wait, "ms", peer, peer_wait, wait / peer_wait),
            at_most=0.5,
        ),
        Measured(
            f"limit for each key: Jain's index of {1 + SMALL} tenants",
            *(ours.fairness, "of 1", peer, plain.fairness, ours.fairness / plain.fairness),
            at_least=2.0,
            notes={"grants": COUNTED},
        ),
    ]


Enter = Callable[[], AbstractAsyncContextManager[object]]
Block = Callable[[tenure.Client, str], Enter]
"""Makes what a task enters again and again, given a client and a name of its own."""


async def _entries(url: str, block: Block, *, beside: Block | None = None) -> float:
    """Measure entries a second of one task, while another block is held."""
    name = f"cost-{next(_names)}"
    async with tenure.connect(url) as client, AsyncExitStack() as held:
        if beside is not None:
            await held.enter_async_context(beside(client, name)())
        enter = block(client, name)
        async with enter():
            pass  # creates what is missing
        done, began = 0, time.perf_counter()
        while time.perf_counter() < began + SECONDS:
            async with enter():
                done += 1
        return done / (time.perf_counter() - began)


def _plain(client: tenure.Client, name: str) -> Enter:
    return client.semaphore(name, limit=LIMIT).acquire


def _by_key(client: tenure.Client, name: str) -> Enter:
    jobs = client.semaphore(name, limit=LIMIT, per_key=PER_KEY)
    return lambda: jobs.acquire(key="a")


def _together(client: tenure.Client, name: str) -> Enter:
    locks = client.mutex(f"{name}-a"), client.mutex(f"{name}-b")
    return lambda: client.all_of(*locks)


def _nested(client: tenure.Client, name: str) -> Enter:
    one, other = client.mutex(f"{name}-a"), client.mutex(f"{name}-b")

    @asynccontextmanager
    async def both() -> AsyncIterator[None]:
        async with one.lock(), other.lock():
            yield

    return both


def _costs(where: str, url: str) -> list[Measured]:
    def of(block: Block, *, beside: Block | None = None) -> Callable[[], float]:
        return lambda: asyncio.run(_entries(url, block, beside=beside))

    rows = (
        ("limit for each key, an idle key", of(_by_key), "without keys", of(_plain), 0.1),
        (
            "limit for each key, a key in use",
            *(of(_by_key, beside=_by_key), "without keys", of(_plain), 0.2),
        ),
        ("all_of two mutexes", of(_together), "two nested blocks", of(_nested), 0.5),
    )
    return [
        Measured(
            f"{what}, {where}, 1 task",
            *(found[0], "blocks/s", peer, found[1], found[2]),
            at_least=bound,
        )
        for what, ours, peer, theirs, bound in rows
        for found in (in_turn(ours, theirs, 3),)
    ]


def measure() -> Iterator[Measured]:
    """Measure whose turn it is beside a flood, and the costs on three stores."""
    with on_core(CLIENT):
        yield from _floods()
        yield from _costs("in memory", "memory://")
        with tempfile.TemporaryDirectory() as folder:
            yield from _costs("sqlite", f"sqlite:///{folder}/bench.db")
        with redis_server() as socket:
            yield from _costs("redis", f"redis+unix://{socket}?fresh=true")
