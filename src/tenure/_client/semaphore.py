"""A counting semaphore: at most `limit` tokens are held at a time, in strict FIFO order.

A lasting semaphore is created and deleted. An ephemeral one has a practically unlimited number of
tokens, and exists while it has an owner or a waiter. It serves to list owners with their data.

**A limit for each key** beneath that of all: a request first acquires the semaphore of its key,
``NAME/key/KEY``, and then this one. So a key has at most `per_key` requests in the queue of all,
however many wait, and each further one joins at its end: the keys take turns, and within a key the
order is that of the requests. A waiter holds tokens of its own key alone, so keys never block each
other. The semaphore of a key is created when it is missing, and deleted when it is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Never, TypeVar

from tenure._client.acquire import SharedTimeout, acquire, as_it_is, try_acquire
from tenure._client.habits import unknown_argument
from tenure._client.handles import CallSite, call_site
from tenure._client.lease import Acquirable, Lease, Slots
from tenure._client.listeners import Listeners
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import Request, RequestOptions
from tenure._client.session_core import session_of
from tenure._client.source import SessionSource
from tenure._client.ticket import Ticket, enqueue, recover
from tenure._client.watch import Watch, described_now
from tenure.core import refusals, rules
from tenure.durations import Duration, timeout_seconds
from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound, TenureError
from tenure.model import SemaphoreDescription

if TYPE_CHECKING:
    from tenure._client.contact import Contact
    from tenure._client.session_core import SessionCore


L = TypeVar("L")


class Semaphore(Acquirable):
    """A counting semaphore on a node.

    Example::

        gpus = session.semaphore("gpu")
        await gpus.create(limit=4, exist_ok=True)
        async with gpus.acquire(2, data=b"worker-a") as lease:
            await work(devices=await lease.slots())

        async with session.semaphore("gpu", limit=4) as lease:  # created when missing; one token
            await work(devices=await lease.slots())

    A lasting semaphore is created before use, by `create` or with ``limit=``, and exists until it
    is deleted. Its limit can be changed while it is in use (`resize`). Its data (at most 1 MiB) can
    be replaced and watched.

    The semaphore itself is the block of `acquire` without arguments. Any number of tasks may enter
    one object; each waits for its turn.

    An ephemeral one needs no set-up: it appears with its first request and disappears with its
    last, and without requests it is described as empty. Its limit is 2^64-1. A request for all
    tokens waits until it is the only one; others are granted at once, except behind such a request.
    It has no data of its own, but its requests have.

    Attributes:
        name: 1 to 1,024 bytes.
        ephemeral: true if it is used as an ephemeral semaphore. If the existing semaphore of that
            name is of the other kind, `InvalidArgument` is raised.
    """

    def __init__(
        self,
        source: SessionSource,
        name: str,
        *,
        ephemeral: bool = False,
        limit: int | None = None,
        per_key: int | None = None,
    ) -> None:
        rules.check_name(name)
        self.name = name
        self._per_key = per_key
        self.ephemeral = ephemeral
        self._blocks = {}
        self._existing = self._source = source
        if limit is not None:
            self._check_lasting("has no limit")
            rules.check_limit(limit, source.node, name)
            self._source = _CreatingSource(source, name, limit)
        if per_key is not None:
            self._check_lasting("has no limit for each key")
            rules.check_limit(per_key, source.node, name)

    def __repr__(self) -> str:
        return f"<Semaphore {self.name!r}{' (ephemeral)' if self.ephemeral else ''}>"

    @property
    def node(self) -> str:
        """The path of its node."""
        return self._source.node

    async def create(self, limit: int, data: bytes = b"", *, exist_ok: bool = False) -> None:
        """Create the semaphore.

        Args:
            limit: number of tokens, 1 to 2^64-1; above 2^53-1 means "unbounded".
            data: the semaphore's data.
            exist_ok: accept an existing semaphore of the same limit (its data is not changed).

        Raises:
            SemaphoreExists: it exists; with `exist_ok`, with another limit.
            InvalidArgument: a mutex or registry of that name is in use, or this is an
                ephemeral semaphore.
        """
        self._check_lasting("needs no creation: its first request makes it")
        session = await self._existing.obtain()
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

    async def resize(self, limit: int) -> None:
        """Change the limit, while the semaphore is in use.

        A higher limit grants at once, in the order of the queue. A lower one takes no lease away:
        the owners may then hold more than the limit, and nothing is granted until their sum and the
        count of the first waiter fit. A waiter whose count is above the limit leaves the queue in
        the same step, because it would block those behind it; its call raises `InvalidArgument`.

        Watchers of the data are notified. An equal limit changes nothing, so the call can be
        repeated. Of concurrent calls, the last one in the store counts.

        Do not change the limit of an election or a shared configuration: theirs is 1.

        Args:
            limit: the new number of tokens, 1 to 2^53-1.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            InvalidArgument: the limit is out of range; this is an ephemeral semaphore, or a mutex
                or registry of that name is in use; or the semaphore is unbounded.
            Unsupported: the store cannot do that (``ydb://``, ``dflockd://``).
        """
        self._check_lasting("has no limit that could be changed")
        rules.check_new_limit(limit, self.node, self.name)
        session = await self._existing.obtain()
        await session.race(session.engine.resize_semaphore(self.name, limit))
        if isinstance(self._source, _CreatingSource):
            self._source.limit = limit

    async def delete(self, *, force: bool = False) -> None:
        """Delete the semaphore.

        Args:
            force: even when it has owners, whose leases are lost, or waiters. Until the
                notification reaches an owner, it still considers its lease held.

        Raises:
            SemaphoreNotFound: the semaphore does not exist.
            SemaphoreBusy: it has owners or waiters, and `force` is false.
        """
        session = await self._existing.obtain()
        await session.race(session.engine.delete_semaphore(self.name, force=force))
        if isinstance(self._source, _CreatingSource):
            self._source.created = False

    async def describe(
        self, *, owners: bool = False, waiters: bool = False
    ) -> SemaphoreDescription:
        """Describe the semaphore.

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
        key: str | None = None,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
        **_unknown: Never,
    ) -> Once[Lease]:
        """Acquire `count` tokens: ``async with pool.acquire(2) as lease``, or ``await`` it.

        Args:
            count: 1 to the limit.
            key: the key whose limit counts, too, such as a tenant, if there is one for each key
                (``client.semaphore(name, limit=10, per_key=2)``).
            data: bytes of the request, which clients see in descriptions of the owners.
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            AcquireTimeout: not granted in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            SemaphoreNotFound: the semaphore does not exist; `create` it.
            InvalidArgument: the count is not between 1 and the limit, or `resize` has lowered the
                limit below the count meanwhile.
            Deadlock: this wait is the victim of a deadlock, in a session that was opened with
                ``on_deadlock="raise"``.
            SelfDeadlock: what the program holds prevents the grant, and no other task is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        if _unknown:
            raise unknown_argument("acquire", _unknown)
        limit = timeout_seconds(timeout)
        place = self._place(key, count)
        if place is not None:
            both = self._options(count, data, on_loss, stop_time, as_it_is)
            return Once(both, _acquire_both, self._source, both, place, limit, call_site())
        options = self._options(count, data, on_loss, stop_time, Lease)
        return Once(options, acquire, self._source, options, limit, call_site())

    async def try_acquire(
        self,
        count: int = 1,
        *,
        key: str | None = None,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
        **_unknown: Never,
    ) -> Lease | None:
        """Acquire `count` tokens if they are free and there are no waiters; else ``None``.

        The arguments are those of `acquire`.

        Raises:
            AcquireTimeout: the store cannot be reached, or does not answer; ``__cause__`` is the
                failure.
        """
        if _unknown:
            raise unknown_argument("try_acquire", _unknown)
        place = self._place(key, count)
        if place is not None:
            both = self._options(count, data, on_loss, stop_time, as_it_is)
            return await _try_both(self._source, both, place, call_site())
        options = self._options(count, data, on_loss, stop_time, Lease)
        return await try_acquire(self._source, options, 0.0, call_site())

    def enqueue(
        self,
        count: int = 1,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Ticket[Lease]]:
        """Join the queue now, and wait for the grant later, with the ticket.

        ``async with pool.enqueue() as ticket``, or ``await`` it. Raises as `acquire`. There is no
        ticket where each key has a limit: a request for it has two places, one after the other.
        """
        self._place(None, count)
        options = self._options(count, data, on_loss, stop_time, Lease)
        return Once(options, enqueue, self._source, options, call_site())

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Lease] | None:
        """Claim the first request for this semaphore of a resumed session, or return ``None``.

        Each request is returned once. The ticket keeps it, and can `wait` for it or withdraw it.

        Args:
            on_loss: reaction to a loss, besides raising it, as for `acquire`.
            stop_time: seconds that the work needs to stop, as for `acquire`.
        """
        return recover(self._source, self._options(1, b"", on_loss, stop_time, Lease), call_site())

    def watch(self, *, data: bool = False, owners: bool = False) -> Watch[SemaphoreDescription]:
        """Watch the semaphore: its current state, then a newer one after each watched change.

        Args:
            data: watch the semaphore's data, and its limit.
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
                f"{self.name!r} on {self.node} is used here as ephemeral, and so {but}",
                node=self.node,
                name=self.name,
            )

    def _wanted(self, count: int) -> RequestOptions[Lease]:
        self._place(None, count)
        return self._options(count, b"", None, 0.0, Lease)

    async def _acquired(self, site: CallSite) -> Lease:
        return await acquire(self._source, self._wanted(1), None, site)

    def _place(self, key: str | None, count: int) -> _Place | None:
        """Return the place that a request needs among those of its key, if keys have limits."""
        if self._per_key is None and key is None:
            return None
        if self._per_key is None:
            raise InvalidArgument(
                f"semaphore {self.name!r} on {self.node} has no limit for each key: write "
                "semaphore(name, limit=10, per_key=2)",
                node=self.node,
                name=self.name,
            )
        if not isinstance(key, str) or not key:
            raise InvalidArgument(
                f"semaphore {self.name!r} on {self.node} has a limit for each key, and needs the "
                "key: acquire(key=...) with a text that is not empty",
                node=self.node,
                name=self.name,
            )
        name = name_of_key(self.name, key)
        rules.check_name(name, self.node)
        rules.check_count(count, self._per_key, self.node, name)
        options = RequestOptions("semaphore", name, count, handle=as_it_is, ephemeral=False)
        return _Place(self._existing, options, self._per_key)

    def _options(
        self,
        count: int,
        data: bytes,
        on_loss: OnLoss | None,
        stop_time: Duration,
        handle: Callable[[Request], L],
    ) -> RequestOptions[L]:
        if count is False:  # a habit: do not block
            raise InvalidArgument(
                f"a count is a number of tokens, not {count!r}; try_acquire() does not wait",
                node=self.node,
                name=self.name,
            )
        return RequestOptions(
            "semaphore",
            self.name,
            count,
            data,
            handle=handle,
            ephemeral=self.ephemeral,
            on_loss=on_loss,
            stop_time=stop_time,
        )


