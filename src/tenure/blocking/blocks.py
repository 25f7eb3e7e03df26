"""Blocks of `tenure.blocking`: entering and leaving wrappers, and undo functions.

`tools.sync` generates the rest of the classes for which these are bases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from tenure._client import lease as async_lease
from tenure._client import session_handle as async_session
from tenure._client import ticket as async_ticket
from tenure._client.guarding import guard_in_thread
from tenure._client.internals import (
    abandon_entered,
    check_enterable,
    enter_lease,
    entered_lease,
    lease_of,
    leave_entered,
    leave_ticket,
    note_lease_site,
    note_session_site,
    put_back,
    request_of,
    session_core,
)
from tenure.blocking.covered import covered
from tenure.blocking.portal import Portal
from tenure.blocking.wrapper import SyncWrapper, insist, obtaining, releasing, wrap
from tenure.durations import Duration, timeout_seconds
from tenure.errors import LeaseLost, TenureError

A = TypeVar("A", bound=async_lease.Acquirable)
L = TypeVar("L")
R = TypeVar("R")
T = TypeVar("T")


def as_it_is(_portal: Portal, given: T) -> T:
    """Return a result that needs no wrapper."""
    return given


def undo_acquire(lease: async_lease.Lease | None) -> None:
    """Undo the acquisition of a lease."""
    if lease is not None:
        request_of(lease).withdraw()


def abandon_ticket(ticket: async_ticket.Ticket[Any]) -> None:
    """Undo the creation of a ticket, or entering it."""
    leave_ticket(ticket)
    undo_acquire(lease_of(ticket))


def abandon_session(session: async_session.SessionHandle, *, detach: bool = False) -> None:
    """Undo attaching a session, or entering it."""
    core = session_core(session)
    if core.scope is not None and core.scope.task is not None:
        core.scope.exit(None)
    core.close_soon(detach=detach)


def optional(handle: Callable[[Portal, Any], R]) -> Callable[[Portal, Any], R | None]:
    """Return a function that wraps a value unless it is ``None``."""
    return lambda portal, wrapped: None if wrapped is None else handle(portal, wrapped)


class LeaseBlock(SyncWrapper[async_lease.Lease]):
    """Entering, leaving and waiting for the loss of a lease."""

    __slots__ = ()

    def __init__(self, portal: Portal, wrapped: async_lease.Lease) -> None:
        super().__init__(portal, wrapped)
        note_lease_site(wrapped)

    def check(self) -> None:
        """Raise unless the lease is held. Useful in loops and threads.

        Raises:
            LeaseLost: it was lost, or another lease whose block the calling thread is inside.
            LeaseReleased: it was released.
        """
        self._portal.check_blocks()
        self._wrapped.check()

    def guard(self, connection: object) -> None:
        """Let the transaction of `connection` succeed only while the lease is held.

        For a store in PostgreSQL, and a transaction in the same database. Call it before the first
        write. Until the transaction ends, the store grants the lease to no other request, even if
        this program is paused meanwhile. `release` waits for the end of the transaction, so end it
        before the lease's block. The statement runs in the calling thread.

        Example::

            import psycopg
            from tenure import blocking

            with (
                blocking.connect("postgresql:///jobs") as client,
                client.mutex("report").lock() as lease,
                psycopg.connect("dbname=jobs") as connection,
            ):
                lease.guard(connection)
                connection.execute("CREATE TABLE report (body text)")

        Args:
            connection: a ``Connection`` or ``Cursor`` of psycopg, a ``connection`` or ``cursor`` of
                psycopg2, a ``Connection`` or ``Session`` of SQLAlchemy on one of these, or
                ``django.db.connection``.

        Raises:
            LeaseLost: the lease is no longer held, by this program's clock or in the database. Roll
                the transaction back. Or another lease was lost whose block the calling thread is
                inside.
            LeaseReleased: it was released.
            Unsupported: the store is not in PostgreSQL, or is reached through a server; see
                `tenure.fencing`.
            InvalidArgument: `connection` is of another type.
            Misuse: no transaction is open, so the guard ended with its statement.
            Exception: any other error of the driver, such as a serialization failure.
        """
        self._portal.check_blocks()
        guard_in_thread(request_of(self._wrapped), connection)

    def wait_lost(self, timeout: Duration | None = None) -> LeaseLost | None:
        """Wait until the lease is lost, and return the loss; return ``None`` after `timeout`.

        Args:
            timeout: seconds; ``None`` for no limit.

        Raises:
            LeaseReleased: it was released instead.
        """
        return self._portal.call(_wait_lost, self._wrapped, timeout_seconds(timeout))

    @covered
    def __enter__(self) -> Self:
        """Enter the lease, like ``async with``; a lost lease raises its loss."""
        try:
            self._enter()
            return self
        except TenureError:
            raise  # an error leaves the lease as it was
        except BaseException as interruption:
            # The block will not be left, because no thread has entered it.
            insist(interruption, self._undo_entering, (interruption,))
            raise

    def _enter(self) -> None:
        portal = self._portal
        portal.check_caller()
        portal.check_blocks()
        task = portal.task()
        check_enterable(self._wrapped)
        enter_lease(self._wrapped, task)

    def _undo_entering(self, interruption: BaseException) -> None:
        scope = request_of(self._wrapped).scope
        if scope is None or scope.task is None:
            self._portal.release(self._wrapped.release)
        elif scope.task is self._portal.task():  # not one that another thread has entered
            self._portal.leave(self._wrapped.__aexit__, type(interruption), interruption, None)

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lease, or raise `LeaseLost`."""
        self._portal.leave(self._wrapped.__aexit__, kind, error, trace)


