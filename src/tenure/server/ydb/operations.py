"""Operations of a conversation on its session's store, and the scripts that yield them.

A *script* carries out one request of a client. It is a generator that yields its operations, one at
a time. Answers are sent into it, errors are thrown into it, and it appends its replies to those of
the conversation. Scripts of one name run one after the other (`tenure.server.ydb.core`), so that
the state of the name does not change between two steps of one script.

`tenure.server.ydb.core` makes operations, without a session. `tenure.server.ydb.session` carries
them out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tenure.core import rules
from tenure.engines.contract import Answer, EngineSession, Enqueued, Withdrawn
from tenure.errors import InvalidArgument
from tenure.model import SemaphoreDescription
from tenure.server.limits import Limits


@dataclass(frozen=True, slots=True)
class EnqueueOperation:
    """Put a request into a queue. Answered with its place."""

    request_id: int
    name: str
    count: int
    data: bytes
    timeout: float | None
    ephemeral: bool

    def start(self, session: EngineSession) -> Answer[Enqueued]:
        """Begin the operation on the session's store."""
        return session.enqueue(
            self.request_id,
            self.name,
            self.count,
            self.data,
            timeout=self.timeout,
            ephemeral=self.ephemeral,
        )


@dataclass(frozen=True, slots=True)
class AlterOperation:
    """Replace count and data of a request, and the timeout of a waiting one."""

    request_id: int
    name: str
    count: int
    data: bytes
    waiting: bool
    timeout: float | None

    def start(self, session: EngineSession) -> Answer[None]:
        """Begin the operation on the session's store."""
        if self.waiting:
            return session.alter(
                self.request_id, count=self.count, data=self.data, timeout=self.timeout
            )
        return session.alter(self.request_id, count=self.count, data=self.data)


@dataclass(frozen=True, slots=True)
class WithdrawOperation:
    """Withdraw or release a request. Answered with `Withdrawn`."""

    request_id: int
    name: str

    def start(self, session: EngineSession) -> Answer[Withdrawn]:
        """Begin the operation on the session's store."""
        return session.withdraw(self.request_id)


@dataclass(frozen=True, slots=True)
class CreateOperation:
    """Create a lasting semaphore."""

    name: str
    limit: int
    data: bytes

    def start(self, session: EngineSession) -> Awaitable[None]:
        """Begin the operation on the session's store."""
        return session.create_semaphore(self.name, self.limit, self.data, exist_ok=False)


@dataclass(frozen=True, slots=True)
class UpdateOperation:
    """Replace a semaphore's data."""

    name: str
    data: bytes

    def start(self, session: EngineSession) -> Awaitable[None]:
        """Begin the operation on the session's store."""
        return session.update_semaphore(self.name, self.data)


@dataclass(frozen=True, slots=True)
class DeleteOperation:
    """Delete a semaphore."""

    name: str
    force: bool

    def start(self, session: EngineSession) -> Awaitable[None]:
        """Begin the operation on the session's store."""
        return session.delete_semaphore(self.name, force=self.force)


@dataclass(frozen=True, slots=True)
class DescribeOperation:
    """Read a semaphore. Answered with its description."""

    name: str
    owners: bool = False
    waiters: bool = False

    @property
    def is_costly(self) -> bool:
        """True if its cost grows with the semaphore's queue."""
        return self.owners or self.waiters

    def start(self, session: EngineSession) -> Awaitable[SemaphoreDescription]:
        """Begin the operation on the session's store."""
        return session.describe_semaphore(self.name, owners=self.owners, waiters=self.waiters)


@dataclass(frozen=True, slots=True)
class Settled:
    """The store's event that a waiting request is granted or has left its queue.

    The conversation waits for it; it is never carried out. A script yields it only if the store
    will certainly send one of the two.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to all earlier requests of the session, for all names.

    A script yields it before a large read, so that at most one long reply waits for earlier ones.
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

Script: TypeAlias = Generator[Operation | Settled | Answered, Any, None]

StartWatch: TypeAlias = Callable[[str, bool, bool, Callable[[], None]], Callable[[], None]]
"""``start(name, data, owners, changed)``: start a watch, as in the contract; return its end."""


def what_is_wrong(name: str, data: bytes, node: str, limits: Limits) -> str:
    """Return an error in a name or data, or nothing."""
    try:
        rules.check_name(name, node)
    except InvalidArgument as error:
        return str(error)
    if not data_fit(data, limits):
        return (
            f"data has at most {limits.data_bytes} bytes (limit data_bytes), this has {len(data)}"
        )
    return ""


def data_fit(data: bytes, limits: Limits) -> bool:
    """Return true if the data is not too long."""
    return len(data) <= limits.data_bytes


def no_semaphore(name: str) -> str:
    """Return why no semaphore can have that name, or nothing."""
    try:
        rules.check_name(name)
    except InvalidArgument as error:
        return f"there is no such semaphore: {error}"
    return ""
