"""Records of one request by its program: the parts of the context managers of a `Journal`.

Rules:

* Only `Place.held` waits, so a cancellation leaves no incomplete record.
* Instants are conservative: the clock is read before an action that may end a request, and after an
  action that begins it. A `Held` record has the instant before the lease was checked.
* After `Leaves` no `Held` is recorded until the end, and the end is recorded once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Protocol, cast

from tenure._client.session_core import SessionCore
from tenure._client.source import SessionSource
from tenure._client.ticket import Ticket
from tenure.errors import AcquireTimeout, LeaseLost
from tenure.testing.history.records import (
    Gone,
    Granted,
    Held,
    Leaves,
    Queued,
    Record,
    Shrinks,
    Why,
)


class Holding(Protocol):
    """Attributes of a lease that a journal reads, on an asynchronous lease or a sync wrapper."""

    @property
    def held(self) -> bool:
        """True while the lease is held."""
        ...

    @property
    def deadline(self) -> float:
        """Instant on the local clock at which the lease is lost without another renewal."""
        ...

    @property
    def loss(self) -> LeaseLost | None:
        """The loss, or ``None``."""
        ...

    @property
    def fencing_token(self) -> int:
        """Fencing token of the lease."""
        ...


class _Journal(Protocol):
    """Attributes of a journal that its requests use."""

    record: Callable[[Record], object]
    now: Callable[[], float]
    to_common: Callable[[float], float]
    fencing: bool

    def forget(self, request: Request, /) -> None: ...


class Request:
    """Recorder of one request. `Journal.request` returns one.

    As a context manager around acquiring and holding, it records how the request ended. Each part
    may also be recorded individually.

    Attributes:
        label: the label of the request, unique in the history.
        lease: the lease, once `granted` has been called.
    """

    __slots__ = ("_journal", "_left", "_over", "_session", "_source", "label", "lease")

    def __init__(self, journal: _Journal, label: str, source: object) -> None:
        """Start without a lease; `source` leads to the request's session."""
        self.label = label
        self.lease: Holding | None = None
        self._journal = journal
        self._source = source
        self._session = _session_of(source)
        self._left = False
        self._over = False

    def __repr__(self) -> str:
        """Return the label."""
        return f"<request {self.label}>"

    def queued(self, order_id: int) -> None:
        """Record that its order id is known."""
        self._journal.record(Queued(self._journal.now(), self.label, order_id))

    def granted(self, lease: Holding) -> None:
        """Record that it is granted, with the lease's fencing token and deadline."""
        journal = self._journal
        at = journal.now()
        self.lease = lease
        token = lease.fencing_token if journal.fencing else None
        journal.record(Granted(at, self.label, token, journal.to_common(lease.deadline)))

    def sample(self) -> bool:
        """Return true if the lease is held, and record that. Callable from any thread."""
        lease, journal = self.lease, self._journal
        at = journal.now()
        if lease is None or not lease.held:
            return False
        if self._over or not self._left:  # a lease held after its end is a violation: record it
            journal.record(Held(at, self.label, journal.to_common(lease.deadline)))
        return True

    def shrinks(self, count: int) -> None:
        """Record that it is about to release all but `count` of its tokens."""
        self._journal.record(Shrinks(self._journal.now(), self.label, count))

    def leaves(self) -> None:
        """Record that it is about to be withdrawn or released, or its task or session ended."""
        if not self._left:
            self._left = True
            self._journal.record(Leaves(self._journal.now(), self.label))

    def gone(self, why: Why) -> None:
        """Record that the request has ended. Only the first call counts."""
        if self._over:
            return
        self._left = self._over = True
        self._journal.forget(self)
        deadline = self._deadline()
        common = None if deadline is None else self._journal.to_common(deadline)
        self._journal.record(Gone(self._journal.now(), self.label, why, common))

    def _deadline(self) -> float | None:
        """Return the lease's deadline, else that of the session that made the request."""
        if self.lease is not None:
            return self.lease.deadline
        session = self._session
        if session is None or session is not _session_of(self._source):
            return None  # unknown: the implicit session may have been replaced by a new one
        return session.deadline

    def __enter__(self) -> Request:
        """Enter the block whose end is recorded as the end of the request."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record that the request has ended, and the reason."""
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
        """Record the block in which the lease is held.

        It must be the innermost block, so that its end is recorded before the lease is released.
        """
        self.granted(lease)
        try:
            yield self
        finally:
            if self.sample():
                self.leaves()
            elif lease.loss is not None:
                self.gone("lost")


class Place:
    """Place in a queue, within `Journal.enqueue` or `Journal.recover`.

    Attributes:
        request: the recorder of the request.
        ticket: the ticket for the place.
    """

    def __init__(self, request: Request, ticket: Ticket[Any]) -> None:
        self.request = request
        self.ticket = ticket

    @asynccontextmanager
    async def held(self, timeout: float | None = None) -> AsyncIterator[Request]:
        """Wait for the grant, and hold the lease for a block.

        Args:
            timeout: seconds to wait.

        Raises:
            Exception: the errors of `Ticket.wait`.
        """
        lease = await self.ticket.wait(timeout)
        async with lease:
            with self.request.holds(lease) as request:
                yield request


def _session_of(source: object) -> SessionCore | None:
    return cast(SessionSource, source).current()
