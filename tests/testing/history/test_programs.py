"""Real programs on a real engine, in virtual time: accepted, and refused with a planted defect."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest

import tenure
from tenure._client.request import Request as ClientRequest
from tenure._client.request import RequestState
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure.core import rules
from tenure.core.node import StoredRequest as Placed
from tenure.core.node import StoredSemaphore
from tenure.core.store import Store
from tenure.testing import VirtualClock, run
from tenure.testing.history import History, Journal, Record, Request, check
from tenure.testing.history.records import Continued, Gone, Granted, Paused, Truth

WINDOW = 2.0
LIMIT = 3
NAMES = ("mutex", "pool", "leader", "data")

_stores = itertools.count()


class Programs:
    """Several processes on one store, and what they record."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.records: list[Record] = []
        self.url = f"memory://programs-{next(_stores)}"
        self.processes = [f"p{number}" for number in range(4)]
        self.granted: list[Request] = []

    async def main(self) -> None:
        stopped = asyncio.Event()
        async with tenure.connect(self.url, clock=self.clock) as eye:
            await eye.semaphore("pool").create(LIMIT)
            observing = asyncio.create_task(self._observe(eye, stopped))
            async with asyncio.TaskGroup() as group:
                for process in self.processes:
                    group.create_task(self._process(process))
                group.create_task(self._stall())
            await asyncio.sleep(2 * WINDOW)
            await say_the_truth(eye, self.records)
            stopped.set()
            observing.cancel()
            with suppress(asyncio.CancelledError):
                await observing

    async def _stall(self) -> None:
        """Nothing turns for longer than anybody's window."""
        for _ in range(3):
            await asyncio.sleep(self.random.uniform(1.0, 4.0))
            self._sample()
            self.records += [Paused(self.clock.now(), process) for process in self.processes]
            self.clock.advance(1.5 * WINDOW)
            self._sample()
            self.records += [Continued(self.clock.now(), process) for process in self.processes]

    def _sample(self) -> None:
        """Ask every lease there has been whether it is held, as threads may at any moment."""
        for request in self.granted:
            request.sample()

    async def _observe(self, eye: tenure.Client, stopped: asyncio.Event) -> None:
        journal = Journal("eye", self.records.append, now=self.clock.now)
        data = eye.semaphore("data")
        while not stopped.is_set():
            try:
                async with data.watch(data=True) as states:
                    async for state in states:
                        journal.observed("w", data, state.data)
            except tenure.SemaphoreNotFound:
                journal.observed("w", data, None)
                await asyncio.sleep(0.1)

    async def _process(self, label: str) -> None:
        journal = Journal(label, self.records.append, now=self.clock.now)
        async with tenure.connect(self.url, clock=self.clock) as client:
            for _ in range(12):
                with suppress(tenure.SessionExpired):
                    async with client.session(recovery_window=WINDOW) as session:
                        async with asyncio.TaskGroup() as group:
                            for act in (self._lock, self._share, self._lead, self._write):
                                group.create_task(self._steps(journal, session, act))
                        journal.leaves()

    async def _steps(
        self, journal: Journal, session: Session, act: Callable[[Journal, Session], Any]
    ) -> None:
        for _ in range(3):
            with suppress(tenure.LeaseLost, tenure.AcquireTimeout, tenure.SessionExpired):
                await act(journal, session)
            await asyncio.sleep(self.random.uniform(0, 0.2))

    async def _lock(self, journal: Journal, session: Session) -> None:
        mutex = session.mutex("mutex")
        if self.random.random() < 0.3:
            async with journal.try_lock(mutex) as perhaps:
                await self._work(perhaps)
        else:
            async with journal.lock(mutex, timeout=self.random.choice([None, 0.5])) as request:
                await self._work(request)

    async def _share(self, journal: Journal, session: Session) -> None:
        pool, count = session.semaphore("pool"), self.random.randint(1, LIMIT)
        if self.random.random() < 0.5:
            async with journal.acquire(pool, count, limit=LIMIT) as request:
                await self._work(request)
        else:
            async with (
                journal.enqueue(pool, count, limit=LIMIT) as place,
                place.held(self.random.choice([None, 0.2])) as request,
            ):
                await self._work(request)

    async def _lead(self, journal: Journal, session: Session) -> None:
        async with journal.campaign(session.election("leader"), b"me") as request:
            await self._work(request)

    async def _write(self, journal: Journal, session: Session) -> None:
        data = session.semaphore("data")
        value = str(self.random.random()).encode()
        with suppress(tenure.SemaphoreExists, tenure.SemaphoreNotFound):
            match self.random.randrange(6):
                case 0:
                    await journal.delete(data)
                case 1 | 2:
                    await journal.create(data, 1, value)
                case 3:
                    await journal.read(data)
                case _:
                    await journal.update(data, value)

    async def _work(self, request: Request | None) -> None:
        if request is not None:
            self.granted.append(request)
        await asyncio.sleep(self.random.uniform(0, 0.4))


