"""Journal with which a program records a history of its own requests, data calls and watches.

A `Journal` belongs to one process. It passes each record to a *sink*, a callable that takes one
record: the ``append`` of a list, or an `AppendOnly` file, which loses no record when the process is
killed. Tasks use the asynchronous context managers (`lock`, `acquire`, `try_lock`, `campaign`,
`enqueue`, `recover`). Other programs, such as threads, use their parts::

    with (
        journal.request(mutex, timeout=5) as request,  # records how it ended
        mutex.lock(timeout=5) as lease,
        request.holds(lease),  # records that it is held, and from when it may not be held
    ):
        ...

When its task is cancelled or its session ended, a request is withdrawn before the task itself can
record anything. So the code that cancels or ends it must record that first, with `Request.leaves`
or `Journal.leaves`.

`share`, `all_of` and `any_of` record a request for each lock, and `take` one of a rate.

Records of one request by its program: the parts of the context managers of a `Journal`.

Rules:

* Only `Place.held` waits, so a cancellation leaves no incomplete record.
* Instants are conservative: the clock is read before an action that may end a request, and after an
  action that begins it. A `Held` record has the instant before the lease was checked.
* After `Leaves` no `Held` is recorded until the end, and the end is recorded once.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from tenure._client.election import Election
from tenure._client.internals import granted_at, key_request_of, lease_of, source_of
from tenure._client.lease import Lease
from tenure._client.mutex import Mutex
from tenure._client.once import Once
from tenure._client.rate import Rate, Taken
from tenure._client.semaphore import Semaphore, name_of_key
from tenure._client.session_core import SessionCore
from tenure._client.source import SessionSource
from tenure._client.ticket import Ticket
from tenure.clock import SystemClock
from tenure.core.rates import MICROSECONDS
from tenure.errors import (
    AcquireTimeout,
    Deadlock,
    InvalidArgument,
    LeaseLost,
    Misuse,
    RateExceeded,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
)
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.history.records import (
    Called,
    Deadlocked,
    Described,
    Gone,
    Granted,
    Held,
    Leaves,
    Observed,
    Operation,
    Outcome,
    Queued,
    Record,
    Refunds,
    Requested,
    Returned,
    Revokes,
    Shrinks,
    Takes,
    Took,
    Unobserved,
    Why,
)

if TYPE_CHECKING:
    from tenure import blocking
    from tenure._client.client import Client


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

    A `Deadlock` is recorded with the requests for which its tasks wait. So the name of each task
    must be the label of that request: call ``asyncio.current_task().set_name(request.label)``
    before a wait that may be part of a deadlock.

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

    def _deadlocked(self, error: Deadlock) -> None:
        waits = tuple(task.task for task in error.tasks)
        inside = tuple(order_id for task in error.tasks for _, order_id in task.leases)
        self._journal.record(Deadlocked(self._journal.now(), self.label, waits, inside))

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
        if self.lease is None and isinstance(error, Deadlock):
            self._deadlocked(error)
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


class Together:
    """Recorder of several requests that are held together, and leave together.

    Attributes:
        requests: the recorders.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)

    def sample(self) -> bool:
        """Return true if all leases are held, and record each that is."""
        held = [each.sample() for each in self.requests]
        return all(held)

    def leaves(self) -> None:
        """Record that all are about to be released."""
        for each in self.requests:
            each.leaves()

    @contextmanager
    def holds(self, leases: Sequence[Holding]) -> Iterator[Together]:
        """Record the block in which the leases are held, in the order of the requests."""
        with ExitStack() as held:
            for request, lease in zip(self.requests, leases, strict=True):
                held.enter_context(request.holds(lease))
            yield self


class _OfKey:
    """The tokens of a key that a lease has, as a lease of their own.

    They are lost with the lease, or with the session.
    """

    def __init__(self, lease: Lease) -> None:
        request = key_request_of(lease)
        assert request is not None
        self._lease = lease
        self._request = request

    @property
    def held(self) -> bool:
        return self._lease.held and self._request.held

    @property
    def deadline(self) -> float:
        return self._lease.deadline

    @property
    def loss(self) -> LeaseLost | None:
        return self._lease.loss

    @property
    def fencing_token(self) -> int:
        order_id = self._request.order_id
        assert order_id is not None
        return order_id


