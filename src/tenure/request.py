"""Placing a request in a queue and waiting for its grant: what every primitive's acquire is.

Whatever ends the wait (a grant, a timeout, a cancellation, a loss), the request either became a
held lease that the caller was given, or it has left the queue. `Wanted` says what is asked for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from tenure.durations import Duration, seconds
from tenure.engines.contract import Enqueued, Place, Removal
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    SelfDeadlock,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.events import TimedOut
from tenure.lease import GONE, HELD, WAITING, Lease, OnLoss
from tenure.model import EPHEMERAL_LIMIT
from tenure.scope import entered_scopes

if TYPE_CHECKING:
    from tenure.session import Session

__all__ = ["SessionSource", "Wanted", "acquire", "join", "try_acquire", "wait_granted"]


class SessionSource(Protocol):
    """Where a primitive finds its session: a session itself, or a client's implicit one."""

    async def _obtain(self) -> Session: ...


class Wanted:
    """What is asked for: so many tokens of a semaphore, and what becomes of the lease."""

    __slots__ = ("count", "data", "ephemeral", "handle", "kind", "name", "on_loss", "stop_time")

    def __init__(
        self,
        kind: str,
        name: str,
        count: int,
        data: bytes,
        *,
        ephemeral: bool,
        on_loss: OnLoss | None,
        stop_time: Duration,
        handle: type[Lease] = Lease,
    ) -> None:
        self.kind = kind
        self.name = name
        self.count = count
        self.data = data
        self.ephemeral = ephemeral
        self.on_loss = on_loss
        self.stop_time = seconds(stop_time, "a stop time") if stop_time else 0.0
        self.handle = handle


async def join(session: Session, wanted: Wanted, timeout: float | None) -> Lease:
    """Place a request; the lease it returns is held, waiting, or gone (timeout 0, refused).

    A failed or cancelled call leaves nothing in the queue.
    """
    lease = session._request(wanted)
    try:
        answer = session._engine.enqueue(
            lease._hold,
            wanted.name,
            wanted.count,
            wanted.data,
            timeout=timeout,
            ephemeral=wanted.ephemeral,
        )
        placed = answer if isinstance(answer, Enqueued) else await answer
    except (InvalidArgument, SemaphoreNotFound, SessionExpired):
        session._forget(lease)  # refused: it never was in the queue
        raise
    except BaseException as error:
        _give_up(lease, error)
        raise
    if placed.place is Place.GRANTED:
        lease._grant(placed.order_id)
    elif placed.place is Place.REFUSED:
        lease._state = GONE
        session._forget(lease)
    elif lease._order_id is None:
        lease._order_id = placed.order_id
    return lease


def _give_up(lease: Lease, error: BaseException) -> None:
    """Take the request back because of `error`, which stays the error that is raised.

    Nobody waits for the store's answer: a timeout or a cancellation takes effect even when the
    store is out of reach, and the session sees the withdrawal through.
    """
    if lease._state is WAITING or lease._state is HELD:
        lease._state = GONE
    try:
        lease.session._withdraw(lease)
    except TenureError as failure:
        error.add_note(
            f"and withdrawing the request for {lease.name!r} on {lease.node} failed: {failure}"
        )


async def wait_granted(lease: Lease, *, for_ever: bool) -> None:
    """Wait until the lease is held, leaving its place alone whatever happens.

    Raises:
        SelfDeadlock: with `for_ever`, the calling task itself is inside what it waits for.
        SemaphoreNotFound, LeaseLost, SessionExpired, SessionClosed: it will not be granted.
    """
    if lease._state is WAITING:
        if for_ever:
            await _check_self_deadlock(lease)
        await lease._wait_settled()
    if lease._state is not HELD:
        if lease._loss is not None:
            raise lease._copy_of_loss()
        raise lease._refusal()


async def acquire(source: SessionSource, wanted: Wanted, timeout: float | None) -> Lease:
    """Acquire; the timeout runs on the local clock from this call on.

    Raises:
        AcquireTimeout: not granted in time; with timeout 0, not free.
    """
    if timeout is None:
        return await _acquire(await source._obtain(), wanted, None)
    if timeout == 0:
        lease = await try_acquire(source, wanted)
        if lease is None:
            raise _timed_out(wanted, timeout)
        return lease
    session: Session | None = None
    try:
        async with asyncio.timeout(timeout):
            session = await source._obtain()
            return await _acquire(session, wanted, timeout)
    except AcquireTimeout:
        raise
    except TimeoutError:
        if session is not None:
            session._tell(TimedOut(session.node, session.id, wanted.name, timeout))
        raise _timed_out(wanted, timeout) from None


async def _acquire(session: Session, wanted: Wanted, timeout: float | None) -> Lease:
    lease = await join(session, wanted, timeout)
    if lease._state is HELD:
        return lease
    try:
        await wait_granted(lease, for_ever=timeout is None)
    except BaseException as error:
        _give_up(lease, error)
        if lease._removal is Removal.TIMED_OUT:
            raise TimeoutError from None
        raise
    return lease


async def try_acquire(source: SessionSource, wanted: Wanted) -> Lease | None:
    """Acquire if that is possible at once, without passing anyone who waits.

    Raises:
        AcquireTimeout: the store did not answer within the session's recovery window.
    """
    session = await source._obtain()
    try:
        async with asyncio.timeout(session.recovery_window):
            lease = await join(session, wanted, 0)
    except AcquireTimeout:
        raise
    except TimeoutError:
        raise AcquireTimeout(
            f"the store did not answer within {session.recovery_window:g} s whether "
            f"{wanted.kind} {wanted.name!r} on {session.node} is free",
            node=session.node,
            name=wanted.name,
        ) from None
    return lease if lease._state is HELD else None


def _timed_out(wanted: Wanted, timeout: float) -> AcquireTimeout:
    waited = f"within {timeout:g} s" if timeout else "at once"
    return AcquireTimeout(
        f"{wanted.kind} {wanted.name!r} was not granted {waited}; "
        "'tenure describe' shows who holds it and who waits",
        name=wanted.name,
    )


async def _check_self_deadlock(lease: Lease) -> None:
    """Raise when what the current task is inside can never leave room for this request.

    Only leases count whose blocks this very task has entered: another task may release what
    it holds, this one waits.
    """
    mine = sum(
        scope.owner._count
        for scope in entered_scopes(asyncio.current_task())
        if isinstance(scope.owner, Lease)
        and scope.owner._state is HELD
        and scope.owner.name == lease.name
        and scope.owner.node == lease.node
        and scope.owner.session._client.url == lease.session._client.url
    )
    if not mine:
        return
    limit = EPHEMERAL_LIMIT
    if lease._count != EPHEMERAL_LIMIT:
        described = await lease.session._engine.describe_semaphore(
            lease.name, owners=False, waiters=False
        )
        limit = described.limit
    if mine + lease._count > limit and lease._state is WAITING:
        raise SelfDeadlock(
            f"this task is inside a lease of {lease.name!r} on {lease.node} and waits, without a "
            "timeout, for another one that does not fit beside it: it would wait for ever. "
            "Tenure's locks are not re-entrant; pass the lease on instead, or give a timeout",
            node=lease.node,
            name=lease.name,
        )
