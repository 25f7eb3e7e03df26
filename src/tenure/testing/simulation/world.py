"""One simulated history: a store, the processes of a plan, and their faults.

The store is the memory engine on a separate loop; each process reaches it over its own way.
`nemesis` carries out the faults. After the last step of the last process, every fault has ended.
The final state is recorded by an observer that has watched throughout, and by a connection without
a session.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tenure._client.client import Client
from tenure.engines.contract import Attach, Engine, EngineSession
from tenure.engines.memory.engine import MemoryEngine, forget
from tenure.errors import SemaphoreNotFound
from tenure.model import DEFAULT_NODE
from tenure.testing.faults import FaultyEngine, Way, at_once
from tenure.testing.history import (
    Called,
    Gone,
    Granted,
    History,
    Observed,
    Queued,
    Record,
    Requested,
    Truth,
    Violation,
    check,
)
from tenure.testing.recorder import Recorder
from tenure.testing.simulation.nemesis import Nemesis
from tenure.testing.simulation.plan import LIMIT, PER_KEY, SHARED_LIMIT, FaultKind, Plan
from tenure.testing.simulation.process import Incarnation, MortalEngine, SimulatedProcess
from tenure.testing.simulation.scheduler import LocalClock, OutOfTime, Scheduler

HORIZON = 400.0
"""Seconds of true time within which every history must end."""

SETTLED = 10.0
"""Seconds after the last step within which lost sessions expire and all notifications arrive."""

WATCHED = ("config", "pool")

LIMITS = {"pool": LIMIT, "shared": SHARED_LIMIT, "/key/": PER_KEY}
"""Limits of the semaphores with more than one token; the last one of those of keys."""

_worlds = itertools.count()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of simulating a plan.

    Attributes:
        plan: the plan.
        records: the records of all processes.
        violations: the violations that were found.
        operations: the number of requests, releases and calls that the processes made.
        faults: the number of faults that took effect, by kind.
        length: the length of the history, in seconds of true time.
    """

    plan: Plan
    records: Sequence[Record]
    violations: Sequence[Violation]
    operations: int
    faults: Mapping[FaultKind, int]
    length: float


