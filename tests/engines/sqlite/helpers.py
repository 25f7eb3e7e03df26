"""What tests of one process share."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import pytest

from tenure.clock import Clock, SystemClock
from tenure.engines.contract import Answer, Attach, Enqueued, Place
from tenure.engines.sqlite import connect
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.engines.sqlite.session import SqliteSession
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.recorder import Recorder

T = TypeVar("T")

SYSTEM = SystemClock()
ALICE = 61001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, as only root can")


@contextlib.contextmanager
def as_user(uid: int, gid: int | None = None) -> Iterator[None]:
    """Be somebody else for the block."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def engine_of(url: str, clock: Clock = SYSTEM) -> SqliteEngine:
    engine = connect(url, clock)
    assert isinstance(engine, SqliteEngine)
    return engine


@contextlib.asynccontextmanager
async def opened(url: str, clock: Clock = SYSTEM) -> AsyncIterator[SqliteEngine]:
    """An engine that is open for the block."""
    engine = engine_of(url, clock)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


class Program:
    """A session, and what it was told."""

    def __init__(self, session: SqliteSession, heard: Recorder) -> None:
        self.session = session
        self.heard = heard

    def ask(
        self, hold: int, name: str, *, count: int = EPHEMERAL_LIMIT, **how: Any
    ) -> Answer[Enqueued]:
        """Enqueue, without waiting for the answer."""
        self.heard.sending(hold)
        how = {"data": b"", "timeout": None, "ephemeral": True} | how
        data = how.pop("data")
        return self.session.enqueue(hold, name, count, data, **how)

    async def enqueue(self, hold: int, name: str, **how: Any) -> Place:
        """Enqueue, and say where the request stands."""
        return (await result(self.ask(hold, name, **how))).place

    async def withdraw(self, hold: int) -> None:
        await result(self.session.withdraw(hold))

    async def granted(self, hold: int) -> None:
        await self.heard.wait_for(lambda heard: hold in heard.grants, f"the grant of {hold}")

    async def ended(self) -> None:
        await self.heard.wait_for(lambda heard: heard.end is not None, "the end")


async def attached(
    engine: SqliteEngine, node: str = "/default", window: float = 30.0, **how: Any
) -> Program:
    """A new session."""
    heard = Recorder()
    return Program(await engine.attach(Attach(node, window, **how), heard), heard)


@contextlib.asynccontextmanager
async def program(url: str, clock: Clock = SYSTEM, **how: Any) -> AsyncIterator[Program]:
    """A session of an engine of its own, for the block."""
    async with opened(url, clock) as engine:
        yield await attached(engine, **how)


async def result(answer: Answer[T]) -> T:
    """An answer, now or when it comes."""
    return await answer if isinstance(answer, asyncio.Future) else answer
