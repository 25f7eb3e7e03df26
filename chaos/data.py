"""What the processes write into semaphores' data, read back, and watch.

Every write is of something that nobody wrote before. A call that fails in a way that does not tell
whether it took effect is written down as just that.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from random import Random

import tenure
from chaos.work import CONFIGS, ELECTION, NODE, Part
from tenure.testing.history import Journal

_PAUSE = 0.2
"""Seconds between two calls, on average."""

_SETBACK = 0.05
"""Seconds after which a watch that has ended begins anew."""


class Documents:
    """The tasks of one process that write and watch."""

    def __init__(self, part: Part, journal: Journal, random: Random, go: asyncio.Event) -> None:
        """Prepare the tasks of `part`; they begin when `go` is set."""
        self._part = part
        self._journal = journal
        self._random = random
        self._go = go
        self._numbers = itertools.count(1)

    async def write(self, client: tenure.Client) -> None:
        """Read, write, delete and create."""
        async for attempt in client.sessions(
            NODE, recovery_window=self._part.window, description=self._part.label
        ):
            async with attempt as session:
                while True:
                    await self._go.wait()
                    await self._something(session)
                    await asyncio.sleep(self._random.expovariate(1 / _PAUSE))

    async def _something(self, session: tenure.Session) -> None:
        name = self._random.choice(CONFIGS)
        semaphore = session.semaphore(name)
        new = f"{self._part.label}:{next(self._numbers)}".encode()
        kinds = ["read"] * 5
        if self._part.writes(name):
            kinds += ["update"] * 4
            if name == CONFIGS[-1]:
                kinds += ["delete", "create"]
        with suppress(
            tenure.SemaphoreExists,
            tenure.SemaphoreNotFound,
            tenure.SemaphoreBusy,
            tenure.EngineError,
        ):
            match self._random.choice(kinds):
                case "read":
                    await self._journal.read(semaphore)
                case "update":
                    await self._journal.update(semaphore, new)
                case "delete":
                    await self._journal.delete(semaphore)
                case "create":
                    await self._journal.create(semaphore, 1, new)

    async def watch(self, client: tenure.Client) -> None:
        """Watch the data of each, and who leads."""
        async for attempt in client.sessions(
            NODE, recovery_window=self._part.window, description=self._part.label
        ):
            async with attempt as session, asyncio.TaskGroup() as group:
                for name in CONFIGS:
                    group.create_task(self._watch_data(session, name))
                group.create_task(self._watch_owners(session, ELECTION))

    async def _watch_data(self, session: tenure.Session, name: str) -> None:
        semaphore = session.semaphore(name)
        observer = f"{self._part.label}:{name}"
        while True:
            try:
                async with semaphore.watch(data=True) as states:
                    async for state in states:
                        self._journal.observed(observer, semaphore, state.data)
            except tenure.SemaphoreNotFound:
                self._journal.observed(observer, semaphore, None)
            await asyncio.sleep(_SETBACK)

    async def _watch_owners(self, session: tenure.Session, name: str) -> None:
        election = session.election(name)
        observer = f"{self._part.label}:{name}"
        async with election.observe() as leaders:
            async for leader in leaders:
                owners = () if leader is None else (leader.term,)
                self._journal.observed(observer, election, owners)
