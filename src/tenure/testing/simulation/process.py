"""Simulated process: a client, one session at a time, and tasks that run their steps.

Every step holds its lease for a time, because a broken lock can pass hundreds of schedules in which
every lease is released immediately. The process records everything that it observes. Its records
must be certain, so a possible end is recorded before the action that ends the request, and a grant
after the answer.

When a fault ends a step, its task continues with the next one. Steps that a killed process has not
begun are left to its next incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import replace
from random import Random
from typing import Any, Protocol, TypeVar

from tenure._client.client import Client
from tenure._client.election import Leadership
from tenure._client.lease import Lease
from tenure._client.once import Once
from tenure._client.semaphore import Semaphore
from tenure._client.session import Session
from tenure._client.ticket import Ticket
from tenure.engines.contract import Engine
from tenure.errors import (
    AcquireTimeout,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    RateExceeded,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)
from tenure.model import EPHEMERAL_LIMIT, Recovered
from tenure.testing.faults import Way
from tenure.testing.history import Journal, Record, Request, Revokes
from tenure.testing.history.journal import Primitive
from tenure.testing.simulation.plan import (
    LIMIT,
    PER_KEY,
    RATE_BURST,
    RATE_LIMIT,
    RATE_PERIOD,
    SHARED_LIMIT,
    PlanStep,
    ProcessPlan,
)
from tenure.testing.simulation.scheduler import LocalClock, ProcessLoop, Scheduler

AnyLease = TypeVar("AnyLease", bound=Lease)

EXPECTED = (
    AcquireTimeout,
    EngineError,
    EngineUnavailable,
    LeaseLost,
    LeaseReleased,
    RateExceeded,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
)
"""Exceptions that a step may raise because of faults. Any other exception is a defect.

