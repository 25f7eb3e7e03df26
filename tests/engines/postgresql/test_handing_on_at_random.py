"""Mutexes that many tasks of several programs share, whatever happens to them.

All of them run in this process, so they can count who is inside. A request that is passed over is
found when it is granted: its token is lower than the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import psycopg
import pytest

import tenure
from tenure._client.internals import request_of, session_core
from tenure._client.request import Request
from tenure.engines.postgresql import handoff
from tenure.engines.postgresql.session import PostgresSession
from tests.engines.postgresql.helpers import PATIENCE, a_transaction, backends, engine_of
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(240)]

PROGRAMS, SESSIONS, TASKS = 3, 2, 6
NAMES = ("a", "b")
ROUNDS = 40
"""Rounds of each task."""


class World:
    """What all tasks see and share.

    Attributes:
        server: has the store.
        clients: the programs.
        sessions: of all programs, in turn.
        inside: the requests of those inside of each mutex.
        guarding: requests whose leases are guarded.
        shared: requests that take a part of it, or are about to.
        removed: requests that an administrator may have removed: the program learns that late.
        latest: the last token of each mutex.
        seen: how often what happened.
    """

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.server = server
        self.clients = [tenure.connect(url) for _ in range(PROGRAMS)]
        self.sessions: list[tenure.Session] = []
        self.inside: dict[str, set[Request]] = {name: set() for name in NAMES}
        self.guarding: set[Request] = set()
        self.shared: set[Request] = set()
        self.removed: set[Request] = set()
        self.latest: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    async def open(self) -> None:
        """Open the sessions."""
        for client in self.clients:
            for _ in range(SESSIONS):
                self.sessions.append(await client.session(recovery_window=60))

    async def aclose(self) -> None:
        """Close everything."""
        for session in self.sessions:
            await session.aclose()
        for client in self.clients:
            await client.aclose()

    @property
    def requests(self) -> list[Request]:
        """The requests that may be in a queue."""
        return [each for one in self.sessions for each in session_core(one).requests.values()]

    async def hold(self, lease: tenure.Lease, chosen: random.Random) -> None:
        """Be inside for some iterations of the loop."""
        name, request = lease.name, request_of(lease)
        if lease.count == 1:
            self.shared.add(request)
        self._check(lease, request)
        self.inside[name].add(request)
        try:
            if chosen.random() < 0.1:
                await self._use(lease, chosen)
            for _ in range(chosen.choice((0, 0, 0, 1, 5))):
                await asyncio.sleep(0)
            if chosen.random() < 0.02:
                await asyncio.sleep(chosen.choice((0.05, 0.25)))
        finally:
            self.inside[name].discard(request)
        self.seen["shared" if request in self.shared else "held"] += 1

    def _check(self, lease: tenure.Lease, request: Request) -> None:
        name, token = lease.name, lease.fencing_token
        if request in self.removed or not lease.held:
            return
        for other in self.inside[name]:
            both = request in self.shared and other in self.shared
            holds = other.held or other in self.guarding
            assert both or other in self.removed or not holds, f"{request} while {other}"
        assert token > self.latest[name] or request in self.shared, f"{request} is late"
        self.latest[name] = max(token, self.latest[name])

    async def _use(self, lease: tenure.Lease, chosen: random.Random) -> None:
        request, kind = request_of(lease), chosen.choice(("shrink", "change", "guard"))
        if kind == "shrink":
            self.shared.add(request)
            await lease.update(count=1)
        elif kind == "change":
            await lease.update(b"changed")
        else:
            await self._guard(lease, chosen)
        self.seen[kind] += 1

    async def _guard(self, lease: tenure.Lease, chosen: random.Random) -> None:
        """Guard the lease; its release may begin before the end of the transaction."""
        async with a_transaction(self.server) as connection:
            await lease.guard(connection)
            self.guarding.add(request_of(lease))
            releasing = asyncio.ensure_future(lease.release()) if chosen.random() < 0.5 else None
            await asyncio.sleep(chosen.random() / 50)
            self.guarding.discard(request_of(lease))
        if releasing is not None:
            await releasing


async def _take_turns(world: World, session: tenure.Session, chosen: random.Random) -> None:
    for _ in range(ROUNDS):
        mutex = session.mutex(chosen.choice(NAMES))
        timeout = chosen.choice((None, None, 0.001, 0.02, 0.1, 0.3, 1.2, 20.0))
        try:
            if chosen.random() < 0.05:
                lease = await mutex.try_lock()
                if lease is not None:
                    async with lease:
                        await world.hold(lease, chosen)
                continue
            shared = session.semaphore(mutex.name, ephemeral=True)
            shares = chosen.random() < 0.2
            acquiring = shared.acquire(timeout=timeout) if shares else mutex.lock(timeout=timeout)
            async with asyncio.timeout(chosen.choice((None, None, None, 0.01, 0.1))):
                async with acquiring as lease:
                    await world.hold(lease, chosen)
        except tenure.AcquireTimeout:
            world.seen["timed out"] += 1
        except TimeoutError:
            world.seen["cancelled"] += 1
        except (tenure.LeaseLost, tenure.LeaseReleased):
            world.seen["lost"] += 1
        except psycopg.OperationalError:
            world.seen["guard failed"] += 1


# Mishaps, which go on until they are cancelled

_Mishap: TypeAlias = Callable[[World, random.Random], Awaitable[None]]


async def _cut_connections(world: World, chosen: random.Random) -> None:
    while True:
        await asyncio.sleep(chosen.random())
        if found := await asyncio.to_thread(backends, world.server):
            sql = f"SELECT pg_terminate_backend({chosen.choice(found)})"
            await asyncio.to_thread(world.server.execute, sql)


async def _lose_answers(world: World, chosen: random.Random) -> None:
    """Drop connections just after statements were sent, which the server executes."""
    while True:
        await asyncio.sleep(chosen.random() * 2)
        connection = engine_of(chosen.choice(world.clients)).connection
        if connection is not None:
            connection.drop("the test drops it")


async def _lock_queues(world: World, chosen: random.Random) -> None:
    """Hold statements up, so that releases are on the way while requests time out."""
    while True:
        await asyncio.sleep(chosen.random())
        # It takes the rows in any order: of two that wait for each other, the server ends one.
        with contextlib.suppress(psycopg.errors.DeadlockDetected):
            async with a_transaction(world.server) as connection:
                await connection.execute("SELECT FROM tenure.queues FOR NO KEY UPDATE")
                await asyncio.sleep(chosen.choice((0.005, 0.03, 0.2)))


async def _interrupt_statements(world: World, chosen: random.Random) -> None:
    """Have statements rolled back, which are sent again in parts."""
    find = "FROM pg_stat_activity WHERE application_name = 'tenure' AND state = 'active'"
    while True:
        await asyncio.sleep(chosen.random() / 10)
        await asyncio.to_thread(world.server.execute, f"SELECT pg_cancel_backend(pid) {find}")


async def _evict(world: World, chosen: random.Random) -> None:
    while True:
        await asyncio.sleep(chosen.random())
        if found := [each for each in world.requests if each.order_id is not None]:
            request = chosen.choice(found)
            world.removed.add(request)
            with contextlib.suppress(tenure.SemaphoreNotFound):
                order_id = request.order_id or 0
                await chosen.choice(world.clients).evict("/default", request.name, order_id)


async def _run(server: PostgresServer, url: str, seed: int, *mishaps: _Mishap) -> Counter[str]:
    world = World(server, url)
    async with asyncio.timeout(200):
        await world.open()
        happening = [
            asyncio.ensure_future(mishap(world, random.Random(seed + 7 * number)))
            for number, mishap in enumerate(mishaps)
        ]
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS * len(world.sessions)):
                session = world.sessions[number % len(world.sessions)]
                chosen = random.Random(seed * 1000 + number)
                group.create_task(_take_turns(world, session, chosen))
        for each in happening:
            each.cancel()
        results = await asyncio.gather(*happening, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results), results
        await _check_leaks(world)
        await world.aclose()
    assert server.execute("SELECT count(*) FROM tenure.requests") == [(0,)]
    return world.seen


async def _check_leaks(world: World) -> None:
    """Assert that nothing is left behind, in the store and in the programs."""
    async with asyncio.timeout(PATIENCE):
        while world.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for name in NAMES:
            async with world.sessions[0].mutex(name).lock() as lease:
                assert lease.held
    for each in world.sessions:
        session = cast("PostgresSession", session_core(each).engine)
        left = session.requests, session.names, session.handoff.order_ids, session.unkept
        assert not any(left), left
    for client in world.clients:
        assert not engine_of(client).guarded


@pytest.mark.parametrize("seed", range(3))
async def test_no_mutex_has_two_owners_and_none_gets_stuck(seed: int) -> None:
    with a_server("fsync=off") as server:
        seen = await _run(server, server.url, seed, _cut_connections)
    assert seen["held"] > 200, seen


@pytest.mark.parametrize("seed", range(2))
async def test_the_same_holds_when_answers_are_lost(seed: int) -> None:
    with a_server("fsync=off") as server:
        seen = await _run(server, server.url, seed, _lose_answers, _cut_connections)
    assert seen["held"] > 200, seen


@pytest.mark.parametrize("seed", range(2))
async def test_the_same_holds_when_releases_arrive_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "MARGIN", 0.02)  # so that leases are handed on and then lost
    with a_server("fsync=off") as server:
        mishaps = _lock_queues, _interrupt_statements, _lose_answers
        seen = await _run(server, server.url, seed, *mishaps)
    assert seen["held"] > 200, seen


@pytest.mark.parametrize("seed", range(2))
async def test_the_same_holds_while_requests_are_evicted(seed: int) -> None:
    with a_server("fsync=off") as server:
        seen = await _run(server, server.url, seed, _evict, _lock_queues, _cut_connections)
    assert seen["held"] > 200, seen


async def test_the_same_holds_behind_a_pooler() -> None:
    with a_server("fsync=off") as server, a_pooler(server) as pooled:
        seen = await _run(server, pooled, 9, _cut_connections)
    assert seen["held"] > 100, seen
