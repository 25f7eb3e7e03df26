"""Acquiring: sending a request, waiting for its grant, and the reasons of a timeout.

After the wait (grant, timeout, cancellation or loss) the request is either a lease that the caller
holds, or out of the queue.

A timeout or a cancellation takes effect even when the store is out of reach: the session withdraws
the request in the background.

**The probe** distinguishes an outage from contention. A waiting request does not show whether the
store still works: a stopped store and a busy mutex look alike. A `Probe` therefore reads the
semaphore a moment before the timeout. If that read is unanswered at the timeout, the store is
reported as the reason. Requests of one session that time out together share the read. A client
reads at most `MOST_READINGS` (in `waits`) whole queues a second, for `AcquireTimeout.position`.

**The contention** is the holders, for an `AcquireTimeout` and its message. After the
timeout the client reads the owners once, and waits at most 0.25 s for the answer. Tasks of
one session that time out together share the read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast

from tenure._client.blocked import Wait, deadlock_error
from tenure._client.contact import Obstacle, shortened
from tenure._client.handles import UNKNOWN, CallSite
from tenure._client.request import HELD, SENT, WAITING, Request, RequestOptions, UnsentRequest
from tenure._client.scope import entered_scopes
from tenure._client.session_core import Contention, ProbeAnswer, SessionCore, session_of
from tenure._client.source import SessionSource
from tenure._client.watch import described_now
from tenure.core.rules import EXACT
from tenure.engines.contract import Enqueued, Place, Removal, position_in, when_answered
from tenure.errors import AcquireTimeout, SelfDeadlock, SemaphoreNotFound, TenureError
from tenure.identity import holder_name, semaphore_with_identities
from tenure.model import EPHEMERAL_LIMIT, RequestDescription, SemaphoreDescription

_log = logging.getLogger("tenure")

LONGEST_LEAD, SHORTEST_LEAD = 1.0, 0.2
"""Seconds from the probe to the timeout. If less is left, no probe is sent."""


class Probe:
    """Probe of the store for one waiting request.

    Args:
        request: the request.
        timeout: seconds from now to the timeout.
    """

    __slots__ = ("_reading", "_request", "_sent_at", "_timer")

    def __init__(self, request: Request, timeout: float) -> None:
        self._request = request
        self._sent_at = 0.0
        self._reading: asyncio.Task[ProbeAnswer] | None = None
        lead = min(timeout / 2, LONGEST_LEAD)
        self._timer = (
            None
            if lead < SHORTEST_LEAD
            else request.session.loop.call_later(timeout - lead, self._read_soon)
        )

    def obstacle(self) -> Obstacle | None:
        """Return the reason of the timeout if it is not contention."""
        request = self._request
        contact = request.session.contact
        if self._reading is None or self._answer().there:
            return contact.obstacle(request.name)
        return contact.silence(request.name, request.session.now() - self._sent_at)

    @property
    def position(self) -> int | None:
        """The position of the waiter in its queue, 1 for the next; ``None`` if unknown."""
        queue, order_id = self._answer().queue, self._request.order_id
        if queue is None or order_id is None:
            return None
        return position_in(queue, order_id) or None

    def _answer(self) -> ProbeAnswer:
        reading = self._reading
        if reading is None or not reading.done() or reading.cancelled():
            return ProbeAnswer(False)
        return reading.result()

    def stop(self) -> None:
        """Stop probing. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def _read_soon(self) -> None:
        request = self._request
        session, name = session_of(request), request.name
        if request.state is not WAITING or session.state != "attached":
            return
        self._sent_at = session.now()
        reading = session.probes.get(name)
        if reading is None:
            reading = session.client.tasks.begin(_answers(session, name))
            session.probes[name] = reading
            reading.add_done_callback(lambda _: session.probes.pop(name))
        self._reading = reading


async def _answers(session: SessionCore, name: str) -> ProbeAnswer:
    whole = session.waits.may_read_queue()
    try:
        async with asyncio.timeout(2 * LONGEST_LEAD):
            found = await session.engine.describe_semaphore(name, owners=whole, waiters=whole)
    except TenureError:
        return ProbeAnswer(True)
    except TimeoutError:
        return ProbeAnswer(False)
    except Exception:
        _log.exception("could not read the semaphore: node=%s name=%r", session.node, name)
        return ProbeAnswer(True)
    return ProbeAnswer(True, semaphore_with_identities(found) if whole else None)


_TIMEOUT = 0.25
_ADVICE = "'tenure describe' shows its holder and its waiters"