async def say_the_truth(eye: tenure.Client, records: list[Record]) -> None:
    for each in await eye.list_semaphores(owners=True, waiters=True):
        owners = tuple(request.order_id for request in each.owners)
        waiters = tuple(request.order_id for request in each.waiters)
        records.append(Truth(eye.clock.now(), "/default", each.name, each.data, owners, waiters))


def history(seed: int) -> History:
    programs = Programs(seed)
    run(programs.main(), programs.clock, horizon=300.0)
    return History(programs.records)


def broken(seed: int) -> set[str]:
    return {violation.rule for violation in check(history(seed))}


@pytest.mark.parametrize("seed", range(5))
def test_what_real_programs_see_is_in_order(seed: int) -> None:
    told = history(seed)
    assert [str(violation) for violation in check(told)] == []
    whys = {record.why for record in told.records if isinstance(record, Gone)}
    assert {"released", "lost"} <= whys
    assert sum(isinstance(record, Granted) for record in told.records) > 100


# Planted defects


def everybody_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tenure.core.node.fits", lambda *_: True)


def the_queue_is_passed(patch: pytest.MonkeyPatch) -> None:
    """Who comes last stands before those that wait."""
    append = StoredSemaphore.append

    def barge(self: StoredSemaphore, request: Placed) -> None:
        after = self.first_waiting
        if after is None:
            append(self, request)
            return
        before = after.previous
        request.previous, request.next, after.previous = before, after, request
        if before is None:
            self.first = request
        else:
            before.next = request
        self.first_waiting = request
        self.waiting += 1

    patch.setattr(StoredSemaphore, "append", barge)


def tokens_fall(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(10**9, -1)
    patch.setattr(rules, "next_order_id", lambda *_: next(numbers))


def a_holder_never_learns(patch: pytest.MonkeyPatch) -> None:
    """No deadline is looked at; only what the store says ends a session."""
    patch.setattr(SessionCore, "is_proven", lambda self: self.why is None)


def an_update_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "update", lambda *_: None)


def a_change_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_changed", lambda *_, **__: None)


def a_released_lease_is_held(patch: pytest.MonkeyPatch) -> None:
    def held(self: ClientRequest) -> bool:
        return self.state in (RequestState.HELD, RequestState.RELEASED) and self.session.is_proven()

    patch.setattr(ClientRequest, "held", property(held))


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (everybody_fits, "limit"),
        (the_queue_is_passed, "order"),
        (tokens_fall, "fencing"),
        (a_holder_never_learns, "loss"),
        (a_released_lease_is_held, "never again"),
        (an_update_is_forgotten, "data"),
        (a_change_is_not_told, "observers"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(rule in broken(seed) for seed in range(8))


def a_release_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "withdraw", lambda *_: True)


def nobody_is_granted_after_a_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_advance", lambda *_: None)


@pytest.mark.parametrize("plant", [None, a_release_is_dropped, nobody_is_granted_after_a_release])
def test_a_lock_that_is_not_handed_over_is_found(
    plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Record] = []
    clock = VirtualClock()

    async def hold(client: tenure.Client, journal: Journal, seconds: float) -> None:
        async with journal.lock(client.mutex("mutex")):
            await asyncio.sleep(seconds)

    async def main() -> None:
        url = f"memory://programs-{next(_stores)}"
        journal = Journal("p", records.append, now=clock.now)
        async with tenure.connect(url, clock=clock) as client:
            if plant is not None:
                plant(monkeypatch)
            tasks = [asyncio.create_task(hold(client, journal, seconds)) for seconds in (1.0, 9.0)]
            await asyncio.sleep(5.0)
            await say_the_truth(client, records)
            journal.leaves()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    run(main(), clock, horizon=100.0)
    assert [violation.rule for violation in check(History(records))] == (["end"] if plant else [])
