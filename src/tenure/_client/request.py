"""Placing a request in a queue and waiting for its grant: what every primitive's acquire is.

Whatever ends the wait (a grant, a timeout, a cancellation, a loss), the request either became a
held lease that the caller was given, or it has left the queue. `Wanted` says what is asked for.

Nobody waits for the store when giving up: a timeout or a cancellation takes effect even when the
store is out of reach, and the session sees the withdrawal through.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from tenure._client.contention import contention
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss, check_policy
from tenure._client.probe import Probe
from tenure._client.requested import ASKED, HELD, WAITING
from tenure._client.scope import entered_scopes, note_failure
from tenure.durations import Duration, seconds
from tenure.engines.contract import Enqueued, Place, Removal, when_answered
from tenure.errors import AcquireTimeout, SelfDeadlock
from tenure.model import EPHEMERAL_LIMIT

if TYPE_CHECKING:
    from tenure._client.contact import Contact
    from tenure._client.session import Session

__all__ = ["SessionSource", "Wanted", "acquire", "give_up", "join", "settled", "try_acquire"]


class SessionSource(Protocol):
    """Where a primitive finds its session: a session itself, or a client's implicit one."""

    @property
    def node(self) -> str: ...

    @property
    def _client_contact(self) -> Contact: ...

    def _ready(self) -> Session | None:
        """The session, when there is one that can be used at once."""

    def _current(self) -> Session | None:
        """The session that was used last, whether or not it is over."""

    async def _obtain(self) -> Session:
        """The session, attached if need be."""
        ...


class Wanted:
    """What is asked for: so many tokens of a semaphore, and what becomes of the lease.

    Attributes:
        kind: what a program calls it, for messages.
        handle: the class of the lease.
    """

    __slots__ = (
        "count",
        "data",
        "ephemeral",
        "handle",
        "kind",
        "name",
        "on_loss",
        "stop_time",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        count: int,
        data: bytes = b"",
        *,
        ephemeral: bool,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
        handle: type[Lease] = Lease,
    ) -> None:
        if on_loss is not None:
            check_policy(on_loss)
        self.kind = kind
        self.name = name
        self.count = count
        self.data = data
        self.ephemeral = ephemeral
        self.on_loss = on_loss
        usual = type(stop_time) is float and stop_time == 0.0
        self.stop_time = 0.0 if usual else seconds(stop_time, "a stop time")
        self.handle = handle

    def __str__(self) -> str:
        return f"the request for {self.kind} {self.name!r}"


async def acquire(source: SessionSource, wanted: Wanted, timeout: float | None) -> Lease:
    """Acquire; the timeout runs on the local clock from this call on.

    Raises:
        AcquireTimeout: not granted in time; with timeout 0, not free. When the store is the
            reason, the message says so and ``__cause__`` is its failure.
    """
    session = source._ready()
    lease = None if session is None else _send(session, wanted, timeout)
    if lease is None or lease._state is not HELD:
        if timeout is not None:
            lease = await _in_time(source, wanted, timeout, lease)
        else:
            lease = lease or _send(await source._obtain(), wanted, None)
            try:
                while lease._state is ASKED:
                    await lease._change()
                if lease._state is WAITING:
                    await settled(lease, for_ever=True)
            except BaseException as error:
                give_up(lease, error)
                raise
            if not lease.held:
                lease = _outcome(lease, timeout, Probe(lease, 0.0))
        if lease is None:
            assert timeout is not None
            who = await contention(source._current(), wanted.name)
            raise _not_acquired(wanted, source.node, timeout, f"; {who}")
    return lease


async def try_acquire(source: SessionSource, wanted: Wanted, timeout: float = 0.0) -> Lease | None:
    """Acquire within a timeout; with 0, if that is possible at once, without passing any waiter.

    Returns:
        ``None`` when another client has it.

    Raises:
        AcquireTimeout: the store did not answer within the client's `answer_timeout`, or grants
            nothing; ``__cause__`` is its failure.
    """
    session = source._ready()
    lease = None if session is None else _send(session, wanted, timeout)
    if lease is None or lease._state is not HELD:
        lease = await _in_time(source, wanted, timeout, lease)
    return lease


async def join(source: SessionSource, wanted: Wanted) -> Lease:
    """Join the queue; the lease it returns waits for its grant, or has it already."""
    lease = _send(source._ready() or await source._obtain(), wanted, None)
    try:
        while lease._state is ASKED:
            await lease._change()
    except BaseException as error:
        give_up(lease, error)
        raise
    if lease._state is WAITING or lease.held:
        return lease
    raise lease._why_not_held()


async def settled(lease: Lease, *, for_ever: bool) -> None:
    """Wait until the lease is held or will never be. Its place is left alone.

    Raises:
        Misuse: its session belongs to another loop.
        SelfDeadlock: with `for_ever`, the calling task itself is inside what it waits for.
    """
    while lease._state is ASKED:
        lease.session._check_loop()
        await lease._change()
    if for_ever and lease._state is WAITING:
        await _check_self_deadlock(lease)
    while lease._state is WAITING:
        lease.session._check_loop()
        await lease._change()


