"""How a program records what happens to it, with the public API and a few lines more.

A `Journal` belongs to one process. It hands each record to a *sink*, a callable that takes one:
the ``append`` of a list, or an `AppendOnly` file, of which a process that is killed loses nothing.
A workload of tasks is written with the asynchronous blocks (`lock`, `acquire`, `try_lock`,
`campaign`, `enqueue`, `recover`); anything else, threads among it, with what they are made of::

    with (
        journal.asks(mutex, timeout=5) as request,  # says how it ended
        mutex.lock(timeout=5) as lease,
        request.holds(lease),  # says that it is held, and when it need not be any more
    ):
        ...

A request is given up in the moment that its task is cancelled or its session ended, before the
task itself can say anything. So whoever does that says so first: `Request.leaves`,
`Journal.leaves`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from tenure._client.election import Election
from tenure._client.mutex import Mutex
from tenure._client.semaphore import Semaphore, Ticket
from tenure.clock import SystemClock
from tenure.errors import (
    InvalidArgument,
    Misuse,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
)
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.history.records import (
    Asked,
    Called,
    Observed,
    Operation,
    Outcome,
    Record,
    Returned,
    Revokes,
    Unobserved,
)
from tenure.testing.history.request import Place, Request

if TYPE_CHECKING:
    from tenure import blocking

__all__ = ["DataCall", "Journal", "Primitive"]

Primitive: TypeAlias = (
    "Mutex | Semaphore | Election | blocking.Mutex | blocking.Semaphore | blocking.Election"
)
"""What is asked for; the blocking ones will do."""


class DataCall:
    """A call on a semaphore's data, within `Journal.call`. Set `result` to what it read."""

    __slots__ = ("result",)

    def __init__(self) -> None:
        self.result: bytes | None = None


