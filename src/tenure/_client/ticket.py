"""A ticket: the place of a request in a queue, apart from the wait for its grant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from tenure._client.acquire import Probe, contention, join, settled
from tenure._client.handles import AsyncHandle, CallSite
from tenure._client.lease import Lease, finish_leaving, note_loss, start_leaving
from tenure._client.request import HELD, WAITING, Request, RequestOptions
from tenure._client.scope import Scope
from tenure._client.session_core import Contention, session_of
from tenure._client.source import SessionSource
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, Misuse, SemaphoreNotFound, Unsupported
from tenure.model import FULL_STORES

L = TypeVar("L", bound=Lease)


class Ticket(AsyncHandle, Generic[L]):
    """A request's place in a queue, with access to its lease.

    `Mutex.enqueue` and `Semaphore.enqueue` return one, and so does `recover`, for a request of a
    resumed session.

    The ticket owns the place: a `wait` that times out or is cancelled keeps it. Leaving the
    ``async with`` block withdraws the request, or releases the lease.

    Example::

        gpus = session.semaphore("gpu")
        await gpus.create(limit=4, exist_ok=True)
        async with gpus.enqueue() as ticket:
            lease = await ticket.wait(timeout=30)
            await work(lease.fencing_token)
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
        """The fencing token that the lease has or will have; ``None`` while it is unknown.

        Some stores report it only with the grant (`Capabilities.waiter_order`), some never.
        """
        return self._request.order_id

    async def position(self) -> int:
        """Return the place in the queue: 0 when granted, 1 for the next to be granted, and so on.

        The store is read at each call. At ``redis://`` the cost hardly depends on the length of
        the queue; other stores read the whole queue.

        Raises:
            LeaseLost, LeaseReleased, SemaphoreNotFound: the request has left the queue.
            EngineUnavailable: the store cannot be reached, or does not answer.
            SessionExpired, SessionClosed: the session has ended.
            Unsupported: the store reports no order id to a waiter (ydb, dflockd).
        """
        request = self._request
        session = session_of(request).alive()
        if request.state is HELD:
            return 0
        if request.state is not WAITING:
            raise request.why_not_held()
        if request.order_id is None:
            raise Unsupported(
                f"this engine does not report a waiter's position (for {request.name!r} on "
                f"{request.node}); {FULL_STORES} do",
                node=request.node,
                name=request.name,
            )
        place = await session.contact.answered(
            f"queue of {request.name!r} on {request.node}",
            session.race(session.engine.position(request.name, request.order_id)),
        )
        if place is not None:
            return place
        raise SemaphoreNotFound(
            f"the request for {request.name!r} on {request.node} has left its queue",
            node=request.node,
            name=request.name,
        )

    async def wait(self, timeout: Duration | None = None) -> L:
        """Wait for the grant. Every call returns the same lease.

        Raises:
            AcquireTimeout: not granted in time; the place is kept. During an outage the message
                says so, and ``__cause__`` is the failure of the connection.
            Deadlock: this wait is the victim of a deadlock, in a session that was opened with
                ``on_deadlock="raise"``; the place is kept.
            SelfDeadlock: without a timeout, what the program holds prevents the grant, and no other
                task is known that could release it (see `tenure.SelfDeadlock`).
            SemaphoreNotFound: the semaphore was deleted by force.
            LeaseLost, LeaseReleased, SessionExpired, SessionClosed: the request or the session has
                ended.
        """
        limit = timeout_seconds(timeout)
        request = self._request
        # For its side effects: it notices a passed deadline, and a fork.
        request.session.is_proven()
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
        text, holders = (
            await contention(session_of(request), request.name) if waits else Contention("")
        )
        held = f"; {text}" if waits else ""
        why = held if obstacle is None else f", because {obstacle.clause}"
        raise AcquireTimeout(
            f"{request.options.kind} {request.name!r} on {request.node}: not acquired within "
            f"{limit:g} s{why}; the place in its queue is kept",
            node=request.node,
            name=request.name,
            holders=holders,
            position=probe.position if waits else None,
        ) from (None if obstacle is None else obstacle.cause)

    async def withdraw(self) -> None:
        """Leave the queue, or release the lease. Safe to call twice.

        Raises:
            LeaseLost: the lease was lost before, even if only the release reveals it. For a waiter
                that had left the queue before, nothing is raised.
        """
        await self._lease.release()

    async def __aenter__(self) -> Ticket[L]:
        session_of(self._request).alive()
        if self._scope is not None:
            raise Misuse(
                f"the ticket for {self._lease.name!r} has been entered already",
                node=self._lease.node,
                name=self._lease.name,
            )
        self._enter()
        return self

    def _enter(self) -> None:
        # Never triggered; its presence lets a wait inside detect a self-deadlock.
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
        answer = start_leaving(self, request, error)
        if answer is not None:
            await finish_leaving(request, answer, error)
        if request.loss is not None:
            if error is None:
                raise request.why_not_held()
            note_loss(request, error)


async def enqueue(source: SessionSource, options: RequestOptions[L], site: CallSite) -> Ticket[L]:
    """Join the queue. Raises as `acquire`, but for a timeout."""
    return Ticket(await join(source, options, site), options.handle)


def recover(source: SessionSource, options: RequestOptions[L], site: CallSite) -> Ticket[L] | None:
    """Return a ticket for the first recovered request that matches the options, or ``None``.

    Raises:
        SessionExpired, SessionClosed: the session has ended.
    """
    session = source.ready()
    request = None if session is None else session.claim(options, site)
    return None if request is None else Ticket(request, options.handle)
