"""Contenders that take turns at one mutex, while a test breaks something, and what was seen.

Every turn is checked as it begins: nobody else believes to hold, and the token is higher than all
before it, which is also to say that turns go by the order in which they were asked for. A program
whose session is over, or that finds no store, tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import tenure
from tenure.clock import Clock

PATIENCE = 60.0

_LATE = 1.0
"""Seconds by which a loss may be noticed late on a busy machine."""


class Contest:
    """What is known of the turns so far.

    Attributes:
        tokens: of all turns, in their order.
        sessions: how many there were; as many as contenders, if none was lost.
        wrong: what must not be.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sessions = 0
        self.wrong: list[str] = []
        self.over = False
        self._inside: list[tenure.Lease] = []
        self._turn = asyncio.Event()

    async def turns(self, more: int = 50) -> float:
        """Wait for so many more turns; returns how many seconds it took."""
        began, until = time.monotonic(), len(self.tokens) + more
        async with asyncio.timeout(PATIENCE):
            while len(self.tokens) < until:
                self._turn.clear()
                await self._turn.wait()
        return time.monotonic() - began

    async def contend(self, client: tenure.Client, window: float) -> None:
        """Take turns until it is over."""
        while not self.over:
            try:
                async for attempt in client.sessions(recovery_window=window):
                    async with attempt as session:
                        self.sessions += 1
                        while not self.over:
                            async with session.mutex("turns").lock() as lease:
                                await self._take_a_turn(lease, client.clock)
            except tenure.EngineUnavailable:
                continue

    async def _take_a_turn(self, lease: tenure.Lease, clock: Clock) -> None:
        others = [each.fencing_token for each in self._inside if each.held]
        if others:
            self.wrong.append(f"{lease.fencing_token} begins while {others} believe")
        if self.tokens and lease.fencing_token <= self.tokens[-1]:
            self.wrong.append(f"{lease.fencing_token} comes after {self.tokens[-1]}")
        self._inside.append(lease)
        self.tokens.append(lease.fencing_token)
        self._turn.set()
        try:
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            if clock.now() > lease.deadline + _LATE:
                self.wrong.append(f"{lease.fencing_token} was lost, and learned it too late")
            raise
        finally:
            self._inside.remove(lease)


@asynccontextmanager
async def contest(
    url: str, *, window: float = 6.0, clients: int = 4, contenders: int = 16
) -> AsyncIterator[Contest]:
    """Contenders at work, each with a session of its own; what was wrong is raised at the end."""
    seen = Contest()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(_program(seen, url, window, contenders // clients))
        await seen.turns(2 * contenders)
        yield seen
        seen.over = True
    assert not seen.wrong, seen.wrong


async def _program(seen: Contest, url: str, window: float, contenders: int) -> None:
    async with tenure.connect(url) as client, asyncio.TaskGroup() as group:
        for _ in range(contenders):
            group.create_task(seen.contend(client, window))