def _send(session: Session, wanted: Wanted, timeout: float | None) -> Lease:
    """Send a request. What the store answers, now or later, the lease's state will tell."""
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
    except Exception as error:
        lease._refused(error)
        raise lease._why_not_held() from None
    if isinstance(answer, Enqueued):
        lease._answer(answer)
        if lease._state is HELD:
            return lease
    else:
        when_answered(answer, lease._answered)
    lease._asked_at = session._now()
    return lease


def give_up(lease: Lease, error: BaseException) -> None:
    """Take the request back because of `error`, which stays the error that is raised."""
    if isinstance(error, GeneratorExit):
        # An abandoned task is closed in whatever thread.
        lease.session._client._soon(lease._give_up)
        return
    try:
        lease._give_up()
    except Exception as failure:
        note_failure(error, failure, f"withdrawing the request for {lease.name!r}")


async def _in_time(
    source: SessionSource, wanted: Wanted, timeout: float, lease: Lease | None
) -> Lease | None:
    """Wait for the grant of what was sent already, or send it first; ``None``: too late."""
    # With timeout 0 the store rejects the request, and reaching it may take a while.
    contact = source._client_contact
    patience = timeout or contact.answer_timeout
    expiry = asyncio.timeout(patience)
    probe: Probe | None = None
    answered = False
    try:
        async with expiry:
            lease = lease or _send(await source._obtain(), wanted, timeout)
            probe = Probe(lease, patience)
            await settled(lease, for_ever=False)
    except BaseException as error:
        if lease is not None:
            answered = lease._state is not ASKED
            give_up(lease, error)
        if not (isinstance(error, TimeoutError) and expiry.expired()):
            raise
        if lease is not None:
            _tell_timed_out(lease)
    else:
        return _outcome(lease, timeout, probe)
    finally:
        if probe is not None:
            probe.stop()
    if probe is not None and answered:
        obstacle = probe.obstacle()
    else:
        obstacle = contact.silence(wanted.name, patience)
    if obstacle is None:
        return None
    because = f", because {obstacle.clause}."
    raise _not_acquired(wanted, source.node, patience, because) from obstacle.cause


def _not_acquired(wanted: Wanted, node: str, timeout: float | None, why: str) -> AcquireTimeout:
    within = f"within {timeout:g} s" if timeout else "at once"
    message = f"{wanted.kind} {wanted.name!r} on {node}: not acquired {within}{why}"
    return AcquireTimeout(message, node=node, name=wanted.name)


def _outcome(lease: Lease, timeout: float | None, probe: Probe) -> Lease | None:
    """The lease of a request that waits no more; ``None`` when another client has it.

    Raises:
        AcquireTimeout: it was rejected or timed out because of the store. An engine may keep the
            time by itself, so that this can happen during an outage.
    """
    if lease.held:
        return lease
    if lease._why_gone is Removal.TIMED_OUT:
        _tell_timed_out(lease)
    elif lease._why_gone is not Place.REFUSED:
        raise lease._why_not_held()
    obstacle = probe.obstacle()
    if obstacle is None:
        return None
    because = f", because {obstacle.clause}."
    raise _not_acquired(lease._wanted, lease.node, timeout, because) from obstacle.cause


def _tell_timed_out(lease: Lease) -> None:
    session = lease.session
    waited = session._now() - lease._asked_at
    session._tell("TimedOut", lease.name, waited)


async def _check_self_deadlock(lease: Lease) -> None:
    """Raise when what the current task is inside can never leave room for this request.

    Only those requests count that this very task will give up no sooner than at the end of a
    block that it is inside, and that stand before this one in the queue, as the store says.
    """
    session = lease.session
    inside = {
        (scope.owner.session.id, scope.owner._order_id): scope.owner
        for scope in entered_scopes(asyncio.current_task())
        if isinstance(scope.owner, Lease)
        and scope.owner is not lease
        and scope.owner._state in (HELD, WAITING)
        and scope.owner.name == lease.name
        and scope.owner.node == lease.node
        and scope.owner.session._client.url == session._client.url
    }
    if not inside:
        return
    if not session._client.capabilities.owners:
        # Whoever has a mutex has the whole of it; of other semaphores nobody tells.
        if lease._count == EPHEMERAL_LIMIT:
            raise _self_deadlock(lease)
        return
    described = await session._ending.race(
        session._engine.describe_semaphore(lease.name, owners=True, waiters=True)
    )
    mine = 0
    for request in (*described.owners, *described.waiters):
        if request.order_id == lease._order_id:
            break
        if (request.session_id, request.order_id) in inside:
            mine += request.count
    if mine + lease._count > described.limit and lease._state is WAITING:
        raise _self_deadlock(lease)


def _self_deadlock(lease: Lease) -> SelfDeadlock:
    return SelfDeadlock(
        f"the caller is inside a block that has {lease.name!r} on {lease.node}, and waits, "
        "without a timeout, for what does not fit beside it: it would wait for ever. "
        "Tenure's locks are not re-entrant; pass the lease on instead, or give a timeout",
        node=lease.node,
        name=lease.name,
    )
