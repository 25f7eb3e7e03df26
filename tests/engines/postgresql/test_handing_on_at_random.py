"""Mutexes that many tasks of several programs share, whatever happens to them.

All of them run in this process, so they can count who is inside.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, backends
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(240)]

PROGRAMS, SESSIONS, TASKS = 3, 2, 6
NAMES = ("a", "b")
ROUNDS = 60
"""Rounds of each task."""


class Oracle:
    """What all tasks see together.

    Attributes:
        inside: the number of tasks inside of each mutex; less than 0 for those that share it.
        latest: the last token of each.
        seen: how often what happened.
    """

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.latest: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    async def hold(self, lease: tenure.Lease, chosen: random.Random) -> None:
        """Be inside for some iterations of the loop."""
        name = lease.name
        shares = lease.count == 1
        assert self.inside[name] <= 0 if shares else self.inside[name] == 0, f"others have {name}"
        assert lease.fencing_token > self.latest[name] or shares
        self.latest[name] = max(lease.fencing_token, self.latest[name])
        self.inside[name] += -1 if shares else 1
        try:
            for _ in range(chosen.choice((0, 0, 0, 1, 5))):
                await asyncio.sleep(0)
            if chosen.random() < 0.02:
                await asyncio.sleep(0.05)
        finally:
            self.inside[name] -= -1 if shares else 1
        self.seen["shared" if shares else "held"] += 1


async def _take_turns(session: tenure.Session, oracle: Oracle, chosen: random.Random) -> None:
    for _ in range(ROUNDS):
        mutex = session.mutex(chosen.choice(NAMES))
        timeout = chosen.choice((None, None, 0.001, 0.02, 0.3, 20.0))
        try:
            if chosen.random() < 0.05:
                lease = await mutex.try_lock()
                if lease is not None:
                    async with lease:
                        await oracle.hold(lease, chosen)
                continue
            shared = session.semaphore(mutex.name, ephemeral=True)
            shares = chosen.random() < 0.2
            acquiring = shared.acquire(timeout=timeout) if shares else mutex.lock(timeout=timeout)
            async with asyncio.timeout(chosen.choice((None, None, None, 0.01, 0.1))):
                async with acquiring as lease:
                    await oracle.hold(lease, chosen)
        except tenure.AcquireTimeout:
            oracle.seen["timed out"] += 1
        except TimeoutError:
            oracle.seen["cancelled"] += 1


async def _cut_connections(server: PostgresServer, chosen: random.Random) -> None:
    while True:
        await asyncio.sleep(chosen.random())
        if found := await asyncio.to_thread(backends, server):
            backend = chosen.choice(found)
            await asyncio.to_thread(server.execute, f"SELECT pg_terminate_backend({backend})")


async def _run(server: PostgresServer, url: str, seed: int) -> Oracle:
    oracle = Oracle()
    async with asyncio.timeout(200):
        clients = [tenure.connect(url) for _ in range(PROGRAMS)]
        sessions = [
            await client.session(recovery_window=60) for client in clients for _ in range(SESSIONS)
        ]
        cutting = asyncio.create_task(_cut_connections(server, random.Random(seed)))
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS * len(sessions)):
                session = sessions[number % len(sessions)]
                chosen = random.Random(seed * 1000 + number)
                group.create_task(_take_turns(session, oracle, chosen))
        cutting.cancel()
        for name in NAMES:  # nothing is left behind
            async with asyncio.timeout(PATIENCE), sessions[0].mutex(name).lock() as lease:
                assert lease.held
        for session in sessions:
            await session.aclose()
        for client in clients:
            await client.aclose()
    assert server.execute("SELECT count(*) FROM tenure.requests") == [(0,)]
    return oracle


@pytest.mark.parametrize("seed", range(3))
async def test_no_mutex_has_two_owners_and_none_gets_stuck(seed: int) -> None:
    with a_server("fsync=off") as server:
        oracle = await _run(server, server.url, seed)
    assert oracle.seen["held"] > 500, oracle.seen


async def test_the_same_holds_behind_a_pooler() -> None:
    with a_server("fsync=off") as server, a_pooler(server) as pooled:
        oracle = await _run(server, pooled, 9)
    assert oracle.seen["held"] > 100, oracle.seen
