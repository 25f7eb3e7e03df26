"""Operations of a conversation at its session's store.

Each is made by `tenure.server.ydb.core`, which knows no session, and carried out by
`tenure.server.ydb.session`, which does not know the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeAlias

from tenure.engines.contract import Answer, EngineSession, Enqueued
from tenure.model import SemaphoreDescription

__all__ = [
    "AlterOperation",
    "Answered",
    "CreateOperation",
    "DeleteOperation",
    "DescribeOperation",
    "EnqueueOperation",
    "Operation",
    "Settled",
    "UpdateOperation",
    "WithdrawOperation",
]


@dataclass(frozen=True, slots=True)
class EnqueueOperation:
    """Put a request into a queue. Answered with its place."""

    hold: int
    name: str
    count: int
    data: bytes
    timeout: float | None
    ephemeral: bool

    def start(self, session: EngineSession) -> Answer[Enqueued]:
        return session.enqueue(
            self.hold,
            self.name,
            self.count,
            self.data,
            timeout=self.timeout,
            ephemeral=self.ephemeral,
        )


@dataclass(frozen=True, slots=True)
class AlterOperation:
    """Replace count and data of a request, and the timeout of one that waits."""

    hold: int
    name: str
    count: int
    data: bytes
    waiting: bool
    timeout: float | None

    def start(self, session: EngineSession) -> Answer[None]:
        if self.waiting:
            return session.alter(self.hold, count=self.count, data=self.data, timeout=self.timeout)
        return session.alter(self.hold, count=self.count, data=self.data)


@dataclass(frozen=True, slots=True)
class WithdrawOperation:
    """Take a request out of its queue. Answered with whether it was there."""

    hold: int
    name: str

    def start(self, session: EngineSession) -> Answer[bool]:
        return session.withdraw(self.hold)


@dataclass(frozen=True, slots=True)
class CreateOperation:
    """Create a lasting semaphore."""

    name: str
    limit: int
    data: bytes

    def start(self, session: EngineSession) -> Awaitable[None]:
        return session.create_semaphore(self.name, self.limit, self.data, exist_ok=False)


@dataclass(frozen=True, slots=True)
class UpdateOperation:
    """Replace a semaphore's data."""

    name: str
    data: bytes

    def start(self, session: EngineSession) -> Awaitable[None]:
        return session.update_semaphore(self.name, self.data)


@dataclass(frozen=True, slots=True)
class DeleteOperation:
    """Delete a semaphore."""

    name: str
    force: bool

    def start(self, session: EngineSession) -> Awaitable[None]:
        return session.delete_semaphore(self.name, force=self.force)


@dataclass(frozen=True, slots=True)
class DescribeOperation:
    """Read a semaphore. Answered with its description."""

    name: str
    owners: bool = False
    waiters: bool = False

    @property
    def is_costly(self) -> bool:
        """True if its price grows with the semaphore's queue."""
        return self.owners or self.waiters

    def start(self, session: EngineSession) -> Awaitable[SemaphoreDescription]:
        return session.describe_semaphore(self.name, owners=self.owners, waiters=self.waiters)


@dataclass(frozen=True, slots=True)
class Settled:
    """The store's push that a waiting request is granted or has left its queue.

    The conversation waits for it; it is never carried out. A script asks for it only when the
    store is certain to push one of the two.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to every earlier request of the session, whatever their names.

    A script asks for it before it reads much: no more than one long reply waits for earlier ones.
    """


Operation: TypeAlias = (
    EnqueueOperation
    | AlterOperation
    | WithdrawOperation
    | CreateOperation
    | UpdateOperation
    | DeleteOperation
    | DescribeOperation
)