def name_of_key(name: str, key: str) -> str:
    """Return the name of the semaphore of a key."""
    return f"{name}/key/{key}"


class _Place:
    """The request for tokens of a key, beside that for tokens of all.

    Args:
        source: the session.
        options: of the request.
        limit: of the key.
    """

    def __init__(self, source: SessionSource, options: RequestOptions[Request], limit: int) -> None:
        self._source = source
        self._options = options
        self._creating = _CreatingSource(source, options.name, limit)

    async def acquired(self, timeout: float | None, site: CallSite) -> Request:
        """Acquire it. Raises as `acquire`."""
        until = SharedTimeout(timeout)
        while True:
            try:
                return await acquire(self._source, self._options, until.left, site)
            except SemaphoreNotFound:
                await self._create()

    async def acquired_at_once(self, site: CallSite) -> Request | None:
        """Acquire it if it is free. Raises as `try_acquire`."""
        while True:
            try:
                return await try_acquire(self._source, self._options, 0.0, site)
            except SemaphoreNotFound:
                await self._create()

    async def _create(self) -> None:
        self._creating.created = False
        await self._creating.obtain()


class SlotsOfKey(Slots):
    """Slots of a lease that has tokens of a key, too: they are released together.

    Attributes:
        place: the request for the tokens of the key.
    """

    def __init__(self, request: Request, place: Request) -> None:
        super().__init__(request)
        self.place = place

    def release(self) -> None:
        """Release all, and delete the semaphore of the key if it is idle then."""
        super().release()
        _leave(self.place)


