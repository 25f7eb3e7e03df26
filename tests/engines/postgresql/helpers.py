"""Observation of what servers and other programs do, which no event reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import psycopg

import tenure
from tenure._client.client import client_core
from tenure.engines import connect_engine
from tenure.engines._kit.commands.pipeline import EnqueueOperation
from tenure.engines.contract import Engine, EngineSession, Enqueued
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.events import EventStream, SessionAttached, SessionDetached
from tenure.model import EPHEMERAL_LIMIT
from tests.engines.postgresql.servers import PostgresServer

PATIENCE = 40.0


@dataclass(eq=False)
class SessionOfStatements:
    """A session, as statements see it, without an engine."""

    id: int
    token: str = "1.x"
    path: str = "/default"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        return asyncio.get_running_loop()


def a_lock(
    session: SessionOfStatements,
    number: int,
    name: str,
    *,
    data: bytes = b"",
    timeout: float | None = None,
) -> EnqueueOperation:
    """Return the operation that a mutex is acquired by."""
    return EnqueueOperation(session, number, name, EPHEMERAL_LIMIT, data, timeout, ephemeral=True)


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_detached_and_back(events: EventStream) -> None:
    """Return after a gap in the connection."""
    wanted: list[type[object]] = [SessionDetached, SessionAttached]
    async with asyncio.timeout(PATIENCE):
        async for event in events:
            if isinstance(event, wanted[0]):
                del wanted[0]
                if not wanted:
                    return


async def queue_of(client: tenure.Client, name: str) -> tuple[int, int]:
    """Return the numbers of owners and of waiters; (0, 0) if the semaphore does not exist."""
    async with client.session() as session:
        with contextlib.suppress(tenure.SemaphoreNotFound):
            found = await session.semaphore(name).describe(owners=True, waiters=True)
            return len(found.owners), len(found.waiters)
    return 0, 0


async def is_waited_for(client: tenure.Client, name: str) -> None:
    """Return when a request waits."""
    async with asyncio.timeout(PATIENCE):
        while (await queue_of(client, name))[1] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def enqueue(
    session: EngineSession,
    requests: Sequence[tuple[str, bytes]],
    *,
    timeout: float | None = None,
    ephemeral: bool = True,
    return_exceptions: bool = False,
) -> list[Enqueued | BaseException]:
    """Add requests, given by name and data, at the same time; return their answers."""
    answers: list[asyncio.Future[Enqueued]] = []
    for request_id, (name, data) in enumerate(requests, 1):
        answer = session.enqueue(request_id, name, 1, data, timeout=timeout, ephemeral=ephemeral)
        assert isinstance(answer, asyncio.Future)
        answers.append(answer)
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*answers, return_exceptions=return_exceptions)


def backends(server: PostgresServer) -> list[int]:
    """Return the process ids of the connections of engines."""
    found = server.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'tenure'")
    return [int(str(pid)) for (pid,) in found]


@contextlib.asynccontextmanager
async def an_engine(url: str, clock: tenure.Clock) -> AsyncIterator[Engine]:
    """Open an engine, of which a test reads the trouble."""
    engine = connect_engine(url, clock)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


def engine_of(client: tenure.Client) -> PostgresEngine:
    """Return the engine of a client."""
    return cast("PostgresEngine", client_core(client).engine)


@contextlib.asynccontextmanager
async def a_transaction(server: PostgresServer) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """Open a connection of a user's, whose transaction is committed at the end."""
    connection = await psycopg.AsyncConnection.connect(server.url)
    try:
        async with connection:
            yield connection
    finally:
        await connection.close()  # psycopg leaves it open if the commit is cancelled