async def contention(session: SessionCore | None, name: str) -> Contention:
    """Return the holders of a semaphore, after at most `_TIMEOUT`."""
    if session is None or session.state != "attached":
        return Contention(_ADVICE)
    if not session.client.capabilities.owners:
        return Contention("this store does not list holders")
    reading = session.readings.get(name)
    if reading is None:
        reading = session.client.tasks.begin(_read_holders(session, name))
        session.readings[name] = reading
        reading.add_done_callback(lambda _: session.readings.pop(name))
    await asyncio.wait([reading], timeout=_TIMEOUT)
    return Contention(_ADVICE) if not reading.done() or reading.cancelled() else reading.result()


async def _read_holders(session: SessionCore, name: str) -> Contention:
    try:
        async with asyncio.timeout(2 * _TIMEOUT):
            described = await described_now(session, name, ephemeral=False, owners=True)
    except SemaphoreNotFound:
        return Contention("it is free now")
    except (TenureError, TimeoutError):
        return Contention(_ADVICE)
    except Exception:
        _log.exception("could not read the holder: node=%s name=%r", session.node, name)
        return Contention(_ADVICE)
    return Contention(_sentence(session, described), described.owners)


def _sentence(session: SessionCore, described: SemaphoreDescription) -> str:
    """Return a text such as ``held by backup.py, pid 4242 on db-1, for 3 s; 2 wait``."""
    waiting = described.waiting or 0
    behind = f"; {waiting} wait{'s' if waiting == 1 else ''}" if waiting else ""
    if not described.owners:
        return f"it is free now{behind}"
    owner, *others = described.owners
    holder = _this_session(session, owner) if owner.session_id == session.id else holder_name(owner)
    since = "" if owner.since is None else f", for {_duration(owner.since)}"
    more = f", and {len(others)} more" if others else ""
    level = f" ({described.held} of {described.limit})" if 1 < described.limit <= EXACT else ""
    return f"held by {holder}{since}{more}{level}{behind}"


def _this_session(session: SessionCore, owner: RequestDescription) -> str:
    requests = session.held_requests()
    sites = [each.site or UNKNOWN for each in requests if each.order_id == owner.order_id]
    return f"this session, acquired at {sites[0]}" if sites else "this session"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"


L = TypeVar("L")

_LEAST = 0.001
"""Seconds that a step gets of a timeout which the others have used up; 0 would not wait at all."""


class SharedTimeout:
    """A timeout that several steps share, from now on."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    @property
    def left(self) -> float | None:
        """Seconds for the next step; 0 only if that is the timeout."""
        if not self._timeout:
            return self._timeout
        return max(_LEAST, self._timeout - (self._loop.time() - self._began))


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
        position: int | None = None
        if request is None or request.state is not HELD:
            if timeout is not None:
                request, position = await _in_time(source, options, timeout, site, request)
            else:
                request = request or await _obtain_and_send(source, options, site)
                try:
                    await settled(request, for_ever=True)
                except BaseException as error:
                    request.withdraw_because(error)
                    raise
                if not request.held:
                    request = _outcome(request, timeout, Probe(request, 0.0))
            if request is None:
                assert timeout is not None
                text, holders = await contention(source.current(), options.name)
                why = f"; {text}{_own(source, options, text)}"
                raise _not_acquired(options, source.node, timeout, why, holders, position)
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
            request, _ = await _in_time(source, options, timeout, site, request)
        return None if request is None else options.handle(request)
    except TenureError as error:
        raise shortened(error)  # noqa: B904  the same error


async def join(
    source: SessionSource, options: RequestOptions[object], site: CallSite | None
) -> Request:
    """Join the queue, and return the request, waiting or already granted."""
    try:
        session = source.ready()
        if session is not None:
            request = _send(session, options, None, site)
        else:
            request = await _obtain_and_send(source, options, site)
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
        Deadlock: the session raises it, and this wait is the victim (`blocked`).
    """
    if request.state is not SENT and request.state is not WAITING:
        return
    session = session_of(request)
    waits, task = session.waits, asyncio.current_task()
    # It begins when the request is queued: most are granted by the first answer.
    wait = cast("Wait | None", None)

    def queued() -> None:
        nonlocal wait
        wait = waits.begin(request, task, for_ever=for_ever)
        # Only a task that is inside a block can be in a deadlock with itself at once.
        if for_ever and wait.inside:
            request.wake()

    try:
        if request.state is WAITING:
            session.check_loop()
            queued()
        else:
            request.when_queued = queued
            while request.state is SENT:
                await request.change()
        if for_ever and request.state is WAITING:
            await _check_self_deadlock(request, _entered())
        while request.state is WAITING:
            assert wait is not None
            suspects, wait.suspects = wait.suspects, ()
            if wait.deadlock:
                raise deadlock_error(request, wait.deadlock)
            if suspects:
                await _check_self_deadlock(request, suspects)
            else:
                await request.change()
    finally:
        request.when_queued = None
        if wait is not None:
            waits.end(wait)


