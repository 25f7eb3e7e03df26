"""A conversation and its session, for tests: answers come when a test wants, and grants late.

The store is the memory engine.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from typing import Any

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine, EngineSession
from tenure.errors import TenureError
from tenure.server.limits import Limits
from tenure.server.semaphores import SemaphoreCounts
from tenure.server.ydb.core import Conversation, Job
from tenure.server.ydb.messages import Request, Status
from tenure.server.ydb.requests import FOREVER

NODE = "/default"
ACQUIRED, PENDING = "acquire_semaphore_result", "acquire_semaphore_pending"


class Party:
    """A conversation and its session. Operations are begun in order, and answered on demand."""

    session: EngineSession

    def __init__(self, books: SemaphoreCounts, limits: Limits) -> None:
        self.conversation = Conversation(
            NODE,
            limits,
            books,
            lambda name, data, owners, changed: self.session.watch(
                name, data=data, owners=owners, changed=changed
            ),
            lambda: None,
        )
        self.done: deque[tuple[Job, Any, TenureError | None]] = deque()
        self.said: list[Any] = []

    # The session's events

    def granted(self, hold: int, order_id: int | None) -> None:
        # Late, as most engines tell it: what is asked for meanwhile crosses it on its way.
        asyncio.get_running_loop().call_soon(self.conversation.granted, hold)

    def __getattr__(self, name: str) -> Any:
        if name in {"resumed", "removed", "proven"}:
            return getattr(self.conversation, name)
        raise AttributeError(name)

    def ended(self, error: TenureError) -> None:
        self.conversation.fail(Status.SESSION_EXPIRED, str(error))

    # Driving

    async def ask(self, **request: Any) -> None:
        self.conversation.received(Request(**request), now=0.0)
        await self.work()

    async def work(self) -> None:
        """Begin what is to be done, and note what has been said."""
        operations = self.conversation.operations
        while operations:
            job = operations.popleft()
            try:
                answer: Any = job.operation.start(self.session)
                outcome = await answer if inspect.isawaitable(answer) else answer
            except TenureError as error:
                self.done.append((job, None, error))
            else:
                self.done.append((job, outcome, None))
        self.hear()

    def hear(self) -> None:
        self.said += self.conversation.replies
        self.conversation.replies.clear()

    async def answer_one(self) -> None:
        """The oldest operation that is not answered is."""
        if self.done:
            job, outcome, error = self.done.popleft()
            if error is None:
                self.conversation.answered(job, outcome)
            else:
                self.conversation.refused(job, error)
        await self.work()

    async def answer_all(self) -> None:
        while self.done or self.conversation.operations:
            await self.answer_one()

    def heard(self) -> list[Any]:
        """What has been said since it was asked last, but pings."""
        self.hear()
        said, self.said = self.said, []
        return [each for each in said if not each.HasField("ping")]


async def party(engine: Engine, books: SemaphoreCounts) -> Party:
    made = Party(books, Limits())
    made.session = await engine.attach(Attach(NODE, 30.0, liveness="window"), made)
    made.conversation.started(made.session.id, 30_000, 1 << 32, 7)
    made.heard()
    return made


async def parties(number: int) -> tuple[Engine, list[Party]]:
    engine = connect_engine("memory://", SystemClock())
    await engine.open()
    books = SemaphoreCounts(engine, Limits())
    return engine, [await party(engine, books) for _ in range(number)]


async def news() -> None:
    """Let the store tell what it has to tell."""
    for _ in range(3):
        await asyncio.sleep(0)


def acquire(asked: int, name: str = "m", count: int = 1, **how: Any) -> dict[str, Any]:
    how.setdefault("timeout_millis", FOREVER)
    return {
        "acquire_semaphore": Request.AcquireSemaphore(req_id=asked, name=name, count=count, **how)
    }


def release(asked: int, name: str = "m") -> dict[str, Any]:
    return {"release_semaphore": Request.ReleaseSemaphore(req_id=asked, name=name)}


def kinds(said: list[Any]) -> list[str]:
    return [each.WhichOneof("response") for each in said]