class World:
    """State of one simulated history.

    Attributes:
        store: the name of the memory engine's store.
        server: the store's loop.
        records: the records of all processes and observers, in true time.
        stalled: the numbers of the processes whose loops will stall.
    """

    def __init__(self, plan: Plan) -> None:
        """Build the store and the processes of `plan`; nothing runs yet."""
        self.plan = plan
        self.random = Random(plan.seed)
        self.scheduler = Scheduler()
        self.store = f"simulated-{next(_worlds)}"
        rate = self.random.uniform(0.99, 1.01)
        self.server = self.scheduler.new_loop(LocalClock(self.scheduler, rate, 1e6, 1.7e9))
        self.records: list[Record] = []
        self.stalled = {fault.process for fault in plan.faults if fault.kind == "stall"}
        self.complaints: list[Violation] = []
        self._numbers = itertools.count(1)
        self.eye: Engine = MemoryEngine(self.store, self.server.clock)
        self.administrator: EngineSession
        self.observing: asyncio.Task[None]
        self.processes: Sequence[SimulatedProcess] = [
            SimulatedProcess(self, number, each) for number, each in enumerate(plan.processes)
        ]
        self.nemesis = Nemesis(self)

    # Services for the parts

    def reach(self, life: Incarnation) -> MortalEngine:
        """Return the engine of a new incarnation, at the end of its way."""
        return FaultyEngine(
            MemoryEngine(self.store, self.server.clock),
            life.way,
            clock=life.clock,
            store_loop=self.server,
            io_loop=life.io_loop,
        )

    def new_data(self) -> bytes:
        """Return data that no other call has returned."""
        return b"%d" % next(self._numbers)

    def limit(self, name: str) -> int:
        """Return the limit of a semaphore."""
        return LIMITS.get(name.partition("/key/")[1] or name, 1)

    def label_of(self, order_id: int) -> str:
        """Return the label of a request; a new one if its program never learned the order id."""
        for record in self.records:
            if isinstance(record, Granted | Queued) and record.order_id == order_id:
                return record.request
        return f"unknown-{order_id}"

    def complain(self, who: str, what: str) -> None:
        """Report an event that must not happen, under any faults."""
        self.complaints.append(
            Violation("error", DEFAULT_NODE, who, f"at {self.scheduler.now:.6f} s: {what}", ())
        )

    # The history

    def run(self) -> None:
        """Simulate the whole history."""
        scheduler = self.scheduler
        preparing = self.server.create_task(self._prepare())
        preparing.add_done_callback(lambda _: scheduler.stop())
        scheduler.run(HORIZON)
        preparing.result()
        for process in self.processes:
            process.start()
        self.nemesis.begin(self.plan.faults)
        try:
            scheduler.run(HORIZON)
            scheduler.call_at(scheduler.now + SETTLED, scheduler.stop)
            scheduler.run(HORIZON + 2 * SETTLED)
        except OutOfTime as error:
            self.complain("everybody", f"{error}; not done: {self._not_done()}")
        self._record_truth()
        self._look_for_failures()

    def look_whether_done(self) -> None:
        """Stop the scheduler if all faults have ended and all processes are done."""
        if self.nemesis.idle and all(process.now.done for process in self.processes):
            self.scheduler.stop()

    def _not_done(self) -> str:
        return "; ".join(
            f"{process.now.label} with {sum(map(len, process.steps))} steps left, in "
            + ", ".join(repr(doing[0].get_coro()) for doing in process.now.doing if doing)
            for process in self.processes
            if not process.now.done
        )

    async def _prepare(self) -> None:
        await self.eye.open()
        self.administrator = await self.eye.attach(
            Attach(DEFAULT_NODE, 1800.0, "administrator"), Recorder()
        )
        self._keep_administrator()
        await self.administrator.create_semaphore("pool", LIMIT, b"", exist_ok=True)
        self.observing = self.server.create_task(self._observe())

    def _keep_administrator(self) -> None:
        self.administrator.renew()
        self.server.call_later(600.0, self._keep_administrator)

    async def _observe(self) -> None:
        """Watch the semaphores throughout the history, over a separate way."""
        delay = self.random.uniform
        way = Way(lambda: delay(0.001, 0.05))
        engine = FaultyEngine(MemoryEngine(self.store, self.server.clock), way)
        self.nemesis.observers_way = way
        async with Client(engine, self.server.clock) as client:
            session = await client.session(recovery_window=1800.0)
            async with asyncio.TaskGroup() as group:
                for name in WATCHED:
                    group.create_task(self._watch(session.semaphore(name), name))

    async def _watch(self, semaphore: Any, name: str) -> None:
        data = name == "config"
        while True:
            try:
                async with semaphore.watch(data=data, owners=not data) as states:
                    async for state in states:
                        self._observed(
                            name,
                            state.data if data else tuple(each.order_id for each in state.owners),
                        )
            except SemaphoreNotFound:
                self._observed(name, None)
                await asyncio.sleep(0.5)

    def _observed(self, name: str, value: Any) -> None:
        self.records.append(
            Observed(self.scheduler.now, "observer", f"observer-{name}", DEFAULT_NODE, name, value)
        )

    # The end

    def _record_truth(self) -> None:
        found = at_once(self.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True))
        known = {each.name: each for each in found}
        for name in sorted({*known, "a", "b", "pool", "leader", "config", "other"}):
            each = known.get(name)
            self.records.append(
                Truth(
                    self.scheduler.now,
                    DEFAULT_NODE,
                    name,
                    None if each is None else each.data,
                    () if each is None else tuple(owner.order_id for owner in each.owners),
                    () if each is None else tuple(waiter.order_id for waiter in each.waiters),
                )
            )

    def _look_for_failures(self) -> None:
        for loop in self.scheduler.loops:
            for context in loop.failures:
                self.complain("a loop", f"{context.get('message')}: {context.get('exception')!r}")
        if self.observing.done():
            self.complain("observer", f"it has ended: {self.observing}")

    def end(self) -> None:
        """Kill all loops, so that none of their code runs while they are garbage-collected."""
        for loop in self.scheduler.loops:
            loop.kill()
        forget(self.store)


def run(plan: Plan, new_world: Callable[[Plan], World] = World) -> Outcome:
    """Simulate a plan, with tenure's own log silent, and check its history."""
    world = new_world(plan)
    log = logging.getLogger("tenure")
    before, log.disabled = log.disabled, True
    try:
        world.run()
    finally:
        world.end()
        log.disabled = before
    history = History(world.records)
    operations = sum(
        isinstance(record, Requested | Called)
        or (isinstance(record, Gone) and record.why in {"released", "withdrawn"})
        for record in world.records
    )
    return Outcome(
        plan,
        world.records,
        [*world.complaints, *check(history)],
        operations,
        dict(world.nemesis.applied),
        world.scheduler.now,
    )
