"""Sending a request and waiting for its grant: the acquire of every primitive.

After the wait (grant, timeout, cancellation or loss) the request is either a lease that the caller
holds, or out of the queue.

A timeout or a cancellation takes effect even when the store is out of reach: the session withdraws
the request in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tenure._client.contact import shortened
from tenure._client.contention import contention
from tenure._client.handles import UNKNOWN, CallSite
from tenure._client.options import RequestOptions
from tenure._client.probe import Probe
from tenure._client.request import Request
from tenure._client.request_states import HELD, SENT, WAITING
from tenure._client.scope import entered_scopes
from tenure._client.session_core import SessionCore, session_of
from tenure._client.source import SessionSource
from tenure.engines.contract import Enqueued, Place, Removal, when_answered
from tenure.errors import AcquireTimeout, SelfDeadlock, TenureError
from tenure.model import EPHEMERAL_LIMIT

L = TypeVar("L")


async def acquire(
    source: SessionSource, options: RequestOptions[L], timeout: float | None, site: CallSite
) -> L:
    """Acquire. The timeout runs on the local clock and starts with this call.

    Raises:
        AcquireTimeout: not granted in time; with timeout 0, not free. When the store is the reason,
            the message says so and ``__cause__`` is the failure.
    """
    try:
        session = source.ready()
        request = None if session is None else _send(session, options, timeout, site)
        if request is None or request.state is not HELD:
            if timeout is not None:
                request = await _in_time(source, options, timeout, site, request)
            else:
                request = request or _send(await source.obtain(), options, None, site)
                # Only a task that is inside a block can be in a deadlock with itself at once.
                request.patient = next(entered_scopes(asyncio.current_task()), None) is None
                try:
                    await settled(request, for_ever=True)
                except BaseException as error:
                    request.withdraw_because(error)
                    raise
                if not request.held:
                    request = _outcome(request, timeout, Probe(request, 0.0))
            if request is None:
                assert timeout is not None
                holders = await contention(source.current(), options.name)
                own = _own(source, options, holders)
                raise _not_acquired(options, source.node, timeout, f"; {holders}{own}")
        return options.handle(request)
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error


async def try_acquire(
    source: SessionSource, options: RequestOptions[L], timeout: float, site: CallSite | None
) -> L | None:
    """Acquire within a timeout; with 0, only if that is possible at once without passing a waiter.

    Returns:
        ``None`` when another client has it.

    Raises:
        AcquireTimeout: the store did not answer within the client's `answer_timeout`, or grants
            nothing; ``__cause__`` is the failure.
    """
    try:
        session = source.ready()
        request = None if session is None else _send(session, options, timeout, site)
        if request is None or request.state is not HELD:
            request = await _in_time(source, options, timeout, site, request)
        return None if request is None else options.handle(request)
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error


async def join(
    source: SessionSource, options: RequestOptions[object], site: CallSite | None
) -> Request:
    """Join the queue, and return the request, waiting or already granted."""
    try:
        request = _send(source.ready() or await source.obtain(), options, None, site)
        try:
            while request.state is SENT:
                await request.change()
        except BaseException as error:
            request.withdraw_because(error)
            raise
        if request.state is WAITING or request.held:
            return request
        raise request.why_not_held()
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error


def as_it_is(request: Request) -> Request:
    """Return the request itself, for options that need no lease."""
    return request


async def settled(request: Request, *, for_ever: bool) -> None:
    """Wait until the lease is granted or can no longer be. Its place in the queue is kept.

    Raises:
        Misuse: the session belongs to another event loop.
        SelfDeadlock: with `for_ever`, what the program holds prevents the grant (`waits`).
    """
    if request.state is not SENT and request.state is not WAITING:
        return
    session = session_of(request)
    session.check_loop()
    waits = session.waits
    wait = waits.begin(request, for_ever=for_ever)
    try:
        while request.state is SENT:
            await request.change()
        if for_ever and request.state is WAITING:
            await _check_self_deadlock(request, _entered())
        while request.state is WAITING:
            suspects, wait.suspects = wait.suspects, ()
            if suspects:
                await _check_self_deadlock(request, suspects)
            else:
                await request.change()
    finally:
        waits.end(wait)


def _send(
    session: SessionCore,
    options: RequestOptions[object],
    timeout: float | None,
    site: CallSite | None,
) -> Request:
    """Send a request. Its state reports the store's answer, now or later."""
    request = session.request(options, site)
    try:
        answer = session.engine.enqueue(
            request.id,
            options.name,
            options.count,
            options.data,
            timeout=timeout,
            ephemeral=options.ephemeral,
        )
    except Exception as error:
        request.refused(error)
        raise request.why_not_held() from None
    if isinstance(answer, Enqueued):
        request.place(answer)
        if request.state is HELD:
            return request
    else:
        when_answered(answer, request.answered)
    request.sent_at = session.now()
    return request


