"""What the tests of the primitives share: a store to look into, and turns of the loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure._client.scope import Scope
from tenure.clock import Clock
from tenure.engines import connect_engine
from tenure.engines.contract import Connector
from tenure.errors import SemaphoreNotFound
from tenure.model import DEFAULT_NODE, RequestDescription, SessionDescription
from tests.primitives.slow import SlowEngine

ENOUGH = 30
"""Turns of the loop within which whatever is under way comes to its end."""

_numbers = itertools.count(1)


async def turns(count: int = ENOUGH) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


class EnteredScopes:
    """How many blocks have been entered and not left, by whatever task."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        enter, leave = Scope.enter, Scope.exit

        def entered(scope: Scope, task: asyncio.Task[object] | None = None) -> None:
            enter(scope, task)
            self.count += 1

        def left(scope: Scope, error: BaseException | None) -> bool:
            ours = leave(scope, error)
            self.count -= 1
            return ours

        patch.setattr(Scope, "enter", entered)
        patch.setattr(Scope, "exit", left)


class World:
    """One store, in this process unless `url` says otherwise, and a test's clients of it."""

    def __init__(
        self, clock: Clock, url: str | None = None, connector: Connector = connect_engine
    ) -> None:
        self.clock = clock
        self.url = url or f"memory://world-{next(_numbers)}"
        self.scopes = EnteredScopes()
        self._connector = connector
        self._eye = self.client()

    async def open(self) -> None:
        await self._eye.list_nodes()

    async def close(self) -> None:
        await self._eye.aclose()

    def client(self) -> Client:
        """A program's way to the store."""
        return Client(self._connector(self.url, self.clock), self.clock)

    def slow(self, turns: int = 1) -> tuple[Client, SlowEngine]:
        """A program's way to the store, which a test can make slow, cut, or have fail."""
        engine = SlowEngine(self._connector(self.url, self.clock), turns)
        return Client(engine, self.clock), engine

    def connect(self, turns: int | None) -> Client:
        """A program's way to the store, so many turns of the loop long; ``None`` is the direct."""
        return self.client() if turns is None else self.slow(turns)[0]

    async def queue(self, name: str, path: str = DEFAULT_NODE) -> list[RequestDescription]:
        """All requests for a name, owners first."""
        try:
            found = await self._eye.describe_semaphore(name, path)
        except SemaphoreNotFound:
            return []
        return [*found.owners, *found.waiters]

    async def sessions(self, path: str = DEFAULT_NODE) -> Sequence[SessionDescription]:
        return await self._eye.list_sessions(path)

    async def end_sessions(self, description: str = "", path: str = DEFAULT_NODE) -> None:
        """By the store's word; all that are described so."""
        for session in await self.sessions(path):
            if description in session.description:
                await self._eye.end_session(path, session.id)


async def for_ever() -> None:
    """Wait for what never happens."""
    await asyncio.Event().wait()


def is_held(lease: Lease) -> bool:
    """The same as asking the lease, without a type checker taking the answer for lasting."""
    return lease.held


def this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


@asynccontextmanager
async def released_after(seconds: float, lease: Lease) -> AsyncIterator[None]:
    """Another task gives the lease back, so many seconds from now."""

    async def release() -> None:
        await asyncio.sleep(seconds)
        await lease.release()

    async with asyncio.TaskGroup() as group:
        group.create_task(release())
        yield