async def _acquire_both(
    source: SessionSource,
    options: RequestOptions[Request],
    place: _Place,
    timeout: float | None,
    site: CallSite,
) -> Lease:
    """Acquire tokens of a key, then of all. Raises as `acquire`."""
    until = SharedTimeout(timeout)
    held = await place.acquired(timeout, site)
    try:
        request = await acquire(source, options, until.left, site)
    except BaseException as error:
        _leave(held, error)
        raise
    return _lease_of(request, held)


async def _try_both(
    source: SessionSource, options: RequestOptions[Request], place: _Place, site: CallSite
) -> Lease | None:
    """Acquire tokens of a key and of all if both are free. Raises as `try_acquire`."""
    held = await place.acquired_at_once(site)
    if held is None:
        return None
    try:
        request = await try_acquire(source, options, 0.0, site)
    except BaseException as error:
        _leave(held, error)
        raise
    if request is None:
        _leave(held)
        return None
    return _lease_of(request, held)


def _lease_of(request: Request, place: Request) -> Lease:
    request.slots = SlotsOfKey(request, place)
    return Lease(request)


def _leave(place: Request, error: BaseException | None = None) -> None:
    """Release the tokens of a key, in the background."""
    if isinstance(error, GeneratorExit):
        place.session.client.soon(partial(_leave, place))
        return
    session = session_of(place)
    place.abandon()
    if session.why is None:
        session.client.tasks.complete(_delete_if_idle(session, place.name))


