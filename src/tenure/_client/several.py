"""Several locks as one: all of them, or any of them.

States of a block of all: new, then taking, inside, left. Rules:

* **All of them** are taken one after the other, in the order of their stores, nodes and names,
  and not of the arguments. A caller that waits for a lock holds only locks before it in
  this order, so callers never wait for each other in a circle. A lock that is held around the block
  is outside of the order.
* A lease is entered as soon as it is granted. So its loss ends the wait for the others, too.
* A timeout, an error or a cancellation releases what was taken, the last one first.
* **Any of them**: the caller waits in all queues at once, and leaves the others with the first
  grant. Of several that are granted together, it keeps the first in the order of the arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, overload

from tenure._client.acquire import Probe, SharedTimeout, acquire, contention, join
from tenure._client.handles import AsyncHandle, CallSite, call_site
from tenure._client.internals import options_of, source_of
from tenure._client.lease import Lease
from tenure._client.listeners import outcome_of
from tenure._client.mutex import Mutex
from tenure._client.once import Once
from tenure._client.request import WAITING, Request, RequestOptions
from tenure._client.semaphore import Semaphore
from tenure._client.source import SessionSource
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, InvalidArgument, LeaseLost, Misuse
from tenure.model import RequestDescription

if TYPE_CHECKING:
    from tenure.events import Outcome

_NAMED = 3
"""Locks of which an error names the holders."""


class Wanted(NamedTuple):
    """A lock that a caller wants, as one of several.

    Attributes:
        source: the session.
        options: of the request.
    """

    source: SessionSource
    options: RequestOptions[Lease]

    @property
    def place(self) -> tuple[str, str, str]:
        """Its place in the order of all locks."""
        return self.source.contact.url, self.source.node, self.options.name

    @property
    def name(self) -> str:
        """Its name."""
        return self.options.name


def wanted_locks(call: str, locks: Sequence[object]) -> list[Wanted]:
    """Return what the arguments of `all_of` or `any_of` stand for.

    Raises:
        InvalidArgument: there is none, one is no lock, or one stands there twice.
    """
    if not locks:
        raise InvalidArgument(f"{call}() needs a lock at least")
    found = [_wanted(call, each) for each in locks]
    places = [each.place for each in found]
    for each, place in zip(found, places, strict=True):
        if places.count(place) > 1:
            raise InvalidArgument(
                f"{each.name!r} on {each.source.node} is an argument of {call}() twice; for "
                "several tokens of a semaphore write (semaphore, count)",
                node=each.source.node,
                name=each.name,
            )
    return found


def _wanted(call: str, lock: object) -> Wanted:
    match lock:
        case Mutex() | Semaphore():
            return Wanted(source_of(lock), options_of(lock, 1))
        case (Semaphore() as semaphore, int() as count):
            return Wanted(source_of(semaphore), options_of(semaphore, count))
        case Once():
            arguments = lock.arguments_for(acquire)
            if arguments is not None:
                source, options, limit, _ = arguments
                if limit is None:
                    return Wanted(source, options)
                raise InvalidArgument(f"give the timeout to {call}(), not to its arguments")
        case _:
            pass
    raise InvalidArgument(
        f"{call}() takes mutexes, semaphores, pairs (semaphore, count), and calls of lock() or "
        f"acquire() that were not awaited, not {lock!r}"
    )


def _names(wanted: Iterable[Wanted]) -> str:
    return ", ".join(repr(each.name) for each in wanted)


class Leases(AsyncHandle, Sequence[Lease]):
    """The leases of `Client.all_of`, in the order of its arguments.

    Example::

        gpu = client.semaphore("gpu", limit=4)
        async with client.all_of(client.mutex("model"), (gpu, 2), timeout=5) as leases:
            model, gpus = leases
            await work(model.fencing_token, devices=await gpus.slots())
    """

    __slots__ = ("_leases",)

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = tuple(leases)

    def __repr__(self) -> str:
        return f"<Leases of {', '.join(repr(each.name) for each in self._leases)}>"

    @overload
    def __getitem__(self, index: int) -> Lease: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Lease, ...]: ...

    def __getitem__(self, index: int | slice) -> Lease | tuple[Lease, ...]:
        """Return a lease by its number in the order of the arguments."""
        return self._leases[index]

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> bool:
        """True while all are held. Reads the clock at every call; safe from any thread."""
        return all(each.held for each in self._leases)

    @property
    def loss(self) -> LeaseLost | None:
        """The first loss, in the order of the leases, or ``None``. Safe from any thread."""
        return next((loss for each in self._leases if (loss := each.loss) is not None), None)

    def check(self) -> None:
        """Raise unless all are held. Useful in loops and threads.

        Raises:
            LeaseLost: one was lost.
            LeaseReleased: one was released.
        """
        for each in self._leases:
            each.check()


class AllOf(AsyncHandle):
    """Block of `Client.all_of`."""

    __slots__ = ("_entered", "_limit", "_site", "_wanted")

    def __init__(self, wanted: Sequence[Wanted], limit: float | None, site: CallSite) -> None:
        self._wanted = wanted
        self._limit = limit
        self._site = site
        self._entered: AsyncExitStack | None = None  # the leases, once all are entered

    def __repr__(self) -> str:
        return f"<all of {_names(self._wanted)}>"

    async def __aenter__(self) -> Leases:
        if self._entered is not None:
            raise Misuse(f"{self!r} has been entered already; call all_of() again")
        shared = SharedTimeout(self._limit)
        taken: dict[Wanted, Lease] = {}
        async with AsyncExitStack() as entered:
            for each in sorted(self._wanted, key=lambda wanted: wanted.place):
                lease = await acquire(each.source, each.options, shared.left, self._site)
                taken[each] = await entered.enter_async_context(lease)
            self._entered = entered.pop_all()
        return Leases([taken[each] for each in self._wanted])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered is None:
            raise Misuse(f"{self!r} is left without having been entered")
        await self._entered.__aexit__(kind, error, trace)


async def first_of(wanted: Sequence[Wanted], limit: float | None, site: CallSite) -> Lease:
    """Wait in all queues, and return the lease of the first grant.

    Raises:
        AcquireTimeout: none was granted in time.
    """
    queued: list[Request] = []
    kept: Request | None = None
    outcome: Outcome = "timed_out"  # of the requests that are not kept
    probes: list[Probe] = []
    # With timeout 0 a queue is joined and left, and reaching the store may take a while.
    expiry = asyncio.timeout(wanted[0].source.contact.answer_timeout if limit == 0.0 else limit)
    try:
        async with expiry:
            for each in wanted:
                request = await join(each.source, each.options, site)
                queued.append(request)
                probes.append(Probe(request, limit or 0.0))
                if request.held:
                    break
            kept = await _first_grant(queued, wait=limit != 0.0)
        if kept is not None:
            outcome = "withdrawn"
    except BaseException as error:
        outcome = outcome_of(error)
        if not (isinstance(error, TimeoutError) and expiry.expired()):
            raise
    finally:
        for probe in probes:
            probe.stop()
        for request in queued:
            if request is not kept:
                request.abandon(outcome)
    if kept is not None:
        return wanted[queued.index(kept)].options.handle(kept)
    raise await _too_late(wanted, limit, queued, probes)


async def _first_grant(queued: Sequence[Request], *, wait: bool) -> Request | None:
    """Return the first request that is held; ``None`` if none is and it may not `wait`."""
    while True:
        held = next((each for each in queued if each.held), None)
        waiting = [each for each in queued if each.state is WAITING]
        if held is not None or not wait:
            return held
        if not waiting:  # evicted, or deleted by force
            raise queued[0].why_not_held()
        changes = [each.change() for each in waiting]
        await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)


async def _too_late(
    wanted: Sequence[Wanted], limit: float | None, queued: Sequence[Request], probes: list[Probe]
) -> AcquireTimeout:
    """Return the error of a wait in vain: the store is the reason, or the holders are."""
    obstacles = [each.obstacle() for each in probes]
    if len(queued) < len(wanted):  # the next one was not answered
        silent = wanted[len(queued)]
        contact = silent.source.contact
        obstacles.append(contact.silence(silent.name, limit or contact.answer_timeout))
    found = [each for each in obstacles if each is not None]
    within = f"within {limit:g} s" if limit else "at once"
    first = wanted[0]
    holders: list[RequestDescription] = []
    if found:
        why, cause = f", because {found[0].clause}", found[0].cause
    else:
        named = wanted[:_NAMED]
        contended = [await contention(each.source.current(), each.name) for each in named]
        texts = [f"{each.name!r} {text}" for each, (text, _) in zip(named, contended, strict=True)]
        why, cause = f"; {', '.join(texts)}", None
        holders += [holder for each in contended for holder in each.holders]
    error = AcquireTimeout(
        f"none of {_names(wanted)} on {first.source.node} was acquired {within}{why}",
        node=first.source.node,
        name=first.name,
        holders=holders,
    )
    error.__cause__ = cause
    return error


class Several:
    """Methods of a client that take several locks as one."""

    def all_of(
        self,
        *locks: Mutex | Semaphore | tuple[Semaphore, int] | Once[Lease],
        timeout: Duration | None = None,
    ) -> AbstractAsyncContextManager[Leases]:
        """Take several locks as one: ``async with client.all_of(a, (gpu, 2)) as leases``.

        The block holds all of them, and is cancelled when one is lost. They are taken one after the
        other, in the order of their names and not of the arguments, so that programs which need the
        same locks never wait for each other in a circle. Take all that the work
        needs in one call: a lock that is held around the block is outside of this order. While the
        last locks are waited for, the first ones are held already, and others wait for them.

        Args:
            *locks: mutexes, semaphores (one token), pairs ``(semaphore, count)``, and calls of
                `lock` and `acquire` with their options, which are not awaited. Any sessions,
                clients and stores.
            timeout: seconds to wait for all; 0 tries each once; ``None`` waits until they are
                granted.

        Raises:
            AcquireTimeout: not all were granted in time; nothing is kept. It names the one that was
                not.
            InvalidArgument: an argument is no lock, or stands there twice.
            LeaseLost: one was lost while the others were waited for.
            Deadlock, SelfDeadlock, SemaphoreNotFound, SessionExpired, SessionClosed: as for
                `Mutex.lock` and `Semaphore.acquire`.
        """
        return AllOf(wanted_locks("all_of", locks), timeout_seconds(timeout), call_site())

    def any_of(
        self,
        *locks: Mutex | Semaphore | tuple[Semaphore, int] | Once[Lease],
        timeout: Duration | None = None,
    ) -> Once[Lease]:
        """Take the first of several locks that is free.

        ``async with client.any_of(a, b) as lease``, or ``await`` it.

        It waits in all queues at once, each in its order, and leaves the others with the first
        grant. `Lease.name` says which it is. Of several that are free it takes the first.

        Args:
            *locks: as for `all_of`.
            timeout: seconds to wait; 0 tries each once; ``None`` waits until one is granted.

        Raises:
            AcquireTimeout: none was granted in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            InvalidArgument: an argument is no lock, or stands there twice.
            SemaphoreNotFound, SessionExpired, SessionClosed: as for `Semaphore.acquire`.
        """
        wanted = wanted_locks("any_of", locks)
        what = f"any of {_names(wanted)}"
        return Once(what, first_of, wanted, timeout_seconds(timeout), call_site())