A step on the semaphore ``pool``, whose limit changes, may also raise `InvalidArgument`.
"""


def expected(name: str) -> tuple[type[Exception], ...]:
    """Return the exceptions that a step on a semaphore may raise because of faults."""
    return (*EXPECTED, InvalidArgument) if name == "pool" else EXPECTED


async def _ensure(pool: Semaphore) -> None:
    """Create the semaphore that the processes share; an administrator may change its limit."""
    with contextlib.suppress(SemaphoreExists):
        await pool.create(LIMIT, exist_ok=True)


class MortalEngine(Engine, Protocol):
    """Engine whose process can be killed."""

    def die(self, *, noticed: bool) -> None:
        """Stop, because the process was killed.

        Args:
            noticed: true if the store detects the death immediately.
        """


class Surroundings(Protocol):
    """Services of a world for its processes.

    Attributes:
        records: the records of all processes, in true time.
        stalled: the numbers of the processes whose loops will stall.
    """

    scheduler: Scheduler
    records: list[Record]
    stalled: set[int]

    def reach(self, life: Incarnation) -> MortalEngine:
        """Return the engine of a new incarnation, at the end of its way."""

    def new_data(self) -> bytes:
        """Return unique data for a call."""

    def limit(self, name: str) -> int:
        """Return the limit of a semaphore."""

    def label_of(self, order_id: int) -> str:
        """Return the label of a request; a new one if its program never learned the order id."""

    def complain(self, who: str, what: str) -> None:
        """Report an event that must not happen, under any faults."""

    def look_whether_done(self) -> None:
        """End the history if all faults have ended and all processes are done."""


class SimulatedProcess:
    """One process of a plan, with all its incarnations."""

    def __init__(self, world: Surroundings, number: int, plan: ProcessPlan) -> None:
        self.world = world
        self.number = number
        self.plan = plan
        self.random = Random(plan.seed)
        self.clock = LocalClock(
            world.scheduler, plan.rate, self.random.uniform(0, 1e5), 1.7e9 + plan.wall
        )
        self.steps = [deque(task) for task in plan.tasks]
        self.former: list[Incarnation] = []
        self.broken = 0  # number of faults that break its way now
        self.slow = 1.0
        self.now: Incarnation

    def start(self, resume: str | None = None) -> None:
        """Start a new incarnation, which resumes a session if given its token."""
        self.now = Incarnation(self, len(self.former), resume)

    def die(self, *, noticed: bool) -> None:
        """Kill the current incarnation."""
        self.now.kill(noticed=noticed)
        self.former.append(self.now)

    def delay(self) -> float:
        """Return the delay of the next message, in seconds."""
        least, most = self.plan.delay
        return self.slow * (least + (most - least) * self.random.random())


class Incarnation:
    """Incarnation of a process: from one start to its end or death.

    Attributes:
        label: its process label in the records.
        loop, io_loop: its event loop, and the loop that stands for its engine's thread, if it has
            one.
        doing: for each task, the current step and its request.
        token: the resume token of the latest session.
        revoked: the instant at which an administrator last revoked requests of this process or of
            the session that it resumes. The notification may not have arrived yet.
        done: whether it has ended normally.
    """

    def __init__(self, process: SimulatedProcess, life: int, resume: str | None) -> None:
        """Start an incarnation of the process; it resumes the session of `resume`, if any."""
        world = process.world
        self.world = world
        self.plan = process.plan
        self.clock = process.clock
        self.label = f"p{process.number}.{life}"
        self.loop = world.scheduler.new_loop(self.clock)
        self.io_loop: ProcessLoop | None = None
        if process.number in world.stalled:
            self.io_loop = world.scheduler.new_loop(self.clock)
        self.way = Way(
            process.delay,
            lambda: process.random.random() < 0.05,
            lambda: process.random.uniform(0.0, 0.2) if process.random.random() < 0.05 else 0.0,
        )
        if process.broken:
            self.way.cut()
        self.engine = world.reach(self)
        self.doing: list[tuple[asyncio.Task[None], Request | None] | None] = []
        self.token: str | None = None
        self.revoked: float | None = None
        self.done = False
        self.client: Client | None = None
        self._process = process
        self._resume = resume
        self._session: Session | None = None
        self._attaching: asyncio.Lock
        self.journal = Journal(
            self.label, self._record, now=world.scheduler.time, to_common=self.clock.true
        )
        self._main = self.loop.create_task(self._run())

    def _record(self, record: Record) -> None:
        if self.loop.alive:  # a coroutine that is garbage-collected records nothing
            self.world.records.append(record)

    # Its life

    def kill(self, *, noticed: bool) -> None:
        """Stop all loops of the process at once; `noticed` as in `MortalEngine.die`."""
        for loop in (self.loop, self.io_loop):
            if loop is not None:
                loop.kill()
        self.engine.die(noticed=noticed)

    async def _run(self) -> None:
        self._attaching = asyncio.Lock()
        self.client = client = Client(self.engine, self.clock, identify=False)
        self.doing = [None] * len(self._process.steps)
        if self._resume is not None:
            with contextlib.suppress(SessionExpired, EngineUnavailable):
                self._keep(await client.session(resume=self._resume))
        async with asyncio.TaskGroup() as group:
            if self._session is not None:
                self._recover(self._session, group)
            for number, steps in enumerate(self._process.steps):
                group.create_task(self._go_through(number, steps))
        with contextlib.suppress(EngineError):  # the store was down for the whole window
            await client.aclose()
        self.done = True
        self.world.look_whether_done()

    async def _go_through(self, number: int, steps: deque[PlanStep]) -> None:
        while steps:
            step = steps.popleft()
            if step.pause:
                await asyncio.sleep(step.pause)
            task = asyncio.create_task(self._step(number, step))
            self.doing[number] = (task, None)
            try:
                await task
            except expected(step.name):
                pass  # the step has ended, and the next one follows
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
            except Exception as error:
                what = f"{step.kind} {step.name!r} raised {error!r}"
                self.world.complain(self.label, what)
            self.doing[number] = None

    def _recorded(self, number: int, primitive: Primitive, step: PlanStep, **known: Any) -> Request:
        """Record that a task is about to make a request."""
        timeout = step.timeout
        if timeout is not None:
            timeout /= self.plan.rate  # the timeout runs on the process's own clock
        request = self.journal.request(primitive, timeout=timeout, **known)
        doing = self.doing[number]
        assert doing is not None
        self.doing[number] = (doing[0], request)
        return request

    # Sessions

    async def session(self) -> Session:
        """Return the session of this process; a new one if the last one has ended."""
        async with self._attaching:
            session = self._session
            if session is None or session.state in {"expired", "closed"}:
                assert self.client is not None
                session = await self.client.session(
                    recovery_window=self.plan.window,
                    description=self.label,
                    resumable=self.plan.resumable,
                )
                self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        self._session = session
        if self.plan.resumable:
            self.token = session.resume_token

    def _recover(self, session: Session, group: asyncio.TaskGroup) -> None:
        """Recover the requests of the former incarnation, held or waiting."""
        for found in session.recovered:
            if found.ephemeral:
                ticket: Ticket[Any] | None = session.mutex(found.name).recover()
            elif found.name == "leader":
                ticket = session.election(found.name).recover()
            else:
                ticket = session.semaphore(found.name).recover()
            if ticket is None:
                self.world.complain(self.label, f"{found} was reported and cannot be recovered")
                continue
            semaphore = session.semaphore(found.name, ephemeral=found.ephemeral)
            recording = self.journal.request(
                semaphore,
                found.count,
                limit=self.world.limit(found.name),
                timeout=None if found.granted else 0.0,  # the former timeout is unknown
                recovers=self.world.label_of(found.order_id),
            )
            group.create_task(self._continue_with(found, ticket, recording))
        if self.revoked is not None:
            self._record(Revokes(self.world.scheduler.now, None, self.label, since=self.revoked))

    async def _continue_with(
        self, found: Recovered, ticket: Ticket[Any], recording: Request
    ) -> None:
        with contextlib.suppress(*expected(found.name)), recording as request:
            request.queued(found.order_id)
            await self._hold_ticket(ticket, request, PlanStep("ticket", found.name, hold=0.2))

    # Steps

    async def _step(self, number: int, step: PlanStep) -> None:
        session = await self.session()
        if step.kind == "close":
            self.journal.leaves()
            await session.aclose()
        elif step.kind in {"lock", "try"}:
            mutex = session.mutex(step.name)
            with self._recorded(number, mutex, step) as request:
                if step.kind == "try":
                    await self._hold_without_block(request, await mutex.try_lock(), step)
                else:
                    await self._hold(request, mutex.lock(timeout=step.timeout), step)
        elif step.kind == "campaign":
            election = session.election(step.name)
            with self._recorded(number, election, step) as request:
                candidacy = election.campaign(b"first", timeout=step.timeout)
                await self._hold(request, candidacy, step)
        elif step.kind == "acquire":
            pool = session.semaphore(step.name)
            await _ensure(pool)
            with self._recorded(number, pool, step, count=step.count, limit=LIMIT) as request:
                await self._hold(request, pool.acquire(step.count, timeout=step.timeout), step)
        elif step.kind == "ticket":
            await self._queue(number, session, step)
        elif step.kind in {"all", "any"}:
            await self._hold_several(session, step)
        elif step.kind == "share":
            await self._share(session, step)
        elif step.kind == "take":
            await self._take(step)
        else:
            await self._call(session.semaphore(step.name), step)

    async def _queue(self, number: int, session: Session, step: PlanStep) -> None:
        if step.name == "pool":
            semaphore, count = session.semaphore(step.name), step.count
            await _ensure(semaphore)
        else:  # all of its tokens, as for a mutex
            semaphore, count = session.semaphore(step.name, ephemeral=True), EPHEMERAL_LIMIT
        for_ever = replace(step, timeout=None)  # the ticket keeps its place
        with self._recorded(number, semaphore, for_ever, count=count, limit=LIMIT) as request:
            await self._hold_ticket(await semaphore.enqueue(count), request, step)

    async def _hold_several(self, session: Session, step: PlanStep) -> None:
        """Hold several mutexes, or one of them."""
        assert self.client is not None
        mutexes, timeout = map(session.mutex, step.name), step.timeout
        if step.kind == "all":
            async with self.journal.all_of(self.client, *mutexes, timeout=timeout) as together:
                await asyncio.sleep(step.hold)
                together.sample()
        else:
            async with self.journal.any_of(self.client, *mutexes, timeout=timeout) as request:
                await asyncio.sleep(step.hold)
                request.sample()

    async def _share(self, session: Session, step: PlanStep) -> None:
        """Hold tokens of a key, and record the queue of all."""
        shared = session.semaphore("shared", limit=SHARED_LIMIT, per_key=PER_KEY)
        async with self.journal.share(
            shared,
            step.count,
            key=step.name,
            limit=SHARED_LIMIT,
            per_key=PER_KEY,
            timeout=step.timeout,
        ) as both:
            await asyncio.sleep(step.hold)
            both.sample()
            await self.journal.describe(shared)

    async def _take(self, step: PlanStep) -> None:
        """Take tokens of a rate, and refund one if there are several."""
        assert self.client is not None
        rate = self.client.rate("rate", limit=RATE_LIMIT, per=RATE_PERIOD, burst=RATE_BURST)
        take = await self.journal.take(rate, step.count, timeout=step.timeout)
        if step.count > 1:
            await take.refund(1)

    async def _hold_ticket(self, ticket: Ticket[Any], request: Request, step: PlanStep) -> None:
        async with ticket:
            try:
                lease = await ticket.wait(step.timeout)
            except AcquireTimeout:
                try:
                    lease = await ticket.wait(0.1)  # its place has been kept
                except AcquireTimeout:
                    request.leaves()
                    return
            request.granted(lease)
            await self._keep_while_held(request, lease, step)

    async def _hold(self, request: Request, acquiring: Once[AnyLease], step: PlanStep) -> None:
        """Hold a lease in its block, whose body is cancelled on a loss, or without a block."""
        if not step.enter:
            await self._hold_without_block(request, await acquiring, step)
            return
        async with acquiring as lease:
            with request.holds(lease):
                if isinstance(lease, Leadership):
                    await asyncio.sleep(step.hold / 2)
                    await lease.proclaim(b"second")
                else:
                    await asyncio.sleep(step.hold)

    async def _hold_without_block(
        self, request: Request, lease: Lease | None, step: PlanStep
    ) -> None:
        if lease is None:
            request.gone("refused")
            return
        request.granted(lease)
        try:
            await self._keep_while_held(request, lease, step)
        except asyncio.CancelledError:
            with contextlib.suppress(LeaseLost):
                await lease.release()  # it is not released otherwise
            raise
        await lease.release()

    async def _keep_while_held(self, request: Request, lease: Lease, step: PlanStep) -> None:
        """Hold a lease without cancellation on a loss, then record that it will be released."""
        try:
            async with asyncio.timeout(step.hold):
                await lease.wait_lost()
            request.gone("lost")
        except TimeoutError:
            if request.sample():
                request.leaves()

    async def _call(self, semaphore: Semaphore, step: PlanStep) -> None:
        """Make one call on a semaphore's data."""
        data = self.world.new_data()
        if step.kind == "create":
            await self.journal.create(semaphore, 1, data)
        elif step.kind == "update":
            await self.journal.update(semaphore, data)
        elif step.kind == "delete":
            await self.journal.delete(semaphore)
        else:
            await self.journal.read(semaphore)
