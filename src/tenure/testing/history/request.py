"""One request, as its program tells of it: what the blocks of a `Journal` are made of.

Rules:

* Nothing here waits, so there is nothing that a cancellation could leave half done.
* An instant is the careful one: read before what may end something, after what begins it. A
  belief is recorded with the instant before the lease was asked.
* What was said to leave is not believed any more, and an end is said once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Protocol, cast

from tenure._client.semaphore import Ticket
from tenure._client.session_core import SessionCore
from tenure._client.source import SessionSource
from tenure.errors import AcquireTimeout, LeaseLost
from tenure.testing.history.records import (
    Believes,
    Gone,
    Granted,
    Leaves,
    Queued,
    Record,
    Shrinks,
    Why,
)

__all__ = ["Holding", "Place", "Request"]


class Holding(Protocol):
    """What a journal asks of a lease, be it a task's or a thread's."""

    @property
    def held(self) -> bool: ...

    @property
    def deadline(self) -> float: ...

    @property
    def loss(self) -> LeaseLost | None: ...

    @property
    def fencing_token(self) -> int: ...


class _Journal(Protocol):
    """The journal, as its requests use it."""

    record: Callable[[Record], object]
    now: Callable[[], float]
    to_common: Callable[[float], float]
    fencing: bool

    def forget(self, request: Request, /) -> None: ...


class Request:
    """One request, as its program tells of it. `Journal.asks` makes one.

    Used in ``with``, around all that is done to be granted and while holding, it records how the
    request ended. Any part may be recorded by hand instead.

    Attributes:
        label: unique in the history.
        lease: what was granted, from `granted` on.
    """

    __slots__ = ("_journal", "_left", "_over", "_session", "_source", "label", "lease")

    def __init__(self, journal: _Journal, label: str, source: object) -> None:
        self.label = label
        self.lease: Holding | None = None
        self._journal = journal
        self._source = source
        self._session = _session_of(source)
        self._left = False
        self._over = False

    def __repr__(self) -> str:
        return f"<request {self.label}>"

    def queued(self, order_id: int) -> None:
        """Its place is known."""
        self._journal.record(Queued(self._journal.now(), self.label, order_id))

    def granted(self, lease: Holding) -> None:
        """It is an owner."""
        journal = self._journal
        at = journal.now()
        self.lease = lease
        token = lease.fencing_token if journal.fencing else None
        journal.record(Granted(at, self.label, token, journal.to_common(lease.deadline)))

    def sample(self) -> bool:
        """Ask the lease whether it is held, and record it if so. From any thread."""
        lease, journal = self.lease, self._journal
        at = journal.now()
        if lease is None or not lease.held:
            return False
        if self._over or not self._left:  # that a lease is held after its end is to be told
            journal.record(Believes(at, self.label, journal.to_common(lease.deadline)))
        return True

    def shrinks(self, count: int) -> None:
        """It is about to give back all but `count` of its tokens."""
        self._journal.record(Shrinks(self._journal.now(), self.label, count))

    def leaves(self) -> None:
        """It is about to be given up, or its task to be cancelled, or its session to be ended."""
        if not self._left:
            self._left = True
            self._journal.record(Leaves(self._journal.now(), self.label))

    def gone(self, why: Why) -> None:
        """The program has it no more. Said twice, the first time counts."""
        if self._over:
            return
        self._left = self._over = True
        self._journal.forget(self)
        deadline = self._deadline()
        common = None if deadline is None else self._journal.to_common(deadline)
        self._journal.record(Gone(self._journal.now(), self.label, why, common))

    def _deadline(self) -> float | None:
        """The lease's, or else that of the session that it was waited for with."""
        if self.lease is not None:
            return self.lease.deadline
        session = self._session
        if session is None or session is not _session_of(self._source):
            return None  # which one it was nobody can tell: the implicit session comes again
        return session.deadline

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.gone(self._why(error))

    def _why(self, error: BaseException | None) -> Why:
        if self.lease is not None:
            return "released" if self.lease.loss is None else "lost"
        if error is None or not isinstance(error, Exception):
            return "withdrawn"
        if isinstance(error, AcquireTimeout):
            return "timeout"
        return "failed"

    @contextmanager
    def holds(self, lease: Holding) -> Iterator[Request]:
        """The block in which the lease is held: the innermost, so that its end is told first."""
        self.granted(lease)
        try:
            yield self
        finally:
            if self.sample():
                self.leaves()
            elif lease.loss is not None:
                self.gone("lost")


class Place:
    """A place in a queue, within `Journal.enqueue`.

    Attributes:
        request: what it is called.
        ticket: the place itself.
    """

    def __init__(self, request: Request, ticket: Ticket[Any]) -> None:
        self.request = request
        self.ticket = ticket

    @asynccontextmanager
    async def held(self, timeout: float | None = None) -> AsyncIterator[Request]:
        """Wait for the grant, and hold it as a block; raises as `Ticket.wait`."""
        lease = await self.ticket.wait(timeout)
        async with lease:
            with self.request.holds(lease) as request:
                yield request


def _session_of(source: object) -> SessionCore | None:
    return cast(SessionSource, source).current()