class Take:
    """Recorder of one take of a rate. `Journal.take` returns one.

    Attributes:
        label: the label of the take, unique in the history.
        taken: the tokens.
    """

    def __init__(self, journal: Journal, label: str, taken: Taken) -> None:
        self.label = label
        self.taken = taken
        self._journal = journal

    async def refund(self, count: int) -> None:
        """Call ``await taken.refund(count)``, and record it."""
        self._journal.record(Refunds(self._journal.now(), self.label, count))
        await self.taken.refund(count)


Wanted: TypeAlias = Mutex | tuple[Semaphore, int, int]
"""One of several locks: a mutex, or a lasting semaphore with a count and its limit."""


def _no_data(_: Request) -> bytes:
    return b""


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


Primitive: TypeAlias = (
    "Mutex | Semaphore | Election | blocking.Mutex | blocking.Semaphore | blocking.Election"
)
"""Primitive whose request is recorded; the classes of `tenure.blocking` are accepted, too."""


class DataCall:
    """Call on a semaphore's data, within `Journal.call`. Set `result` to the data that was read."""

    __slots__ = ("result",)

    def __init__(self) -> None:
        self.result: bytes | None = None


class Journal:
    """Journal of one process.

    Args:
        process: the label of this incarnation.
        record: the sink; it is called on the thread on which the recorded event happens.
        now: the clock of the common time scale.
        to_common: the conversion from the client's own clock (`tenure.Client.clock`) to the common
            time scale; the identity if they are the same, as on one host.
        fencing: whether the engine's leases have fencing tokens.

    Attributes:
        process, record, now, to_common, fencing: the arguments.
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
        """Start without requests; `record` receives each record."""
        self.process = process
        self.record = record
        self.now = SystemClock().now if now is None else now
        self.to_common = _as_it_is if to_common is None else to_common
        self.fencing = fencing
        self._labels = itertools.count(1)
        self._open: dict[str, Request] = {}

    def label(self) -> str:
        """Return a new label. It is unique in the history if process labels are unique."""
        return f"{self.process}-{next(self._labels)}"

    # Requests

    def request(
        self,
        primitive: Primitive,
        count: int | None = None,
        *,
        limit: int | None = None,
        timeout: float | None = None,
        recovers: str | None = None,
        label: str | None = None,
        key: str | None = None,
    ) -> Request:
        """Record that a request is about to be made.

        Args:
            primitive: the primitive that is requested.
            count: the number of a semaphore's tokens; 1 if omitted.
            limit: the limit of a lasting semaphore, which the journal cannot know.
            timeout: seconds after which the request may have ended: its own timeout, or less if it
                may be ended sooner.
            recovers: the label of the request of a resumed session that this one continues.
            label: a label for the request, instead of a new one.
            key: the label of the request for tokens of its key, if each key has a limit.

        Raises:
            Misuse: `limit` is omitted for a lasting semaphore.
        """
        wrapped: Any = getattr(primitive, "_wrapped", primitive)
        if isinstance(wrapped, Mutex):
            count = limit = EPHEMERAL_LIMIT
        elif isinstance(wrapped, Election):
            count = limit = 1
        elif wrapped.ephemeral:
            limit = EPHEMERAL_LIMIT
        elif limit is None:
            raise Misuse(f"the limit of semaphore {wrapped.name!r} is missing", name=wrapped.name)
        source = source_of(wrapped)
        request = Request(self, self.label() if label is None else label, source)
        self._open[request.label] = request
        self.record(
            Requested(
                self.now(),
                self.process,
                request.label,
                source.node,
                wrapped.name,
                1 if count is None else count,
                limit,
                source.recovery_window,
                timeout,
                recovers,
                key,
            )
        )
        return request

    def leaves(self) -> None:
        """Record that all requests may leave. Call it before a session or client is ended."""
        for request in list(self._open.values()):
            request.leaves()

    def forget(self, request: Request) -> None:
        """Remove an ended request from the open requests, which `leaves` records."""
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
        """Record that an administrator is about to revoke requests; see `Revokes`."""
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
        """Record the block in which an administrator revokes requests, at its start and end."""
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
        """Enter ``async with mutex.lock(...)``, and record it."""
        with self.request(mutex, timeout=timeout) as request:
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
        """Enter ``async with semaphore.acquire(count, ...)``, and record it.

        Args:
            semaphore: the semaphore.
            count: the number of tokens.
            limit: the semaphore's limit, if it is a lasting one.
            timeout: seconds to wait for the grant.
            options: further arguments of `Semaphore.acquire`.
        """
        with self.request(semaphore, count, limit=limit, timeout=timeout) as request:
            async with semaphore.acquire(count, timeout=timeout, **options) as lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def share(
        self,
        semaphore: Semaphore,
        count: int = 1,
        *,
        key: str,
        limit: int,
        per_key: int,
        timeout: float | None = None,
        data: Callable[[Request], bytes] = _no_data,
    ) -> AsyncIterator[Together]:
        """Enter ``async with semaphore.acquire(count, key=key, ...)``, and record both requests.

        The request for tokens of the key has the label of the other one with ``/key``.

        Args:
            semaphore: the semaphore, with a limit for each key.
            count: the number of tokens.
            key: the key.
            limit: the semaphore's limit.
            per_key: the limit of each key.
            timeout: seconds to wait for the grant.
            data: returns the request's data.
        """
        label = self.label()
        of_key = Semaphore(source_of(semaphore), name_of_key(semaphore.name, key))
        its_label = f"{label}/key"
        with (
            self.request(of_key, count, limit=per_key, timeout=timeout, label=its_label) as first,
            self.request(
                semaphore, count, limit=limit, timeout=timeout, label=label, key=its_label
            ) as second,
        ):
            acquiring = semaphore.acquire(count, key=key, timeout=timeout, data=data(second))
            async with acquiring as lease:
                with Together([first, second]).holds([_OfKey(lease), lease]) as both:
                    yield both

    @asynccontextmanager
    async def all_of(
        self,
        client: Client,
        *locks: Wanted,
        timeout: float | None = None,
        data: Callable[[Request], bytes] = _no_data,
    ) -> AsyncIterator[Together]:
        """Enter ``async with client.all_of(...)``, and record a request for each lock.

        Args:
            client: the client.
            locks: the locks.
            timeout: seconds to wait for all.
            data: returns a request's data.
        """
        with ExitStack() as recorded:
            requests = [recorded.enter_context(self._one_of(each, timeout)) for each in locks]
            calls = [_call(each, data(its)) for each, its in zip(locks, requests, strict=True)]
            async with client.all_of(*calls, timeout=timeout) as leases:
                with Together(requests).holds(leases) as together:
                    yield together

    @asynccontextmanager
    async def any_of(
        self,
        client: Client,
        *locks: Wanted,
        timeout: float | None = None,
        data: Callable[[Request], bytes] = _no_data,
    ) -> AsyncIterator[Request]:
        """Enter ``async with client.any_of(...)``, and record a request for each lock.

        The block receives the one that is held. The others have been withdrawn. The arguments are
        those of `all_of`.
        """
        with ExitStack() as recorded:
            requests = [recorded.enter_context(self._one_of(each, timeout)) for each in locks]
            calls = [_call(each, data(its)) for each, its in zip(locks, requests, strict=True)]
            async with client.any_of(*calls, timeout=timeout) as lease:
                names = [_primitive(each).name for each in locks]
                held = requests[names.index(lease.name)]
                for each in requests:
                    if each is not held:
                        each.gone("withdrawn")
                with held.holds(lease):
                    yield held

    def _one_of(self, lock: Wanted, timeout: float | None) -> Request:
        if isinstance(lock, Mutex):
            return self.request(lock, timeout=timeout)
        semaphore, count, limit = lock
        return self.request(semaphore, count, limit=limit, timeout=timeout)

    @asynccontextmanager
    async def campaign(
        self,
        election: Election,
        data: bytes = b"",
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> AsyncIterator[Request]:
        """Enter ``async with election.campaign(data, ...)``, and record it."""
        with self.request(election, timeout=timeout) as request:
            async with election.campaign(data, timeout=timeout, **options) as lease:
                with request.holds(lease):
                    yield request

    @asynccontextmanager
    async def try_lock(self, mutex: Mutex, **options: Any) -> AsyncIterator[Request | None]:
        """Call ``await mutex.try_lock(...)``, enter the block of its lease, and record it.

        The block receives ``None`` if there is no lease.
        """
        with self.request(mutex, timeout=0.0) as request:
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
        """Enter ``async with semaphore.enqueue(count, ...)``, and record it."""
        with self.request(semaphore, count, limit=limit) as request:
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
        """Enter ``async with primitive.recover(...)``, and record it.

        The block receives ``None`` if there is nothing to recover.

        Args:
            primitive: the primitive that is recovered.
            limit: the limit, if the primitive is a lasting semaphore.
            recovers: the label of the request in its former process, if known.
            options: further arguments of `recover`.
        """
        ticket: Ticket[Any] | None = primitive.recover(**options)
        if ticket is None:
            yield None
            return
        count = lease_of(ticket).count
        with self.request(primitive, count, limit=limit, recovers=recovers) as request:
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
        """Record the block in which one call is made on a semaphore.

        An exception that the block raises determines the outcome.

        ``with journal.call(config, "read") as call: call.result = (await config.describe()).data``
        """
        wrapped: Any = getattr(semaphore, "_wrapped", semaphore)
        label = self.label()
        node, name = source_of(wrapped).node, wrapped.name
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
        """Call ``await semaphore.create(limit, data)``, and record it."""
        with self.call(semaphore, "create", data):
            await semaphore.create(limit, data)

    async def update(self, semaphore: Semaphore, data: bytes) -> None:
        """Call ``await semaphore.update(data)``, and record it."""
        with self.call(semaphore, "update", data):
            await semaphore.update(data)

    async def resize(self, semaphore: Semaphore, limit: int) -> None:
        """Call ``await semaphore.resize(limit)``, and record it."""
        with self.call(semaphore, "resize", b"%d" % limit):
            await semaphore.resize(limit)

    async def delete(self, semaphore: Semaphore) -> None:
        """Call ``await semaphore.delete()``, and record it."""
        with self.call(semaphore, "delete"):
            await semaphore.delete()

    async def read(self, semaphore: Semaphore) -> bytes:
        """Return the semaphore's data, and record the call."""
        with self.call(semaphore, "read") as call:
            call.result = data = (await semaphore.describe()).data
        return data

    async def describe(self, semaphore: Semaphore) -> None:
        """Call ``await semaphore.describe(owners=True, waiters=True)``, and record the queue."""
        found = await semaphore.describe(owners=True, waiters=True)
        owners = tuple(each.order_id for each in found.owners)
        waiters = tuple(each.order_id for each in found.waiters)
        at, node = self.now(), source_of(semaphore).node
        self.record(Described(at, self.process, node, semaphore.name, owners, waiters))

    # Rates

    async def take(self, rate: Rate, count: int = 1, *, timeout: float | None = None) -> Take:
        """Call ``await rate.take(count, timeout=timeout)``, and record it.

        Raises:
            Exception: the errors of `Rate.take`.
        """
        label, per = self.label(), round(rate.per * MICROSECONDS)
        rule = (rate.limit, per, rate.burst)
        self.record(Takes(self.now(), self.process, label, rate.node, rate.name, count, *rule))
        try:
            taken = await rate.take(count, timeout=timeout)
        except RateExceeded:
            self.record(Took(self.now(), label))
            raise
        self.record(Took(self.now(), label, granted_at(taken), taken.waited))
        return Take(self, label, taken)

    def unobserved(self, observer: str) -> None:
        """Record that a watch has ended before the end of the history."""
        self.record(Unobserved(self.now(), self.process, observer))

    def observed(
        self, observer: str, primitive: Primitive, value: bytes | tuple[int, ...] | None
    ) -> None:
        """Record the value that a watch has shown.

        Args:
            observer: the label of the watch.
            primitive: the watched primitive.
            value: the data, the owners' order ids, or ``None`` if there is no such semaphore.
        """
        wrapped: Any = getattr(primitive, "_wrapped", primitive)
        node, name = source_of(wrapped).node, wrapped.name
        self.record(Observed(self.now(), self.process, observer, node, name, value))


def _primitive(lock: Wanted) -> Mutex | Semaphore:
    return lock if isinstance(lock, Mutex) else lock[0]


def _call(lock: Wanted, data: bytes) -> Once[Lease]:
    if isinstance(lock, Mutex):
        return lock.lock(data=data)
    semaphore, count, _ = lock
    return semaphore.acquire(count, data=data)


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
