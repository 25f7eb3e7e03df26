"""Random work with limits, recorded in virtual time on ``memory://``.

Two clients and an administrator work with few names, so that they meet. Each kind of work ends, so
a deadlock, or a key that starves, is a timeout.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random

import tenure
from tenure.testing import VirtualClock
from tenure.testing.history import Journal, Record, Request, Together, Wanted

SOON = 3600.0
"""Seconds of virtual time in which all work ends; it takes a few minutes."""

LIMIT, PER_KEY = 3, 2

_stores = itertools.count()


Work = Callable[[tenure.Client, Journal], Awaitable[None]]
"""What one task does."""


@asynccontextmanager
async def inside(journal: Journal, mutex: tenure.Mutex) -> AsyncIterator[Request]:
    """Lock a mutex in a task that may be inside others, and record a deadlock."""
    task = asyncio.current_task()
    assert task is not None
    with journal.request(mutex) as request:
        task.set_name(request.label)
        async with mutex.lock() as lease:
            with request.holds(lease):
                yield request


class Recorded:
    """One history.

    Attributes:
        records: what is recorded.
        random: the source of all choices.
    """

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.records: list[Record] = []
        self.random = Random(seed)
        self.clients: list[tenure.Client] = []
        self._clock = clock

    async def run(self, work: Work, tasks: int) -> None:
        """Do some work in so many tasks of two clients."""
        url = f"memory://limits-{next(_stores)}"
        async with (
            asyncio.timeout(SOON),
            tenure.connect(url, clock=self._clock) as one,
            tenure.connect(url, clock=self._clock) as other,
        ):
            self.clients = [one, other]
            await one.semaphore("pool").create(LIMIT)
            journals = [Journal(each, self._record, now=self._clock.now) for each in "pq"]
            async with asyncio.TaskGroup() as group:
                for number in range(tasks):
                    group.create_task(self._work(work, number % 2, journals))

    def _record(self, record: Record) -> None:
        self.records.append(record)

    async def _work(
        self,
        work: Work,
        number: int,
        journals: list[Journal],
    ) -> None:
        await asyncio.sleep(self.random.random())
        await work(self.clients[number], journals[number])

    # Kinds of work

    async def take_all(self, client: tenure.Client, journal: Journal) -> None:
        """Take several of a few locks, in any order of the arguments."""
        for _ in range(6):
            locks = self._locks(client, 2)
            timeout = self.random.choice((None, None, self.random.random()))
            try:
                async with journal.all_of(client, *locks, timeout=timeout) as together:
                    await self._hold(together)
            except tenure.AcquireTimeout:
                continue

    async def take_any(self, client: tenure.Client, journal: Journal) -> None:
        """Take one of a few locks, or several, or one alone."""
        for _ in range(6):
            timeout = self.random.choice((None, None, self.random.random()))
            try:
                async with journal.any_of(client, *self._locks(client, 1), timeout=timeout) as one:
                    await self._hold(Together([one]))
            except tenure.AcquireTimeout:
                continue
            await self.take_all(client, journal) if self.random.random() < 0.2 else None

    async def share(self, client: tenure.Client, journal: Journal) -> None:
        """Take tokens of a key, most often of the same one, and look at the queue."""
        shared = client.semaphore("shared", limit=LIMIT, per_key=PER_KEY)
        for _ in range(8):
            key = self.random.choice("aaaabc")
            count = self.random.choice((1, 1, PER_KEY))
            timeout = self.random.choice((None, None, self.random.random()))
            try:
                async with journal.share(
                    shared, count, key=key, limit=LIMIT, per_key=PER_KEY, timeout=timeout
                ) as both:
                    await self._hold(both)
                    await journal.describe(client.semaphore("shared"))
            except tenure.AcquireTimeout:
                continue

    async def resize(self, client: tenure.Client, journal: Journal) -> None:
        """Take tokens of a semaphore whose limit changes."""
        pool = client.semaphore("pool")
        for _ in range(8):
            if self.random.random() < 0.3:
                await journal.resize(pool, self.random.randint(1, LIMIT + 2))
            try:
                count = self.random.randint(1, LIMIT)
                async with journal.acquire(pool, count, limit=LIMIT) as request:
                    await self._hold(Together([request]))
            except tenure.InvalidArgument:  # the limit is lower now
                continue

    async def take_rate(self, client: tenure.Client, journal: Journal) -> None:
        """Take tokens of a rate, refund some, and give up some takes."""
        rate = client.rate("rate", limit=20, per=1.0, burst=10)
        for _ in range(10):
            count = self.random.randint(1, 6)
            timeout = self.random.choice((None, None, 0.0, 0.3))
            try:
                async with asyncio.timeout(self.random.choice((None, None, 0.1))):
                    take = await journal.take(rate, count, timeout=timeout)
                if self.random.random() < 0.3:
                    await take.refund(self.random.randint(1, count))
            except (tenure.RateExceeded, TimeoutError):
                pass
            await asyncio.sleep(self.random.choice((0.0, 0.01, 0.3)))

    async def nest(self, client: tenure.Client, journal: Journal) -> None:
        """Lock two or three inside each other, often in a deadlock."""
        async with client.session(on_deadlock="raise") as session:
            for _ in range(6):
                names = self.random.sample("abc", self.random.choice((2, 3)))
                with suppress(tenure.Deadlock):
                    async with AsyncExitStack() as held:
                        for name in names:
                            mutex = session.mutex(name)
                            request = await held.enter_async_context(inside(journal, mutex))
                        await self._hold(Together([request]))

    def _locks(self, client: tenure.Client, least: int) -> list[Wanted]:
        names = self.random.sample("abcd", self.random.randint(least, 4))
        locks: list[Wanted] = [client.mutex(name) for name in names]
        if self.random.random() < 0.3:
            count = self.random.randint(1, LIMIT)
            place = self.random.randrange(len(locks) + 1)
            locks.insert(place, (client.semaphore("pool"), count, LIMIT))
        return locks

    async def _hold(self, together: Together) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.01, 0.1, 0.5)))
        assert together.sample()