class AcquirableBlock(SyncWrapper[A], Generic[A, L]):
    """Entering and leaving a primitive itself, which acquires a lease of it."""

    __slots__ = ()

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:

        def __call__(self, *_):
            """Raise a `TypeError`: a primitive is no decorator."""
            raise TypeError(
                f"{self!r} is no decorator, and is not called: write 'with' inside the function, "
                "or @client.exclusive(name) or @client.limited(name, limit) above it"
            )

    @obtaining
    def __enter__(self) -> L:
        """Acquire a lease, and enter it. Any number of threads may be inside at once, in turn."""
        portal, wrapped = self._portal, self._wrapped
        given: L = portal.obtain(wrap, partial(abandon_entered, wrapped), wrapped.__aenter__)
        return given

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lease that this thread acquired last, or raise `LeaseLost`."""
        lease = entered_lease(self._wrapped, self._portal.task())
        self._portal.leave(partial(leave_entered, self._wrapped, lease), kind, error, trace)


class TicketBlock(SyncWrapper["async_ticket.Ticket[Any]"], Generic[L]):
    """Entering and leaving a ticket.

    Args:
        portal: the portal to the event loop.
        wrapped: the asynchronous ticket.
        handle: the wrapper class of its lease.
    """

    __slots__ = ("_handle",)

    def __init__(
        self,
        portal: Portal,
        wrapped: async_ticket.Ticket[Any],
        handle: Callable[[Portal, Any], L],
    ) -> None:
        """Wrap an asynchronous ticket; `handle` wraps its lease."""
        super().__init__(portal, wrapped)
        self._handle = handle
        note_lease_site(lease_of(wrapped))

    @covered
    def __enter__(self) -> Self:
        """Enter the block that owns the request."""
        try:
            self._portal.call(self._wrapped.__aenter__)
            return self
        except TenureError:
            raise  # an error leaves the ticket as it was
        except BaseException as interruption:
            insist(interruption, self._portal.undo, (abandon_ticket, self._wrapped))
            raise

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Withdraw the request, or release its lease."""
        self._portal.leave(self._wrapped.__aexit__, kind, error, trace)


class SessionBlock(SyncWrapper[async_session.SessionHandle]):
    """Entering and leaving a session."""

    __slots__ = ()

    def __init__(self, portal: Portal, wrapped: async_session.SessionHandle) -> None:
        super().__init__(portal, wrapped)
        note_session_site(wrapped)

    @covered
    def __enter__(self) -> Self:
        """Attach the session, unless it is attached."""
        try:
            self._portal.call(self._wrapped.__aenter__)
            return self
        except TenureError:
            raise  # an error leaves the session as it was
        except BaseException as interruption:
            insist(interruption, self._portal.undo, (abandon_session, self._wrapped))
            raise

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the session."""
        self._portal.leave(self._wrapped.__aexit__, kind, error, trace)


class _AsyncStream(Protocol[T]):  # noqa: PYI046  it is named in a base, as text
    async def __anext__(self) -> T: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def _put_back(self, item: T) -> None: ...


class Stream(SyncWrapper["_AsyncStream[T]"], Generic[T]):
    """Iterating over a stream, and leaving its block."""

    __slots__ = ()

    def __enter__(self) -> Self:
        """Enter the block that closes the stream at its end."""
        return self

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the stream."""
        self._portal.leave(self._wrapped.__aexit__, kind, error, trace)

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    @obtaining
    def __next__(self) -> T:
        """Wait for the next item and return it."""
        wrapped = self._wrapped
        try:
            return self._portal.obtain(as_it_is, partial(put_back, wrapped), wrapped.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


async def _wait_lost(lease: async_lease.Lease, timeout: float | None) -> LeaseLost | None:
    expiry = asyncio.timeout(timeout)
    try:
        async with expiry:
            return await lease.wait_lost()
    except TimeoutError:
        if not expiry.expired():
            raise
        return None
