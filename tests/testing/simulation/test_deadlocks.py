"""Deadlocks in simulated time: each that is raised is one, and each is raised soon.

Programs take locks in random orders, over ways with delays and with interruptions. The truth is
what the store has and what each program does at that instant, which no program can read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import pytest

import tenure
from tenure._client import acquire
from tenure._client.blocked import deadlock_error
from tenure._client.client import Client
from tenure._client.request import Request
from tenure.core.deadlocks import WAITS, deadlocks, standing
from tenure.engines.contract import Attach, EngineSession
from tenure.engines.memory.engine import MemoryEngine, forget
from tenure.errors import AcquireTimeout, Deadlock
from tenure.model import DEFAULT_NODE, BlockedTask
from tenure.testing.faults import FaultyEngine, Way, at_once
from tenure.testing.recorder import Recorder
from tenure.testing.simulation.scheduler import LocalClock, Scheduler

NAMES = ("a", "b", "c", "pool")
HORIZON = 2000.0
SLOWEST = 0.05
"""Seconds that a message takes at most."""

SAMPLED = 0.25

SOON = 2.0 + 20 * SLOWEST + SAMPLED
"""Seconds within which a deadlock is raised, the messages of a search and of a release included."""

_worlds = itertools.count()


@dataclass
class Working:
    """One task of a program: what it is inside, and the data of the request that it waits for."""

    label: str
    inside: list[tuple[str, int]] = field(default_factory=list)
    waits_for: tuple[str, bytes] | None = None


class World:
    """One simulated history of programs that take locks in random orders."""

    def __init__(self, seed: int, *, timeouts: bool = False, cuts: bool = False) -> None:
        self.random = Random(seed)
        self.scheduler = Scheduler()
        self.store = f"deadlocks-{next(_worlds)}"
        self.server = self.scheduler.new_loop(LocalClock(self.scheduler, 1.0, 1e6, 1.7e9))
        self.eye = MemoryEngine(self.store, self.server.clock)
        self.timeouts = timeouts
        self.cuts = cuts
        self.working: list[Working] = []
        self.victims: set[int] = set()
        self.wrong: list[str] = []
        self.longest = 0.0
        self.left = 0
        self._numbers = itertools.count(1)
        self._since: dict[frozenset[int], float] = {}
        self._administrator: EngineSession

    # The truth

    def truth(self, among: Sequence[int] | None = None) -> list[tuple[BlockedTask, ...]]:
        """The deadlocks at this instant, by what the programs do and what the store has.

        Args:
            among: the requests of the only tasks that count; all others continue.
        """
        found = at_once(self.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True))
        queues = {each.name: each for each in found}
        tasks = []
        for each in self.working:
            if each.waits_for is None:
                continue
            name, data = each.waits_for
            waiters = queues[name].waiters if name in queues else ()
            request = next((waiter for waiter in waiters if waiter.data == data), None)
            if request is not None and (among is None or request.order_id in among):
                tasks.append(
                    BlockedTask(
                        name,
                        request.order_id,
                        tuple(each.inside),
                        session_id=request.session_id,
                        raises=True,
                    )
                )
        return deadlocks(standing(tasks, queues), queues)

    def check(self, request: Request, tasks: Sequence[BlockedTask]) -> Deadlock:
        """Compare a deadlock that is about to be raised with the truth.

        A member may have ended its wait by raising, for a part of this deadlock that formed first.
        """
        claimed = [each.order_id for each in tasks]
        left = [order_id for order_id in claimed if order_id not in self.victims]
        true = [[each.order_id for each in tasks] for tasks in self.truth(claimed)]
        if true != [left] or request.order_id not in left:
            self.wrong.append(f"at {self.scheduler.now:.3f} s: {request}, {claimed} is {true}")
        assert request.order_id is not None
        self.victims.add(request.order_id)
        return deadlock_error(request, tasks)

    def sample(self) -> None:
        """Note for how long each deadlock has lasted."""
        now = self.scheduler.now
        there = {frozenset(each.order_id for each in tasks) for tasks in self.truth()}
        self._since = {each: self._since.get(each, now) for each in there}
        for since in self._since.values():
            self.longest = max(self.longest, now - since)
        if self.left:
            self.scheduler.call_at(now + SAMPLED, self.sample)

    # The programs

    def run(self, programs: int = 3, steps: int = 4) -> None:
        preparing = self.server.create_task(self._prepare())
        preparing.add_done_callback(lambda _: self.scheduler.stop())
        self.scheduler.run(HORIZON)
        preparing.result()
        self.left = programs
        with mock.patch.object(acquire, "deadlock_error", self.check):
            for number in range(programs):
                clock = LocalClock(
                    self.scheduler,
                    self.random.uniform(0.99, 1.01),
                    self.random.uniform(0, 1e5),
                    1.7e9,
                )
                way = Way(lambda: self.random.uniform(0.001, SLOWEST))
                loop = self.scheduler.new_loop(clock)
                engine = FaultyEngine(
                    MemoryEngine(self.store, self.server.clock),
                    way,
                    clock=clock,
                    store_loop=self.server,
                )
                loop.create_task(self._program(number, Client(engine, clock), steps))
                if self.cuts:
                    self._cut(way)
            self.sample()
            self.scheduler.run(HORIZON)

    def _cut(self, way: Way) -> None:
        """Cut the way now and then, for less than a recovery window."""
        random, now = self.random, self.scheduler.now
        at, length = now + random.uniform(0, 20), random.uniform(0, 4)
        self.scheduler.call_at(at, way.cut if random.random() < 0.5 else way.lose)
        self.scheduler.call_at(at + length, way.mend)
        if now < 120:
            self.scheduler.call_at(at + length, self._cut, way)

    async def _prepare(self) -> None:
        await self.eye.open()
        attach = Attach(DEFAULT_NODE, 1800.0, "administrator")
        self._administrator = await self.eye.attach(attach, Recorder())
        await self._administrator.create_semaphore("pool", 2, b"", exist_ok=True)

    async def _program(self, number: int, client: Client, steps: int) -> None:
        async with (
            client,
            client.session(on_deadlock="raise") as session,
            asyncio.TaskGroup() as group,
        ):
            for task in range(2):
                working = Working(f"{number}.{task}")
                self.working.append(working)
                group.create_task(self._work(session, working, steps))
        self.left -= 1
        if not self.left:
            # What is on its way arrives.
            self.scheduler.call_at(self.scheduler.now + 5, self.scheduler.stop)

    async def _work(self, session: tenure.Session, working: Working, steps: int) -> None:
        random = self.random
        for _ in range(steps):
            names = random.sample(NAMES, random.randint(1, 3))
            while True:
                try:
                    await self._nested(session, working, names)
                    break
                except (Deadlock, AcquireTimeout):
                    await asyncio.sleep(random.uniform(0, 1))
                finally:
                    working.waits_for = None

    async def _nested(
        self, session: tenure.Session, working: Working, names: Sequence[str]
    ) -> None:
        async with AsyncExitStack() as stack:
            for name in names:
                await asyncio.sleep(self.random.uniform(0, 1))
                data = f"{working.label} {next(self._numbers)}".encode()
                timeout = self.random.uniform(0.5, 8) if self.timeouts else None
                working.waits_for = name, data
                if name == "pool":
                    count = self.random.randint(1, 2)
                    acquiring = session.semaphore(name).acquire(count, data=data, timeout=timeout)
                else:
                    acquiring = session.mutex(name).lock(data=data, timeout=timeout)
                lease = await stack.enter_async_context(acquiring)
                working.waits_for = None
                assert lease.fencing_token is not None
                working.inside.append((name, lease.fencing_token))
                stack.callback(working.inside.pop)
            await asyncio.sleep(self.random.uniform(0, 1))

    def end(self) -> None:
        for loop in self.scheduler.loops:
            loop.kill()
        forget(self.store)


@contextmanager
def simulated(seed: int, *, timeouts: bool = False, cuts: bool = False) -> Iterator[World]:
    """A history that has come to its end."""
    world = World(seed, timeouts=timeouts, cuts=cuts)
    try:
        world.run()
        failures = [each for loop in world.scheduler.loops for each in loop.failures]
        assert failures == []
        assert world.wrong == [] or timeouts  # another member may time out meanwhile
        left = at_once(world.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True))
        assert [each.name for each in left if each.owners or each.waiters] == []
        assert WAITS not in {each.name for each in left}
        yield world
    finally:
        world.end()


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "seed",
        [
            *range(few),
            *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(few, many)),
        ],
    )


@seeds(6, 150)
def test_each_deadlock_that_is_raised_is_one_and_each_is_raised_soon(seed: int) -> None:
    with simulated(seed) as world:
        assert world.victims
        assert world.longest < SOON


@seeds(4, 100)
def test_no_deadlock_is_raised_that_is_none_while_ways_are_cut(seed: int) -> None:
    with simulated(seed, cuts=True) as world:
        assert world.victims


@seeds(4, 100)
def test_programs_come_to_their_end_when_waits_time_out_as_well(seed: int) -> None:
    with simulated(seed, timeouts=True):
        pass