async def _obtain_and_send(
    source: SessionSource, options: RequestOptions[object], site: CallSite | None
) -> Request:
    """Obtain the session, and send a request without a timeout."""
    unsent = _begin_wait(source, options)
    try:
        return _send(await source.obtain(), options, None, site, unsent)
    except BaseException as error:
        if unsent is not None:
            unsent.ended(error)
        raise


def _begin_wait(source: SessionSource, options: RequestOptions[object]) -> UnsentRequest | None:
    """Report that a caller waits, although its request cannot be sent yet."""
    session = source.current()
    if session is not None and session.why is not None:
        session = None  # another one is being attached
    listeners = source.listeners
    if not listeners.streams and not listeners.sinks:
        return None
    unsent = UnsentRequest(listeners, source.node, session, options)
    unsent.begin()
    return unsent


def _send(
    session: SessionCore,
    options: RequestOptions[object],
    timeout: float | None,
    site: CallSite | None,
    unsent: UnsentRequest | None = None,
) -> Request:
    """Send a request. Its state reports the store's answer, now or later."""
    request = session.request(options, site)
    listeners = session.listeners
    if unsent is not None:
        request.sent_at = unsent.since
        unsent.sent(request)
    elif listeners.streams or listeners.sinks:
        listeners.emit("Requested", session.node, session, request, (request.name,))
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
    if unsent is None:
        request.sent_at = session.now()
    return request


async def _in_time(
    source: SessionSource,
    options: RequestOptions[object],
    timeout: float,
    site: CallSite | None,
    request: Request | None,
) -> tuple[Request | None, int | None]:
    """Wait for the grant, sending the request first if it was not sent.

    Returns:
        The request, or ``None`` and its last known position: too late.
    """
    # With timeout 0 the store rejects the request, and reaching it may take a while.
    contact = source.contact
    limit = timeout or contact.answer_timeout
    expiry = asyncio.timeout(limit)
    probe: Probe | None = None
    unsent: UnsentRequest | None = None
    answered = False
    try:
        async with expiry:
            if request is None:
                unsent = _begin_wait(source, options)
                request = _send(await source.obtain(), options, timeout, site, unsent)
            probe = Probe(request, limit)
            await settled(request, for_ever=False)
    except BaseException as error:
        if request is not None:
            answered = request.state is not SENT
            request.withdraw_because(error)
        elif unsent is not None:
            unsent.ended(error)
        if not (isinstance(error, TimeoutError) and expiry.expired()):
            raise
    else:
        return _outcome(request, timeout, probe), probe.position
    finally:
        if probe is not None:
            probe.stop()
    if probe is not None and answered:
        obstacle = probe.obstacle()
    else:
        obstacle = contact.silence(options.name, limit)
    if obstacle is None:
        return None, None if probe is None else probe.position
    because = f", because {obstacle.clause}."
    raise _not_acquired(options, source.node, limit, because) from obstacle.cause


def _not_acquired(
    options: RequestOptions[object],
    node: str,
    timeout: float | None,
    why: str,
    holders: Sequence[RequestDescription] = (),
    position: int | None = None,
) -> AcquireTimeout:
    within = f"within {timeout:g} s" if timeout else "at once"
    message = f"{options.kind} {options.name!r} on {node}: not acquired {within}{why}"
    return AcquireTimeout(message, node=node, name=options.name, holders=holders, position=position)


def _outcome(request: Request, timeout: float | None, probe: Probe) -> Request | None:
    """Return a finished request if it is held; ``None`` when another client has the lease.

    Raises:
        AcquireTimeout: it was rejected or timed out because of the store. Some engines measure the
            timeout themselves, so this can happen during an outage.
    """
    if request.held:
        return request
    if request.why_gone != Removal.TIMED_OUT and request.why_gone is not Place.REFUSED:
        raise request.why_not_held()
    obstacle = probe.obstacle()
    if obstacle is None:
        return None
    because = f", because {obstacle.clause}."
    raise _not_acquired(request.options, request.node, timeout, because) from obstacle.cause


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
