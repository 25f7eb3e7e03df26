"""A counting semaphore: at most `limit` tokens are held at a time, in strict FIFO order.

A lasting one is created and deleted. An ephemeral one has no limit that a program would meet, and
exists while it has an owner or a waiter: what counts is which owners it has, and their data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from tenure._client.acquire import acquire, join, settled, try_acquire
from tenure._client.blocks import begin_to_leave, note_loss, see_out
from tenure._client.contention import contention
from tenure._client.handles import AsyncHandle, Handle
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.options import RequestOptions
from tenure._client.probe import Probe
from tenure._client.request import Request
from tenure._client.request_states import HELD, WAITING
from tenure._client.scope import Scope
from tenure._client.source import SessionSource
from tenure._client.watch import Watch, described_now
from tenure.core import rules
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, InvalidArgument, Misuse, SemaphoreNotFound, Unsupported
from tenure.model import SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.session_core import SessionCore

__all__ = ["Semaphore", "Ticket", "recover"]

L = TypeVar("L", bound=Lease)


class Ticket(AsyncHandle, Generic[L]):
    """A place in a queue, and the way to the lease that comes of it.

    `Semaphore.enqueue` gives one; so does `recover`, for what a resumed session still had.

    The ticket owns the place: a `wait` that times out or is cancelled keeps it. Leaving the
    ``async with`` block withdraws the request, or releases the lease.
    """

    def __init__(self, request: Request, handle: Callable[[Request], L]) -> None:
        self._request = request
        self._lease = handle(request)
        self._scope: Scope | None = None

    def __repr__(self) -> str:
        return f"<Ticket for {self._lease!r}>"

    @property
    def granted(self) -> bool:
        """True while the request owns its tokens."""
        return self._request.held

    @property
    def fencing_token(self) -> int | None:
        """The fencing token that the lease has or will have; ``None`` while it is not known.

        Some stores report it only with the grant (`Capabilities.waiter_order`), some never.
        """
        return self._request.order_id

    async def position(self) -> int:
        """Return the place in the queue: 0 when granted, 1 for the next to be granted, and so on.

        It asks the store.

        Raises:
            LeaseLost, LeaseReleased, SemaphoreNotFound: the request has left the queue.
            EngineUnavailable: the store cannot be reached, or does not answer.
            SessionExpired, SessionClosed: the session is over.
            Unsupported: the store tells no order of its waiters (ydb, dflockd).
        """
        request = self._request
        session = request.session.alive()
        if request.state is HELD:
            return 0
        if request.state is not WAITING:
            raise request.why_not_held()
        if request.order_id is None:
            raise Unsupported(
                f"this engine does not tell a waiter its place (for {request.name!r} on "
                f"{request.node}); sqlite://, redis://, etcd:// and tenure:// do",
                node=request.node,
                name=request.name,
            )
        described = await session.contact.answered(
            f"queue of {request.name!r} on {request.node}",
            described_now(session, request.name, ephemeral=False, owners=True, waiters=True),
        )
        for place, waiter in enumerate(described.waiters, start=1):
            if waiter.order_id == request.order_id:
                return place
        if any(owner.order_id == request.order_id for owner in described.owners):
            return 0  # the grant is on its way here
        raise SemaphoreNotFound(
            f"the request for {request.name!r} on {request.node} has left its queue",
            node=request.node,
            name=request.name,
        )

    async def wait(self, timeout: Duration | None = None) -> L:
        """Wait for the grant; called again, it gives the same lease.

        Raises:
            AcquireTimeout: not granted in time; the place is kept. During an outage the message
                says so, and ``__cause__`` is the failure of the connection.
            SelfDeadlock: without a timeout, the calling task is inside what it waits for.
            SemaphoreNotFound: the semaphore was deleted by force.
            LeaseLost, LeaseReleased, SessionExpired, SessionClosed: it is over.
        """
        limit = timeout_seconds(timeout)
        request = self._request
        request.session.is_proven()  # for what it notices: a deadline, a fork
        expiry = asyncio.timeout(limit)
        probe = Probe(request, limit or 0.0)
        try:
            async with expiry:
                await settled(request, for_ever=limit is None)
        except TimeoutError:
            if not expiry.expired():
                raise
            obstacle = probe.obstacle()
        else:
            if request.held:
                return self._lease
            raise request.why_not_held()
        finally:
            probe.stop()
        waits = obstacle is None and request.state is WAITING
        who = f"; {await contention(request.session, request.name)}" if waits else ""
        why = who if obstacle is None else f", because {obstacle.clause}"
        raise AcquireTimeout(
            f"{request.options.kind} {request.name!r} on {request.node}: not acquired within "
            f"{limit:g} s{why}; the place in its queue is kept",
            node=request.node,
            name=request.name,
        ) from (None if obstacle is None else obstacle.cause)

    async def withdraw(self) -> None:
        """Leave the queue, or release the lease. Safe to call twice.

        Raises:
            LeaseLost: the lease had been lost before, also if that is news to this program. A
                waiter that had left the queue before is no error.
        """
        await self._lease.release()

    async def __aenter__(self) -> Ticket[L]:
        self._request.session.alive()
        if self._scope is not None:
            raise Misuse(
                f"the ticket for {self._lease.name!r} has been entered already",
                node=self._lease.node,
                name=self._lease.name,
            )
        self._enter()
        return self

    def _enter(self) -> None:
        # Nothing triggers it; it is there so that a wait inside knows what it is inside.
        self._scope = Scope(self._request)
        self._scope.enter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        self._scope.exit(error)
        request = self._request
        answer = begin_to_leave(request, error)
        if answer is not None:
            await see_out(request, answer, error)
        if request.loss is not None:
            if error is None:
                raise request.why_not_held()
            note_loss(request, error)


class Semaphore(Handle):
    """A counting semaphore on a node.

    It lasts until it is deleted, and must be created before it is used. Its limit never
    changes; its data (at most 1 MiB) can be replaced and watched.

    An ephemeral one needs no set-up: it appears with its first request and disappears with its
    last, and while it is away it is described as empty. Its limit is 2^64-1: a request for that
    many waits until it is alone, any other is granted at once unless such a one comes before it.
    It has no data of its own; its requests have theirs.

    Attributes:
        name: 1 to 1,024 bytes.
        ephemeral: true if it is used as an ephemeral semaphore. If a semaphore of that name is
            of the other kind, `InvalidArgument` is raised.
    """

    def __init__(self, source: SessionSource, name: str, *, ephemeral: bool = False) -> None:
        rules.check_name(name)
        self.name = name
        self.ephemeral = ephemeral
        self._source = source

    def __repr__(self) -> str:
        return f"<Semaphore {self.name!r}{' (ephemeral)' if self.ephemeral else ''}>"

    @property
    def node(self) -> str:
        """The path of its node."""
        return self._source.node

    async def create(self, limit: int, data: bytes = b"", *, exist_ok: bool = False) -> None:
        """Create the semaphore.

        Args:
            limit: how many tokens there are, 1 to 2^64-1; above 2^53-1 means "unbounded".
            data: what it carries.
            exist_ok: accept one that exists with the same limit (its data is not touched).

        Raises:
            SemaphoreExists: it exists; with `exist_ok`, it exists with another limit.
            InvalidArgument: a mutex or registry of that name is in use, or this is an
                ephemeral semaphore.
        """
        self._check_lasting("needs no creation: its first request makes it")
        session = await self._source.obtain()
        await session.race(
            session.engine.create_semaphore(self.name, limit, data, exist_ok=exist_ok)
        )

    async def update(self, data: bytes) -> None:
        """Replace the semaphore's data. Its watchers are notified, unless the bytes are equal.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            InvalidArgument: this is an ephemeral semaphore.
        """
        self._check_lasting("has no data of its own: a lease's data is changed by Lease.update")
        session = await self._source.obtain()
        await session.race(session.engine.update_semaphore(self.name, data))

    async def delete(self, *, force: bool = False) -> None:
        """Delete the semaphore.

        Args:
            force: even when it has owners, whose leases are lost, or waiters. Until the
                notification reaches an owner, it still considers its lease held.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            SemaphoreBusy: it has owners or waiters, and `force` is false.
        """
        session = await self._source.obtain()
        await session.race(session.engine.delete_semaphore(self.name, force=force))

    async def describe(
        self, *, owners: bool = False, waiters: bool = False
    ) -> SemaphoreDescription:
        """Describe the semaphore as it is now.

        Raises:
            SemaphoreNotFound: the semaphore does not exist. An ephemeral one is described as empty
                instead.
            EngineUnavailable: the store cannot be reached, or does not answer.
        """
        return await self._source.contact.answered(
            f"semaphore {self.name!r} on {self._source.node}",
            self._described_now(owners=owners, waiters=waiters),
        )

    async def _described_now(self, *, owners: bool, waiters: bool) -> SemaphoreDescription:
        session = await self._source.obtain()
        return await described_now(
            session, self.name, ephemeral=self.ephemeral, owners=owners, waiters=waiters
        )

    async def count(self) -> int:
        """Return the number of tokens held now. Raises as `describe`."""
        return (await self.describe()).held

    def acquire(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Lease]:
        """Acquire `count` tokens: ``async with pool.acquire(2) as lease``, or ``await`` it.

        Args:
            count: 1 to the limit.
            data: bytes of the request, which clients see in descriptions of the owners.
            timeout: seconds to wait, on the local clock; 0 tries; ``None`` waits until
                granted or the session ends.
            on_loss: what a loss does beside being raised; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                is given up that much earlier.

        Raises:
            AcquireTimeout: not granted in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            SemaphoreNotFound: the semaphore does not exist; `create` it.
            InvalidArgument: the count is not between 1 and the limit.
            SelfDeadlock: the calling task is inside what it waits for.
            SessionExpired, SessionClosed: the session is over.
        """
        options = self._options(count, data, on_loss, stop_time)
        return Once(options, acquire, self._source, options, timeout_seconds(timeout))

    async def try_acquire(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease | None:
        """Acquire `count` tokens if they are free and there are no waiters; else ``None``.

        Raises:
            AcquireTimeout: the store cannot be reached, or does not answer; ``__cause__`` is its
                failure.
        """
        return await try_acquire(self._source, self._options(count, data, on_loss, stop_time))

    def enqueue(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Ticket[Lease]]:
        """Join the queue now, and wait for the grant later, with the ticket.

        ``async with pool.enqueue() as ticket``, or ``await`` it. Raises as `acquire`.
        """
        options = self._options(count, data, on_loss, stop_time)
        return Once(options, _enqueue, self._source, options)

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Lease] | None:
        """Claim the first request for this semaphore of a resumed session, or return ``None``.

        A request is returned once. Its ticket then keeps it, can `wait` for it, or withdraws it.

        Args:
            on_loss, stop_time: as for `acquire`.
        """
        return recover(self._source, self._options(1, b"", on_loss, stop_time))

    def watch(self, *, data: bool = False, owners: bool = False) -> Watch[SemaphoreDescription]:
        """Watch the semaphore: its present state, then a newer one after each watched change.

        Args:
            data: watch the semaphore's data.
            owners: watch its owners, and their data.
        """
        return Watch(
            self._source,
            self.name,
            data=data,
            owners=owners,
            view=_as_it_is,
            ephemeral=self.ephemeral,
        )

    def _check_lasting(self, but: str) -> None:
        if self.ephemeral:
            raise InvalidArgument(
                f"{self.name!r} on {self.node} was asked for as ephemeral, and such a one {but}",
                node=self.node,
                name=self.name,
            )

    def _options(
        self, count: int, data: bytes, on_loss: OnLoss | None, stop_time: Duration
    ) -> RequestOptions[Lease]:
        return RequestOptions(
            "semaphore",
            self.name,
            count,
            data,
            handle=Lease,
            ephemeral=self.ephemeral,
            on_loss=on_loss,
            stop_time=stop_time,
        )


def _as_it_is(_session: SessionCore, described: SemaphoreDescription) -> SemaphoreDescription:
    return described


async def _enqueue(source: SessionSource, options: RequestOptions[Lease]) -> Ticket[Lease]:
    return Ticket(await join(source, options), options.handle)


def recover(source: SessionSource, options: RequestOptions[L]) -> Ticket[L] | None:
    """Return a ticket for the first recovered request that fits the options, if there is one.

    Raises:
        SessionExpired, SessionClosed: the session is over.
    """
    session = source.ready()
    request = None if session is None else session.claim(options)
    return None if request is None else Ticket(request, options.handle)