class Journal:
    """What one process records.

    Args:
        process: the label of this incarnation.
        record: the sink; it is called from whatever thread something happens in.
        now: the common scale's clock.
        to_common: from the client's own clock (`tenure.Client.clock`) to the common scale; the
            identity where they are one, as on one host.
        fencing: whether the engine's leases have fencing tokens.

    Attributes:
        process, record, now, to_common, fencing: as given.
    """

    def __init__(
        self,
        process: str,
        record: Callable[[Record], object],
        *,
        now: Callable[[], float] | None = None,
        to_common: Callable[[float], float] | None = None,
        fencing: bool = True,
    ) -> None:
        self.process = process
        self.record = record
        self.now = SystemClock().now if now is None else now
        self.to_common = _as_it_is if to_common is None else to_common
        self.fencing = fencing
        self._labels = itertools.count(1)
        self._open: dict[str, Request] = {}

    def label(self) -> str:
        """A label that is unique, if no two processes have the same."""
        return f"{self.process}-{next(self._labels)}"

    # Requests

    def asks(
        self,
        primitive: Primitive,
        count: int | None = None,
        *,
        limit: int | None = None,
        timeout: float | None = None,
        recovers: str | None = None,
        label: str | None = None,
    ) -> Request:
        """A request is about to be made.

        Args:
            primitive: of which.
            count: how many of a semaphore's tokens; 1 if left out.
            limit: of a lasting semaphore, which nothing here can know.
            timeout: that of the request, or sooner, whatever will end it.
            recovers: the label of the request of a resumed session that this one continues.
            label: one of your own.
        """
        twin: Any = getattr(primitive, "_wrapped", primitive)
        if isinstance(twin, Mutex):
            count = limit = EPHEMERAL_LIMIT
        elif isinstance(twin, Election):
            count = limit = 1
        elif twin.ephemeral:
            limit = EPHEMERAL_LIMIT
        elif limit is None:
            raise Misuse(f"tell the journal the limit of semaphore {twin.name!r}", name=twin.name)
        source = twin._source
        request = Request(self, self.label() if label is None else label, source)
        self._open[request.label] = request
        self.record(
            Asked(
                self.now(),
                self.process,
                request.label,
                source.node,
                twin.name,
                1 if count is None else count,
                limit,
                source.recovery_window,
                timeout,
                recovers,
            )
        )
        return request

    def leaves(self) -> None:
        """All that is asked for or held may leave: said before a session or client is ended."""
        for request in list(self._open.values()):
            request.leaves()

    def forget(self, request: Request) -> None:
        """Remove a request that is over from those that may leave."""
        self._open.pop(request.label, None)

    def revokes(
        self,
        *,
        request: str | None = None,
        session_of: str | None = None,
        node: str | None = None,
        name: str | None = None,
        since: float | None = None,
    ) -> None:
        """An administrator is about to take something away; see `Revokes`."""
        self.record(Revokes(self.now(), request, session_of, node, name, since))

    @contextmanager
    def revoking(
        self,
        *,
        request: str | None = None,
        session_of: str | None = None,
        node: str | None = None,
        name: str | None = None,
    ) -> Iterator[None]:
        """The block in which an administrator takes something away."""
        since = self.now()
        self.record(Revokes(since, request, session_of, node, name))
        try:
            yield
        finally:
            self.record(Revokes(self.now(), request, session_of, node, name, since))

    @asynccontextmanager
    async def lock(
        self, mutex: Mutex, *, timeout: float | None = None, **options: Any
    ) -> AsyncIterator[Request]:
        """``async with mutex.lock(...)``, recorded."""
        with self.asks(mutex, timeout=timeout) as request:
            async with mutex.lock(timeout=timeout, **options) as lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def acquire(
        self,
        semaphore: Semaphore,
        count: int = 1,
        *,
        limit: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[Request]:
        """``async with semaphore.acquire(count, ...)``, recorded; `limit` is the semaphore's."""
        with self.asks(semaphore, count, limit=limit, timeout=timeout) as request:
            async with semaphore.acquire(count, timeout=timeout, **options) as lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def campaign(
        self,
        election: Election,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[Request]:
        """``async with election.campaign(data, ...)``, recorded."""
        with self.asks(election, timeout=timeout) as request:
            async with election.campaign(data, timeout=timeout, **options) as lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def try_lock(self, mutex: Mutex, **options: Any) -> AsyncIterator[Request | None]:
        """``lease = await mutex.try_lock(...)`` and, if that is one, its block; or ``None``."""
        with self.asks(mutex, timeout=0.0) as request:
            lease = await mutex.try_lock(**options)
            if lease is None:
                request.gone("refused")
                yield None
                return
            async with lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def enqueue(
        self, semaphore: Semaphore, count: int = 1, *, limit: int | None = None, **options: Any
    ) -> AsyncIterator[Place]:
        """``async with semaphore.enqueue(count, ...)``, recorded."""
        with self.asks(semaphore, count, limit=limit) as request:
            async with semaphore.enqueue(count, **options) as ticket:
                with self._place(request, ticket) as place:
                    yield place

    @asynccontextmanager
    async def recover(
        self,
        primitive: Mutex | Semaphore | Election,
        *,
        limit: int | None = None,
        recovers: str = "",
        **options: Any,
    ) -> AsyncIterator[Place | None]:
        """``async with primitive.recover(...)``, recorded; ``None`` when there is nothing.

        Args:
            recovers: the label that the request had in its former process, if that is known.
        """
        ticket: Ticket[Any] | None = primitive.recover(**options)
        if ticket is None:
            yield None
            return
        count = ticket._lease.count
        with self.asks(primitive, count, limit=limit, recovers=recovers) as request:
            async with ticket:
                with self._place(request, ticket) as place:
                    yield place

    @contextmanager
    def _place(self, request: Request, ticket: Ticket[Any]) -> Iterator[Place]:
        order_id = ticket.fencing_token
        if order_id is not None:
            request.queued(order_id)
        try:
            yield Place(request, ticket)
        finally:
            request.leaves()

    # A semaphore's data

    @contextmanager
    def call(
        self,
        semaphore: Semaphore | blocking.Semaphore,
        op: Operation,
        argument: bytes | None = None,
    ) -> Iterator[DataCall]:
        """The block in which one call is made on a semaphore's data; what it raises says how.

        ``with journal.call(config, "read") as call: call.result = (await config.describe()).data``
        """
        twin: Any = getattr(semaphore, "_wrapped", semaphore)
        label = self.label()
        node, name = twin._source.node, twin.name
        self.record(Called(self.now(), self.process, label, node, name, op, argument))
        call = DataCall()
        outcome: Outcome = "unknown"
        try:
            yield call
            outcome = "ok"
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            self.record(Returned(self.now(), label, outcome, call.result))

    async def create(self, semaphore: Semaphore, limit: int, data: bytes = b"") -> None:
        """``await semaphore.create(limit, data)``, recorded."""
        with self.call(semaphore, "create", data):
            await semaphore.create(limit, data)

    async def update(self, semaphore: Semaphore, data: bytes) -> None:
        """``await semaphore.update(data)``, recorded."""
        with self.call(semaphore, "update", data):
            await semaphore.update(data)

    async def delete(self, semaphore: Semaphore) -> None:
        """``await semaphore.delete()``, recorded."""
        with self.call(semaphore, "delete"):
            await semaphore.delete()

    async def read(self, semaphore: Semaphore) -> bytes:
        """The semaphore's data, recorded."""
        with self.call(semaphore, "read") as call:
            call.result = data = (await semaphore.describe()).data
        return data

    def unobserved(self, observer: str) -> None:
        """A watch is over, before the end of the history."""
        self.record(Unobserved(self.now(), self.process, observer))

    def observed(
        self, observer: str, primitive: Primitive, value: bytes | tuple[int, ...] | None
    ) -> None:
        """A watch has shown the data, the owners' order ids, or that there is none (``None``)."""
        twin: Any = getattr(primitive, "_wrapped", primitive)
        node, name = twin._source.node, twin.name
        self.record(Observed(self.now(), self.process, observer, node, name, value))


def _as_it_is(instant: float) -> float:
    return instant


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, SemaphoreExists):
        return "exists"
    if isinstance(error, SemaphoreNotFound):
        return "missing"
    if isinstance(error, SemaphoreBusy):
        return "busy"
    return "refused" if isinstance(error, InvalidArgument) else "unknown"
