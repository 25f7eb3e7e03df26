"""A pool: named resources, each with at most one holder at a time.

An item is acquired in two steps, in one session:

1. a *unit* of the semaphore ``<name>``, whose limit is the number of resources. It orders the
   waiters: strict FIFO.
2. the mutex ``<name>/<resource>`` of the first resource that is free. It is the item's lease, with
   its fencing token.

State and its owners:

* The semaphore's data are the names of the resources, written when it is created. So programs that
  disagree on them are detected. Each program keeps the resources' data itself.
* The store owns both requests of an item. They end with their session.
* A `_Tie` ends each of the two with the other one. The lease of the item counts.

Rules:

* A resource excludes by its own mutex, and never by a number of the unit. So it has one holder also
  while programs disagree, and when a unit was evicted.
* The mutex is released before the unit, so the next owner of a unit finds a free resource. If it
  finds none, because a mutex is locked outside of the pool, it waits for the first one.
* Both requests are withdrawn when the caller is cancelled, at any step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TypeVar

from tenure._client.acquire import acquire, as_it_is, try_acquire
from tenure._client.handles import CallSite, call_site
from tenure._client.internals import source_of
from tenure._client.lease import Lease, Slots
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import HELD, LOST, RELEASED, Request, RequestOptions
from tenure._client.scope import Scope
from tenure._client.session_core import session_of
from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, InvalidArgument, SemaphoreExists, SemaphoreNotFound
from tenure.model import EPHEMERAL_LIMIT
from tenure.recipes.base import Source

T = TypeVar("T")

MOST_RESOURCES = 1024
"""The largest pool: an acquire may try the mutexes of all resources, one after the other."""


class PoolItem(Lease):
    """The lease of one resource of a pool. `Pool.acquire` returns one.

    Its fencing token rises with every holder of the resource.
    """

    __slots__ = ("_data", "_resource", "_tie", "_unit_scope")

    def __init__(self, request: Request, resource: str, data: bytes, tie: _Tie) -> None:
        super().__init__(request)
        self._resource = resource
        self._data = data
        self._tie = tie
        self._unit_scope: Scope | None = None

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._resource

    @property
    def data(self) -> bytes:
        """The data of the resource, as this program has given it to the pool."""
        return self._data

    async def release(self) -> None:
        """Return the resource to the pool. Safe to call twice; takes effect even when cancelled.

        Raises:
            LeaseLost: it was lost before, even if only the release shows it.
        """
        await super().release()
        await self._tie.ended()

    def _enter(self, task: asyncio.Task[object] | None = None) -> None:
        super()._enter(task)
        # Never triggered; its presence lets a wait inside detect a self-deadlock.
        self._unit_scope = Scope(self._tie.unit)
        self._unit_scope.enter(task)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope = self._unit_scope
        if scope is not None and scope.task is not None:
            scope.exit(error)
        await super().__aexit__(kind, error, trace)
        if error is None:
            await self._tie.ended()


class _Tie:
    """Ends the unit with its resource, and the resource with its unit. On the loop."""

    def __init__(self, unit: Request, resource: Request) -> None:
        self.unit = unit
        self._resource = resource
        self._resource_changed()
        self._unit_changed()

    async def ended(self) -> None:
        """Wait until the unit of a released resource is released, too.

        Raises:
            LeaseLost: it was lost before.
        """
        self._release_unit()
        while _is_leaving(self.unit):
            await self.unit.change()
        if self.unit.loss is not None:
            raise self.unit.why_not_held()

    def _resource_changed(self, _: object = None) -> None:
        resource = self._resource
        if resource.state is HELD or _is_leaving(resource):
            resource.change().add_done_callback(self._resource_changed)
        else:
            self._release_unit()

    def _unit_changed(self, _: object = None) -> None:
        unit, resource = self.unit, self._resource
        if unit.state is HELD:
            unit.change().add_done_callback(self._unit_changed)
        elif unit.state is LOST and resource.state is HELD:
            resource.taken(f"its unit of the pool was lost: {unit.loss}")
            with contextlib.suppress(Exception):  # the release is sent again
                session_of(resource).withdraw(resource)

    def _release_unit(self) -> None:
        self.unit.abandon()


def _is_leaving(request: Request) -> bool:
    """Return true while the store has not answered the release of a request."""
    session = request.session
    return request.state is RELEASED and request.id in session.requests and session.why is None


class _NoneFreeError(Exception):
    """No resource is free, and the caller does not wait."""


class _Taking(Slots):
    """Taking the resource of a unit: its slots are the mutexes of the resources.

    Args:
        unit: the request that owns the unit.
        options: of the resource's mutex, by the resource's number.
        count: the number of resources.
        wait: whether to wait when none is free.
    """

    def __init__(
        self,
        unit: Request,
        options: Callable[[int], RequestOptions[Request]],
        count: int,
        *,
        wait: bool,
    ) -> None:
        super().__init__(unit)
        self._options_of = options
        self._count = count
        self._wait = wait

    async def resource(self) -> tuple[int, Request]:
        """Take the first resource that is free. Return its number, and its request."""
        await self.take()
        ((number, request),) = self._taken.items()
        return number, request

    async def _limit(self) -> int:
        return self._count

    def _options(self, number: int) -> RequestOptions[Request]:
        return self._options_of(number)

    async def _first(self, numbers: list[int]) -> tuple[int, Request]:
        if not self._wait:
            raise _NoneFreeError
        return await super()._first(numbers)


class Pool:
    """Named resources on a node, each with at most one holder: licences, profiles, devices.

    Example::

        from tenure.recipes import Pool

        gpus = Pool(session, "gpus", {"gpu-0": b"GPU-8a2f", "gpu-1": b"GPU-91c0"})
        async with gpus.acquire(timeout=5) as item:
            assert (item.name, item.data) == ("gpu-0", b"GPU-8a2f")
            await work(fencing_token=item.fencing_token)

    Waiters are served in strict FIFO order. Each gets the first resource that is free, in the order
    of `resources`. The resource of a program that dies returns to the pool like any lease.

    All programs must name the same resources, in any order. Another list is rejected with
    `InvalidArgument`. To change the list, delete the semaphore `name` while the pool is not in use.

    A program that locks the mutex ``<name>/<resource>`` takes that resource out of the pool, for
    maintenance. Meanwhile the last waiter of the others waits for it.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: the name of the pool. ``<name>/<resource>`` has 1 to 1,024 bytes for each resource.
        resources: the data of each resource, by its name; 1 to 1,024 of them. The data is not sent
            to the store.
    """

    def __init__(self, source: Source, name: str, resources: Mapping[str, bytes]) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self.resources = dict(resources)
        self._names = list(self.resources)
        self._semaphore = source.semaphore(name)
        self._source = source_of(self._semaphore)
        self._checked = False
        if not 1 <= len(self._names) <= MOST_RESOURCES:
            raise self._invalid(
                f"is a pool of 1 to {MOST_RESOURCES:,} resources, not {len(self._names):,}"
            )
        for each in self._names:
            if not each:
                raise self._invalid("is a pool, and its resources have names")
            source.mutex(self._mutex(each))  # checks its name

    def __repr__(self) -> str:
        """Return the name and the number of resources."""
        return f"<Pool {self.name!r} of {len(self._names)} resources>"

    def acquire(
        self,
        *,
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[PoolItem]:
        """Acquire a resource: ``async with pool.acquire() as item``, or ``await`` it.

        Args:
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            AcquireTimeout: no resource was free in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            InvalidArgument: programs disagree on the resources, or something else has that name.
            SelfDeadlock: what the program holds prevents the grant, and no other task is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
            Unsupported: the store keeps no data.
        """
        limit = timeout_seconds(timeout)
        unit = self._unit_options()
        return Once(
            unit, self._acquire, unit, limit, self._options(on_loss, stop_time), call_site()
        )

    async def try_acquire(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> PoolItem | None:
        """Acquire a resource if one is free and there are no waiters; else ``None``.

        The arguments and the other errors are those of `acquire`.

        Raises:
            AcquireTimeout: the store cannot be reached, or does not answer; ``__cause__`` is the
                failure.
        """
        site = call_site()
        options = self._options(on_loss, stop_time)
        limit = self._source.contact.answer_timeout
        deadline = asyncio.get_running_loop().time() + limit
        await self._before(deadline, limit, self._check())
        unit = await self._unit(try_acquire(self._source, self._unit_options(), 0.0, site))
        if unit is None:
            return None
        try:
            return await self._item(unit, deadline, limit, options, site, wait=False)
        except _NoneFreeError:
            return None

    async def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> PoolItem | None:
        """Claim a resource that a resumed session holds, or return ``None``.

        Each is returned once. A call that returns ``None`` withdraws what else the former program
        had of the pool, such as a place in its queue. If that program locked mutexes of resources
        outside of the pool, recover those first, with `Mutex.recover`.

        Args:
            on_loss: reaction to a loss, besides raising it, as for `acquire`.
            stop_time: seconds that the work needs to stop, as for `acquire`.

        Raises:
            SessionExpired, SessionClosed: the session has ended.
        """
        site, options = call_site(), self._options(on_loss, stop_time)
        session = await self._source.obtain()
        for number, name in enumerate(self._names):
            while (resource := session.claim(options(number), site)) is not None:
                unit = session.claim(self._unit_options(), site) if resource.held else None
                if unit is not None and unit.held:
                    return PoolItem(resource, name, self.resources[name], _Tie(unit, resource))
                for each in (resource, unit):
                    if each is not None:
                        each.abandon()
        while (unit := session.claim(self._unit_options(), site)) is not None:
            unit.abandon()
        return None

    async def _acquire(
        self,
        unit_options: RequestOptions[Request],
        limit: float | None,
        options: Callable[[int], RequestOptions[Request]],
        site: CallSite,
    ) -> PoolItem:
        loop = asyncio.get_running_loop()
        longest = self._source.contact.answer_timeout if limit == 0 else limit
        deadline = None if longest is None else loop.time() + longest
        await self._before(deadline, longest, self._check())
        left = limit
        if limit and deadline is not None and deadline - loop.time() < 0.99 * limit:
            left = max(0.001, deadline - loop.time())  # else the message has the caller's timeout
        unit = await self._unit(acquire(self._source, unit_options, left, site))
        try:
            return await self._item(unit, deadline, longest, options, site, wait=limit != 0)
        except _NoneFreeError:
            raise self._late("at once", "") from None

    async def _item(
        self,
        unit: Request,
        deadline: float | None,
        limit: float | None,
        options: Callable[[int], RequestOptions[Request]],
        site: CallSite,
        *,
        wait: bool,
    ) -> PoolItem:
        """Take a resource for a unit; withdraw the unit if that fails."""
        unit.slots = taking = _Taking(unit, options, len(self._names), wait=wait)
        try:
            number, resource = await self._before(deadline, limit, taking.resource())
        except BaseException as error:
            unit.withdraw_because(error)
            raise
        unit.slots = None  # from now on the resource ends first
        resource.site = site
        name = self._names[number]
        return PoolItem(resource, name, self.resources[name], _Tie(unit, resource))

    async def _unit(self, acquiring: Awaitable[T]) -> T:
        try:
            return await acquiring
        except SemaphoreNotFound:
            self._checked = False  # it was deleted: the next call creates it
            raise

    async def _before(self, deadline: float | None, limit: float | None, action: Awaitable[T]) -> T:
        expiry = asyncio.timeout_at(deadline)
        try:
            async with expiry:
                return await action
        except TimeoutError:
            if not expiry.expired():
                raise
            obstacle = self._source.contact.obstacle(self.name)
            because = "" if obstacle is None else f", because {obstacle.clause}"
            cause = None if obstacle is None else obstacle.cause
            raise self._late(f"within {limit:g} s", because) from cause

    def _late(self, when: str, because: str) -> AcquireTimeout:
        why = because or "; the mutexes of its resources are locked outside of the pool"
        node, name = self._source.node, self.name
        return AcquireTimeout(
            f"pool {name!r} on {node}: no resource was free {when}{why}", node=node, name=name
        )

    async def _check(self) -> None:
        """Create the semaphore unless it exists, and compare the names of its resources."""
        if self._checked:
            return
        names = json.dumps(sorted(self._names)).encode()
        try:
            await self._semaphore.create(len(self._names), names, exist_ok=True)
        except SemaphoreExists as error:
            raise self._disagree(f"has {error.limit} resources, not {len(self._names)}") from None
        described = await self._semaphore.describe()
        if described.data != names:
            theirs = described.data[:200].decode(errors="replace")
            raise self._disagree(f"has other resources: {theirs or 'none'}")
        self._checked = True

    def _disagree(self, how: str) -> InvalidArgument:
        return self._invalid(
            f"{how}. All programs must name the same; a pool that is not in use is changed by "
            "deleting its semaphore"
        )

    def _mutex(self, resource: str) -> str:
        return f"{self.name}/{resource}"

    def _unit_options(self) -> RequestOptions[Request]:
        # The resource's own policy handles a loss.
        return RequestOptions(
            "pool", self.name, 1, handle=as_it_is, ephemeral=False, on_loss="cancel"
        )

    def _options(
        self, on_loss: OnLoss | None, stop_time: Duration
    ) -> Callable[[int], RequestOptions[Request]]:
        def options(number: int) -> RequestOptions[Request]:
            return RequestOptions(
                "resource",
                self._mutex(self._names[number]),
                EPHEMERAL_LIMIT,
                handle=as_it_is,
                ephemeral=True,
                on_loss=on_loss,
                stop_time=stop_time,
            )

        options(0)  # checks them
        return options

    def _invalid(self, message: str) -> InvalidArgument:
        where = f"{self.name!r} on {self._source.node}"
        return InvalidArgument(f"{where} {message}", node=self._source.node, name=self.name)