async def _in_time(
    source: SessionSource,
    options: RequestOptions[object],
    timeout: float,
    site: CallSite | None,
    request: Request | None,
) -> Request | None:
    """Wait for the grant, sending the request first if it was not sent. ``None``: too late."""
    # With timeout 0 the store rejects the request, and reaching it may take a while.
    contact = source.contact
    limit = timeout or contact.answer_timeout
    expiry = asyncio.timeout(limit)
    probe: Probe | None = None
    answered = False
    try:
        async with expiry:
            request = request or _send(await source.obtain(), options, timeout, site)
            probe = Probe(request, limit)
            await settled(request, for_ever=False)
    except BaseException as error:
        if request is not None:
            answered = request.state is not SENT
            request.withdraw_because(error)
        if not (isinstance(error, TimeoutError) and expiry.expired()):
            raise
        if request is not None:
            _emit_timeout(request)
    else:
        return _outcome(request, timeout, probe)
    finally:
        if probe is not None:
            probe.stop()
    if probe is not None and answered:
        obstacle = probe.obstacle()
    else:
        obstacle = contact.silence(options.name, limit)
    if obstacle is None:
        return None
    because = f", because {obstacle.clause}."
    raise _not_acquired(options, source.node, limit, because) from obstacle.cause


def _not_acquired(
    options: RequestOptions[object], node: str, timeout: float | None, why: str
) -> AcquireTimeout:
    within = f"within {timeout:g} s" if timeout else "at once"
    message = f"{options.kind} {options.name!r} on {node}: not acquired {within}{why}"
    return AcquireTimeout(message, node=node, name=options.name)


def _outcome(request: Request, timeout: float | None, probe: Probe) -> Request | None:
    """Return a finished request if it is held; ``None`` when another client has the lease.

    Raises:
        AcquireTimeout: it was rejected or timed out because of the store. Some engines measure the
            timeout themselves, so this can happen during an outage.
    """
    if request.held:
        return request
    if request.why_gone is Removal.TIMED_OUT:
        _emit_timeout(request)
    elif request.why_gone is not Place.REFUSED:
        raise request.why_not_held()
    obstacle = probe.obstacle()
    if obstacle is None:
        return None
    because = f", because {obstacle.clause}."
    raise _not_acquired(request.options, request.node, timeout, because) from obstacle.cause


def _emit_timeout(request: Request) -> None:
    session = request.session
    waited = session.now() - request.sent_at
    session.emit("TimedOut", request.name, waited)


def _own(source: SessionSource, options: RequestOptions[object], holders: str) -> str:
    """Return a clause that says that the caller holds it itself, if it is inside its block."""
    session = source.current()
    for owner in _entered():
        same_name = (owner.name, owner.node) == (options.name, source.node)
        same = same_name and session is not None and _url_of(owner) == session.client.url
        if same and owner.held:
            site = str(owner.site or UNKNOWN)
            acquired = "" if site in holders else f", acquired at {site}"
            return f"; the calling task or thread holds it itself{acquired}"
    return ""


def _url_of(request: Request) -> str:
    return session_of(request).client.url


def _entered() -> Iterator[Request]:
    """Yield the requests whose blocks the current task is inside."""
    for scope in entered_scopes(asyncio.current_task()):
        if isinstance(scope.owner, Request):
            yield scope.owner


async def _check_self_deadlock(request: Request, mine: Iterable[Request]) -> None:
    """Raise when requests of this program make it impossible to grant this one.

    Only requests count that precede this one in the store's queue.

    Args:
        request: the request that waits.
        mine: the requests that nothing but the current task can release.
    """
    session = session_of(request)
    inside = {
        (session_of(owner).id, owner.order_id): owner
        for owner in mine
        if owner is not request
        and owner.state in (HELD, WAITING)
        and owner.name == request.name
        and owner.node == request.node
        and owner.session.client.url == session.client.url
    }
    if not inside:
        return
    if not session.client.capabilities.owners:
        # The holder of a mutex has all its tokens; the holders of other semaphores are unknown.
        if request.count == EPHEMERAL_LIMIT:
            raise _self_deadlock(request, inside.values())
        return
    described = await session.race(
        session.engine.describe_semaphore(request.name, owners=True, waiters=True)
    )
    count = 0
    for each in (*described.owners, *described.waiters):
        if each.order_id == request.order_id:
            break
        if (each.session_id, each.order_id) in inside:
            count += each.count
    if count + request.count > described.limit and request.state is WAITING:
        raise _self_deadlock(request, inside.values())


def _self_deadlock(request: Request, mine: Iterable[Request]) -> SelfDeadlock:
    sites = " and ".join(sorted({str(owner.site or UNKNOWN) for owner in mine}))
    return SelfDeadlock(
        f"the program holds {request.name!r} on {request.node}, acquired at {sites}, and waits for "
        "it again without a timeout: it would wait for ever. Tenure's locks are not re-entrant; "
        "pass the lease on instead, or give a timeout",
        node=request.node,
        name=request.name,
    )
