"""Random programs on a bad network: nothing is counted twice, and nothing is forgotten.

Each seed is a program of several tasks, on virtual time, with an administrator who evicts requests,
ends sessions and cuts the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tenure import Lease, events
from tenure._client.client import Client
from tenure._client.session import Session
from tenure.errors import TenureError
from tenure.events import Event
from tenure.telemetry import table
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World
from tests.primitives.slow import SlowEngine
from tests.telemetry.helpers import Backend

NAMES = ("a", "b")
TASKS, STEPS = 6, 12


@pytest.fixture(autouse=True)
def virtual_time(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Every coroutine test here runs on the virtual clock."""


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)


class Program:
    """Tasks that acquire in every way, by the choices of a seed."""

    def __init__(self, client: Client, choice: random.Random) -> None:
        self.client = client
        self.choice = choice
        self.sessions: list[Session] = []

    async def work(self) -> None:
        for _ in range(STEPS):
            step = self.choice.choice(
                [self.lock, self.lock, self.attempt, self.ticket, self.pool, self.lead, self.any]
            )
            with contextlib.suppress(TenureError, TimeoutError):
                async with asyncio.timeout(self.choice.choice([0.0, 0.5, 3.0, 20.0])):
                    await step()
            await asyncio.sleep(self.choice.random())

    async def session(self) -> Session:
        living = [each for each in self.sessions if each.state in ("attached", "detached")]
        if len(living) < 2:
            living.append(await self.client.session(recovery_window=10))
            self.sessions.append(living[-1])
        return self.choice.choice(living)

    def timeout(self) -> float | None:
        return self.choice.choice([None, 0.0, 0.3, 2.0])

    async def hold(self, lease: Lease | None) -> None:
        if lease is not None:
            async with lease:
                await asyncio.sleep(self.choice.choice([0.0, 0.5, 2.0]))

    async def lock(self) -> None:
        sources: list[Client | Session] = [self.client, await self.session()]
        source = self.choice.choice(sources)
        await self.hold(await source.mutex(self.choice.choice(NAMES)).lock(timeout=self.timeout()))

    async def attempt(self) -> None:
        await self.hold(await self.client.mutex(self.choice.choice(NAMES)).try_lock())

    async def ticket(self) -> None:
        session = await self.session()
        async with session.mutex(self.choice.choice(NAMES)).enqueue() as ticket:
            await ticket.wait(timeout=self.timeout())

    async def pool(self) -> None:
        pool = self.client.semaphore("pool", limit=2)
        await self.hold(await pool.acquire(timeout=self.timeout()))

    async def lead(self) -> None:
        session = await self.session()
        await self.hold(await session.election("e").campaign(timeout=self.timeout()))

    async def any(self) -> None:
        locks = [self.client.mutex(name) for name in NAMES]
        await self.hold(await self.client.any_of(*locks, timeout=self.timeout()))


async def administrate(
    choice: random.Random, eye: Client, engine: SlowEngine, ended: asyncio.Event
) -> None:
    """Evict, end and cut, until the program has ended."""

    async def evict() -> None:
        for semaphore in await eye.list_semaphores(owners=True, waiters=True):
            for request in (*semaphore.owners, *semaphore.waiters):
                if choice.random() < 0.3 and request.order_id is not None:
                    await eye.evict("/default", semaphore.name, request.order_id)

    async def end_a_session() -> None:
        sessions = await eye.list_sessions()
        if sessions:
            await eye.end_session("/default", choice.choice(sessions).id)

    async def cut() -> None:
        engine.cut()
        for each in engine.sessions:
            each.detached()
        await asyncio.sleep(choice.choice([0.1, 3.0, 15.0]))
        engine.mend()
        for each in engine.sessions:
            each.attached()

    ways: list[Callable[[], Awaitable[None]]] = [evict, end_a_session, cut]
    while not ended.is_set():
        with contextlib.suppress(TenureError):
            await choice.choice(ways)()
        await asyncio.sleep(2 * choice.random())


@pytest.mark.parametrize("seed", range(25))
async def test_each_wait_and_each_lease_is_counted_once(
    world: World, backend: Backend, seed: int
) -> None:
    choice = random.Random(seed)
    client, engine = world.slow(choice.randrange(4))
    stream = client.events(1_000_000)
    async with client, world.client() as eye:
        backend.instrument(client)
        program, ended = Program(client, choice), asyncio.Event()
        administrator = asyncio.create_task(administrate(choice, eye, engine, ended))
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(program.work())
        ended.set()
        await administrator
        for session in program.sessions:
            with contextlib.suppress(TenureError):
                await session.aclose()
    check(list(stream._events), backend)


def check(told: list[Event], backend: Backend) -> None:
    """Compare the events with each other, and with the metrics and the spans."""
    waiting: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    for event in told:
        match event:
            case events.Requested(name=name):
                waiting[name] += 1
                continue
            case events.Acquired(name=name):
                outcomes["acquired"] += 1
            case events.TimedOut(name=name):
                outcomes["timed_out"] += 1
            case events.NotAcquired(name=name):
                outcomes[event.outcome] += 1
            case events.Lost():
                losses[event.cause] += 1
                continue
            case _:
                continue
        waiting[name] -= 1
        assert waiting[name] >= 0
    assert not +waiting
    assert outcomes["acquired"] > 10

    for outcome, count in outcomes.items():
        assert backend.value(table.ACQUISITIONS, outcome=outcome) == count
    assert backend.value(table.ACQUISITIONS) == outcomes.total()
    for cause, count in losses.items():
        assert backend.value(table.LOSSES, cause=cause) == count
    assert backend.value(table.LOSSES) == losses.total()
    assert backend.distribution(table.WAIT).count == outcomes["acquired"]
    assert backend.distribution(table.HOLD).count == outcomes["acquired"]
    for gauge in (table.WAITERS, table.LEASES, table.SESSIONS):
        assert backend.value(gauge) == 0
    waits = [span for span in backend.spans if "tenure.outcome" in (span.attributes or {})]
    holds = [span for span in backend.spans if "tenure.hold.duration" in (span.attributes or {})]
    assert Counter((span.attributes or {})["tenure.outcome"] for span in waits) == outcomes
    assert len(holds) == outcomes["acquired"]
    assert len(backend.spans) == len(waits) + len(holds)
