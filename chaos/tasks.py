"""What the tasks of a process do: each asks for something, holds it a little, and begins anew.

All of them end by being cancelled, wherever they are just then. Short sleeps are the work that a
lease protects, and the time between two pieces of work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import tenure
from chaos.work import ELECTION, IMPLICIT, MUTEXES, POOLS, Part, label_in, resumable
from tenure.testing.history import Holding, Journal, Request

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
        async for attempt in client.sessions(
            self._part.node, recovery_window=self._part.window, description=self._part.label
        ):
            async with attempt as session, asyncio.TaskGroup() as group:
                for act in (self._lock, self._lock, self._share, self._share):
                    group.create_task(self._again(session, act))
                for act in (self._queue, self._try, self._hurry, self._change_its_mind):
                    group.create_task(self._again(session, act))

    async def _again(
        self, session: tenure.Session, act: Callable[[tenure.Session], Awaitable[None]]
    ) -> None:
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

    # A leader

    async def lead(self, client: tenure.Client) -> None:
        """Campaign, proclaim, resign."""
        async for attempt in client.sessions(
            self._part.node, recovery_window=self._part.window, description=self._part.label
        ):
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
        async for attempt in client.sessions(
            self._part.node, recovery_window=self._part.window, description=self._part.label
        ):
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

    async def _work(self, request: Request, *, mean: float = 0.005) -> None:
        """Work for a while, and look now and then whether the lease is still held."""
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