async def _delete_if_idle(session: SessionCore, name: str) -> None:
    # It has owners or waiters, or is gone, or the next release deletes it.
    with suppress(TenureError, TimeoutError):
        async with asyncio.timeout(session.contact.answer_timeout):
            await session.engine.delete_semaphore(name, force=False)


class _CreatingSource:
    """Source of a session in which a semaphore exists: it is created at its first use.

    Attributes:
        limit: the limit that it is created with.
        created: whether it was created, or was found with the limit.
    """

    def __init__(self, source: SessionSource, name: str, limit: int) -> None:
        self._source = source
        self._name = name
        self.limit = limit
        self.created = False

    @property
    def node(self) -> str:
        return self._source.node

    @property
    def recovery_window(self) -> float:
        return self._source.recovery_window

    @property
    def contact(self) -> Contact:
        return self._source.contact

    @property
    def listeners(self) -> Listeners:
        return self._source.listeners

    def ready(self) -> SessionCore | None:
        session = self._source.ready()
        return session if self.created else None

    def current(self) -> SessionCore | None:
        return self._source.current()

    async def obtain(self) -> SessionCore:
        """Return the session, after creating the semaphore.

        Raises:
            SemaphoreExists: it exists, with another limit.
        """
        session = await self._source.obtain()
        if not self.created:
            name, limit = self._name, self.limit
            creating = session.engine.create_semaphore(name, limit, b"", exist_ok=True)
            try:
                await session.race(creating)
            except SemaphoreExists as error:
                resizes = session.client.capabilities.resize
                raise self._other_limit(error.limit, resizes=resizes) from None
            self.created = True
        return session

    def _other_limit(self, limit: int | None, *, resizes: bool) -> SemaphoreExists:
        exists = "exists with another limit" if limit is None else f"has the limit {limit}"
        if resizes and max(limit or 0, self.limit) <= rules.EXACT:
            command = refusals.resizing(self.node, self._name, self.limit)
            change = (
                f"change it: semaphore.resize({self.limit}) or '{command}' does that while it is "
                "in use"
            )
        else:
            change = "delete() it while it is not in use, and the next use creates it"
        return SemaphoreExists(
            f"semaphore {self._name!r} on {self.node} {exists}, not {self.limit}. Use the same "
            f"limit everywhere, or {change}",
            node=self.node,
            name=self._name,
            limit=limit,
        )


def _as_it_is(_session: SessionCore, described: SemaphoreDescription) -> SemaphoreDescription:
    return described
