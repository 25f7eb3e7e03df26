"""What the tasks of a process do: each asks for something, holds it a little, and begins anew.

All of them end by being cancelled, wherever they are just then. Short sleeps are the work that a
lease protects, and the time between two pieces of work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

import tenure
from chaos.work import (
    ELECTION,
    HIGHEST_LIMIT,
    IMPLICIT,
    KEYS,
    KNOT,
    KNOT_LIMIT,
    MUTEXES,
    PER_KEY,
    POOLS,
    RATES,
    RESIZED,
    RESIZED_LIMIT,
    SEVERAL,
    SHARED,
    SHARED_LIMIT,
    TANGLED,
    Part,
    label_in,
    resumable,
)
from tenure.testing.history import Holding, Journal, Request, Wanted

SAMPLE = 0.05
"""Seconds between two looks at a lease that is held longer."""

_REST = 0.03
"""Seconds between two requests of one task, on average."""

_SETBACK = 0.05
"""Seconds after which something that failed at once is tried again."""


@contextmanager
def tolerated() -> Iterator[None]:
    """Return the errors that one request may end with before the next is made."""
    with suppress(
        tenure.AcquireTimeout,
        tenure.LeaseLost,
        tenure.SemaphoreNotFound,
        tenure.EngineError,
    ):
        yield  # how it ended, the journal has


async def steadily(work: Callable[[tenure.Client], Awaitable[None]], client: tenure.Client) -> None:
    """Do it for ever: a store that is out of order, or cannot be reached, is tried again."""
    while True:
        try:
            await work(client)
        except* (tenure.EngineError, tenure.EngineUnavailable):
            await asyncio.sleep(_SETBACK)


Act = Callable[[tenure.Session], Awaitable[None]]
"""One request, from the start to the end."""


class Sampled(Protocol):
    """What is held, of one request or of several."""

    def sample(self) -> bool:
        """Return whether it is held, and record that."""
        ...


class Hand:
    """The tasks of one process.

    Args:
        go: set as long as new requests may be made; while it is not, what is held is kept.
    """

    def __init__(self, part: Part, journal: Journal, random: Random, go: asyncio.Event) -> None:
        """Prepare the tasks of `part`; they begin when `go` is set."""
        self._part = part
        self._journal = journal
        self._random = random
        self._go = go
        self._data = partial(data_of, part)

    # Sessions that come again when they expire

    async def sessions(self, client: tenure.Client) -> None:
        """Several tasks share a session; when that expires, all of them begin anew."""
        async for attempt in self._attempts(client):
            async with attempt as session, asyncio.TaskGroup() as group:
                for act in (self._lock, self._lock, self._share, self._share):
                    group.create_task(self._again(session, act))
                for act in (self._queue, self._try, self._hurry, self._change_its_mind):
                    group.create_task(self._again(session, act))

    def _attempts(self, client: tenure.Client) -> tenure.Attempts:
        part = self._part
        return client.sessions(
            part.node,
            recovery_window=part.window,
            description=part.label,
            on_deadlock=part.on_deadlock,
        )

    async def _again(self, session: tenure.Session, act: Act) -> None:
        while True:
            await self._go.wait()
            with tolerated():
                await act(session)
            await asyncio.sleep(self._random.expovariate(1 / _REST))

    async def _lock(self, session: tenure.Session) -> None:
        await self._lock_one(session.mutex(self._random.choice(MUTEXES)))

    async def _share(self, session: tenure.Session) -> None:
        name, limit, count = self._some()
        pool = session.semaphore(name)
        with self._journal.request(pool, count, limit=limit) as request:
            async with pool.acquire(count, data=self._data(request)) as lease:
                await self._hold(request, lease)

    async def _queue(self, session: tenure.Session) -> None:
        """Wait with a ticket, without a limit or until it leaves the queue."""
        name, limit, count = self._some()
        patience = self._random.expovariate(1 / 0.2)
        pool = session.semaphore(name)
        with self._journal.request(pool, count, limit=limit) as request:
            async with pool.enqueue(count, data=self._data(request)) as ticket:
                try:
                    await self._hold(request, await ticket.wait(timeout=patience))
                finally:
                    request.leaves()  # with the block

    async def _try(self, session: tenure.Session) -> None:
        mutex = session.mutex(self._random.choice(MUTEXES))
        with self._journal.request(mutex, timeout=0.0) as request:
            lease = await mutex.try_lock(data=self._data(request))
            if lease is None:
                request.gone("refused")
                return
            async with lease:
                await self._hold(request, lease)

    async def _hurry(self, session: tenure.Session) -> None:
        """Timeouts that are often too short."""
        name, limit, count = self._some()
        timeout = self._random.uniform(0.005, 0.3)
        pool = session.semaphore(name)
        with self._journal.request(pool, count, limit=limit, timeout=timeout) as request:
            async with pool.acquire(count, data=self._data(request), timeout=timeout) as lease:
                await self._hold(request, lease)

    async def _change_its_mind(self, session: tenure.Session) -> None:
        """Cancel a request at any moment: sent, waiting, at its grant, held."""
        mutex = session.mutex(self._random.choice(MUTEXES))
        with self._journal.request(mutex) as request:
            working = asyncio.create_task(self._lock_as(request, mutex))
            try:
                await asyncio.wait([working], timeout=self._random.expovariate(1 / 0.05))
            finally:
                if not working.done():
                    request.leaves()
                    working.cancel()
                    await asyncio.wait([working])
            if not working.cancelled():
                working.result()

    # The implicit session

    async def implicit(self, client: tenure.Client) -> None:
        """Through the client's own session, which has the window that nobody chose."""
        mutex = client.mutex(IMPLICIT)
        while True:
            await self._go.wait()
            with tolerated():
                try:
                    await self._lock_one(mutex)
                except tenure.SessionExpired:
                    continue  # the next request brings a new session
            await asyncio.sleep(self._random.expovariate(1 / _REST))

    # Limits: several locks, limits that change, a limit for each key, rates

    async def limits(self, client: tenure.Client) -> None:
        """Several tasks share a session, as in `sessions`."""
        async for attempt in self._attempts(client):
            async with attempt as session, asyncio.TaskGroup() as group:
                acts: list[Act] = [partial(self._lock_all, client), partial(self._lock_any, client)]
                if not self._part.frugal:
                    acts += [partial(self._lock_all, client), self._lock_one_of_several]
                if not self._part.plain:
                    shared = session.semaphore(SHARED, limit=SHARED_LIMIT, per_key=PER_KEY)
                    shares = 1 if self._part.frugal else 4
                    acts += [partial(self._share_by_key, shared)] * shares
                    acts += [self._share_what_is_resized, self._describe]
                for act in acts:
                    group.create_task(self._again(session, act))

    async def _lock_all(self, client: tenure.Client, session: tenure.Session) -> None:
        """Take several locks in any order, of which another process may want the same."""
        chosen = self._random.sample(SEVERAL, self._random.randint(2, len(SEVERAL)))
        locks: list[Wanted] = [session.mutex(name) for name in chosen]
        if not self._part.plain and self._random.random() < 0.3:
            name, limit, count = self._some()
            place = self._random.randrange(len(locks) + 1)
            locks.insert(place, (session.semaphore(name), count, limit))
        timeout = self._random.choice((None, None, self._random.uniform(0.005, 0.3)))
        async with self._journal.all_of(
            client, *locks, timeout=timeout, data=self._data
        ) as together:
            await self._work(together)

    async def _lock_any(self, client: tenure.Client, session: tenure.Session) -> None:
        chosen = self._random.sample(SEVERAL, self._random.randint(1, len(SEVERAL)))
        timeout = self._random.choice((None, None, self._random.uniform(0.005, 0.3)))
        async with self._journal.any_of(
            client, *map(session.mutex, chosen), timeout=timeout, data=self._data
        ) as request:
            await self._work(request)

    async def _lock_one_of_several(self, session: tenure.Session) -> None:
        await self._lock_one(session.mutex(self._random.choice(SEVERAL)))

    async def _share_by_key(self, shared: tenure.Semaphore, _: tenure.Session) -> None:
        timeout = self._random.choice((None, None, self._random.uniform(0.005, 0.3)))
        async with self._journal.share(
            shared,
            self._random.choice((1, 1, 1, PER_KEY)),
            key=self._random.choice(KEYS),
            limit=SHARED_LIMIT,
            per_key=PER_KEY,
            timeout=timeout,
            data=self._data,
        ) as both:
            await self._work(both)

    async def _share_what_is_resized(self, session: tenure.Session) -> None:
        count = self._random.randint(1, self._random.randint(1, HIGHEST_LIMIT))
        pool = session.semaphore(RESIZED)
        with (
            suppress(tenure.InvalidArgument),  # the limit is lower now
            self._journal.request(pool, count, limit=RESIZED_LIMIT) as request,
        ):
            async with pool.acquire(count, data=self._data(request)) as lease:
                await self._hold(request, lease)

    async def _describe(self, session: tenure.Session) -> None:
        with suppress(tenure.EngineUnavailable):
            await self._journal.describe(session.semaphore(SHARED))

    async def rates(self, client: tenure.Client) -> None:
        """Take tokens of rates, and refund some."""
        while self._part.keeps_rates:
            await self._go.wait()
            try:
                await self._take(client)
            except tenure.RateExceeded:
                pass
            except tenure.Unsupported:
                break
            await asyncio.sleep(self._random.expovariate(1 / _REST))
        await asyncio.Event().wait()  # for ever: this engine has none

    async def _take(self, client: tenure.Client) -> None:
        name, (limit, per, burst) = self._random.choice(list(RATES.items()))
        rate = client.rate(name, limit=limit, per=per, burst=burst, path=self._part.node)
        count = self._random.randint(1, rate.burst // 4)
        timeout = self._random.choice((None, None, 0.0, 0.2))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.choice((None, None, 0.1))):
                take = await self._journal.take(rate, count, timeout=timeout)
                if self._random.random() < 0.3:
                    await take.refund(self._random.randint(1, count))

    # Deadlocks

    async def tangle(self, client: tenure.Client) -> None:
        """Several tasks lock inside each other, as in `sessions`."""
        async for attempt in self._attempts(client):
            async with attempt as session, asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(self._again(session, self._lock_inside))

    async def _lock_inside(self, session: tenure.Session) -> None:
        """Lock some of the same names inside each other: often in a deadlock, which ends it."""
        names = self._random.sample((*TANGLED, KNOT), self._random.choice((2, 2, 3)))
        with suppress(tenure.Deadlock):
            async with AsyncExitStack() as held:
                for name in names:
                    request = await held.enter_async_context(self._one_inside(session, name))
                await self._work(request)

    @asynccontextmanager
    async def _one_inside(self, session: tenure.Session, name: str) -> AsyncIterator[Request]:
        task = asyncio.current_task()
        assert task is not None
        timeout = self._random.choice((None, None, None, self._random.uniform(0.5, 3.0)))
        primitive: tenure.Mutex | tenure.Semaphore
        if name == KNOT:
            count = self._random.randint(1, KNOT_LIMIT)
            primitive = session.semaphore(name)
            request = self._journal.request(primitive, count, limit=KNOT_LIMIT, timeout=timeout)
            acquiring = primitive.acquire(count, timeout=timeout, data=self._data(request))
        else:
            primitive = session.mutex(name)
            request = self._journal.request(primitive, timeout=timeout)
            acquiring = primitive.lock(timeout=timeout, data=self._data(request))
        with request:
            task.set_name(request.label)
            async with acquiring as lease:
                with request.holds(lease):
                    yield request

    # A leader

    async def lead(self, client: tenure.Client) -> None:
        """Campaign, proclaim, resign."""
        async for attempt in self._attempts(client):
            async with attempt as session:
                await self._again(session, self._campaign)

    async def _campaign(self, session: tenure.Session) -> None:
        election = session.election(ELECTION)
        with self._journal.request(election) as request:
            async with election.campaign(self._data(request)) as leadership:
                with request.holds(leadership):
                    for number in range(self._random.randrange(3)):
                        await leadership.proclaim(self._data(request) + b"#%d" % number)
                    await self._work(request)

    # A session that its successor takes up

    async def resumable(self, client: tenure.Client) -> None:
        """Hold long, and go on where the predecessor in this slot was killed."""
        while True:
            await self._go.wait()
            try:
                session = await self._taken_up(client)
            except tenure.Unsupported:
                await asyncio.Event().wait()  # for ever: this engine has none
                raise
            try:
                async with session, asyncio.TaskGroup() as group:
                    for name in self._resumables():
                        group.create_task(self._keep(session, name))
            except* tenure.SessionExpired:
                pass  # taken up by somebody else, or over; go on with what the token says

    async def lingering(self, client: tenure.Client) -> None:
        """Hold the same for long, in a session that nobody can resume."""
        async for attempt in self._attempts(client):
            async with attempt as session, asyncio.TaskGroup() as group:
                for name in self._resumables():
                    group.create_task(self._keep(session, name))

    async def _taken_up(self, client: tenure.Client) -> tenure.Session:
        path = self._part.token
        if path.exists():
            try:
                return await client.session(resume=path.read_text())
            except tenure.SessionExpired:
                path.unlink(missing_ok=True)
        session = await client.session(
            self._part.node,
            recovery_window=self._part.window,
            description=self._part.label,
            resumable=True,
        )
        _keep_token(path, session.resume_token)
        return session

    def _resumables(self) -> tuple[str, str]:
        mine, slots = self._part.slot, self._part.slots
        return resumable(mine), resumable((mine + 1) % slots)

    async def _keep(self, session: tenure.Session, name: str) -> None:
        for found in session.recovered:
            if found.name == name:
                with tolerated():
                    await self._recover(session.mutex(name), label_in(found.data))
        mutex = session.mutex(name)
        await self._again(session, lambda _: self._lock_one(mutex, mean=0.2))

    async def _recover(self, mutex: tenure.Mutex, label: str) -> None:
        async with self._journal.recover(mutex, recovers=label) as place:
            if place is not None:
                async with place.held() as request:
                    await self._work(request, mean=0.2)

    # What they share

    def _some(self) -> tuple[str, int, int]:
        """Return a semaphore, its limit, and a number of tokens to request."""
        name, limit = self._random.choice(list(POOLS.items()))
        most = 1 if self._part.plain else limit
        return name, limit, self._random.randint(1, self._random.randint(1, most))

    async def _lock_one(self, mutex: tenure.Mutex, *, mean: float = 0.005) -> None:
        with self._journal.request(mutex) as request:
            await self._lock_as(request, mutex, mean=mean)

    async def _lock_as(self, request: Request, mutex: tenure.Mutex, *, mean: float = 0.005) -> None:
        async with mutex.lock(data=self._data(request)) as lease:
            await self._hold(request, lease, mean=mean)

    async def _hold(self, request: Request, lease: Holding, *, mean: float = 0.005) -> None:
        with request.holds(lease):
            await self._work(request, mean=mean)

    async def _work(self, request: Sampled, *, mean: float = 0.005) -> None:
        """Work for a while, and look now and then whether it is still held."""
        left = self._random.expovariate(1 / mean)
        while left > 0 or not self._go.is_set():
            rest = min(left, SAMPLE) if left > 0 else SAMPLE
            await asyncio.sleep(rest)
            if not request.sample():
                return
            left -= rest


def data_of(part: Part, request: Request) -> bytes:
    """Return the data by which others recognise a request, if it can have data."""
    return b"" if part.plain else request.label.encode()


def _keep_token(path: Path, token: str) -> None:
    """Keep it so that a kill in between leaves the former one."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(token)
    os.replace(new, path)
