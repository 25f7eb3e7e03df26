"""A lease, as seen by the program that holds it, its slots, and the end of its block.

Rules:

* The deadline is the session's. A lease whose deadline has passed is not held, in any state: every
  check reads the clock.
* A lease is entered once, by any task; only that task is cancelled when the lease is lost.

**Slots** are numbers below the limit that distinguish the holders of one semaphore. Slot *i* of the
semaphore ``gpu`` is the mutex ``gpu/slot/i`` on the same node. A lease takes the lowest free slots,
as many as its count, through its own session. So a slot has at most one holder, like any mutex, and
is released with the session of its lease.

* A lease takes its slots when the program first reads them, and keeps them until it ends.
* It releases its slots before its tokens, so the next holder finds enough free slots. Only an
  evicted lease may hold its slots a little longer.
* A lease whose count shrinks keeps its lowest slots, and releases the others.
* If the limit is lowered, a lease keeps its slots, even those above the limit.

**The end of the block** of a lease or of a ticket withdraws or releases the request. Its failure
never hides the body's error, and a cancelled body does not wait for the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from tenure._client.acquire import as_it_is, join, try_acquire
from tenure._client.guarding import guard
from tenure._client.handles import (
    UNKNOWN,
    AsyncHandle,
    CallSite,
    call_site,
    note_failure,
    warn_dropped,
)
from tenure._client.request import HELD, WAITING, Request, RequestOptions
from tenure._client.scope import Scope
from tenure._client.session_core import session_of
from tenure._client.session_handle import SessionAnchor, SessionHandle
from tenure._client.source import SessionSource
from tenure._client.watch import described_now
from tenure.engines.contract import Withdrawn, when_answered
from tenure.errors import (
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SessionExpired,
    Unsupported,
)
from tenure.model import EPHEMERAL_LIMIT, FULL_STORES


def start_leaving(
    handle: object, request: Request, error: BaseException | None
) -> asyncio.Future[Withdrawn] | None:
    """Withdraw the request unless it is lost; return the answer to wait for."""
    if isinstance(error, GeneratorExit):
        # From any thread. The handle lives until then, so that it is not dropped while it is held.
        request.session.client.soon(partial(_withdraw, handle, request))
        return None
    try:
        if request.state is not HELD or request.held:
            answer = request.withdraw()
            if not isinstance(error, asyncio.CancelledError):
                return answer  # a cancelled task does not wait for the store
    except Exception as failure:
        _note(request, error, failure)
    return None


def _withdraw(_handle: object, request: Request) -> None:
    request.withdraw()


async def finish_leaving(
    request: Request, answer: asyncio.Future[Withdrawn], error: BaseException | None
) -> None:
    """Wait for the answer, and report a failure of the store.

    After the session has ended, a failure is ignored: the end releases everything.
    """
    await request.answered_by_store(answer)
    _report(request, answer, error)


def _report(
    request: Request, answer: asyncio.Future[Withdrawn], error: BaseException | None
) -> None:
    if request.session.why is None:
        failure = answer.exception()
        if failure is not None:
            assert isinstance(failure, Exception)
            _note(request, error, failure)


def note_loss(request: Request, error: BaseException) -> None:
    """Note the loss on the body's own error, unless that error reports a loss itself."""
    if not isinstance(error, asyncio.CancelledError | LeaseLost | SessionExpired):
        error.add_note(f"meanwhile: {request.loss}")


def _note(request: Request, error: BaseException | None, failure: Exception) -> None:
    note_failure(error, failure, f"the release of {request.name!r} on {request.node}")


MOST_SLOTS = 1024
"""Highest limit of a semaphore with slots."""


class Slots:
    """The slots of one lease, on its session's loop."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._taking = asyncio.Lock()
        self._taken: dict[int, Request] = {}

    async def take(self) -> tuple[int, ...]:
        """Take the missing slots, and return all. When cancelled, it keeps the slots it has.

        Raises:
            AcquireTimeout, EngineUnavailable: the store does not answer.
            InvalidArgument: the semaphore has no limit up to `MOST_SLOTS`.
            LeaseLost, LeaseReleased: the lease is not held.
        """
        request = self._request
        async with self._taking:
            request.check()
            if len(self._taken) < request.count:
                limit = await self._limit()
                while len(self._taken) < request.count:
                    number, slot = await self._lowest(limit)
                    self._taken[number] = slot
                    if not request.held:
                        self.release()
                        request.check()
                self.shrink(request.count)  # the count may have shrunk meanwhile
            return tuple(sorted(self._taken))

    def release(self) -> None:
        """Release all. A release that fails is sent again."""
        self.shrink(0)

    def shrink(self, count: int) -> None:
        """Release all but the lowest."""
        for number in sorted(self._taken)[count:]:
            self._taken.pop(number).abandon()

    async def _limit(self) -> int:
        request = self._request
        session = session_of(request)
        described = await session.contact.answered(
            f"limit of semaphore {request.name!r} on {request.node}",
            described_now(session, request.name, ephemeral=False, owners=False),
        )
        if described.limit > MOST_SLOTS:
            raise InvalidArgument(
                f"{request.name!r} on {request.node} has no slots: they need a lasting semaphore "
                f"with a limit of at most {MOST_SLOTS:,}",
                node=request.node,
                name=request.name,
            )
        # After the limit was lowered, leases may have slots above it.
        return max(described.limit, described.held)

    def _source(self) -> SessionSource:
        # The caller has the lease, which keeps the session.
        return cast(SessionSource, self._request.session.anchor())

    def _options(self, number: int) -> RequestOptions[Request]:
        name = f"{self._request.name}/slot/{number}"
        # A slot is part of its lease, whose own policy handles the loss.
        return RequestOptions(
            "slot",
            name,
            EPHEMERAL_LIMIT,
            handle=as_it_is,
            ephemeral=True,
            on_loss="cancel",
        )

    async def _lowest(self, limit: int) -> tuple[int, Request]:
        """Return the lowest free slot, or the first to become free."""
        free = [number for number in range(limit) if number not in self._taken]
        for number in free:
            slot = await try_acquire(self._source(), self._options(number), 0.0, None)
            if slot is not None:
                return number, slot
        return await self._first(free)

    async def _first(self, numbers: list[int]) -> tuple[int, Request]:
        """Wait in the queues of several slots, and keep the lowest of those granted first."""
        queued: dict[int, Request] = {}
        kept: int | None = None
        try:
            for number in numbers:
                queued[number] = await join(self._source(), self._options(number), None)
            while True:
                kept = next((number for number, slot in queued.items() if slot.held), None)
                if kept is not None:
                    return kept, queued[kept]
                self._request.check()
                gone = [number for number, slot in queued.items() if slot.state is not WAITING]
                if gone:  # evicted, or deleted by force
                    for number in gone:
                        queued[number] = await join(self._source(), self._options(number), None)
                    continue
                changes = [each.change() for each in (self._request, *queued.values())]
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for number, slot in queued.items():
                if number != kept:
                    slot.abandon()


class Lease(AsyncHandle):
    """A granted request.

    Example::

        lease = await session.mutex("nightly").lock()
        async with lease:
            await work(lease.fencing_token)

    ``async with lease:`` enters it: the body is cancelled when the lease is lost, before it can
    have expired in the store, and the block raises `LeaseLost`. A lease that was only awaited
    cancels no task; read `held` or call `check`, and `release` it.

    Keep the lease while it is needed: one that is garbage collected while it is held is released,
    with a `ResourceWarning` that names the line which acquired it.

    A lease object is always truthy; read `held`.

    Attributes:
        session: the `Session` that holds it, typed as its base.
        name: the name of the mutex, semaphore or election.
    """

    __slots__ = ("_anchor", "_request")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._anchor: object = request.session.anchor()  # keeps the session
        if request.session.debug:
            request.site = call_site(debug=True, otherwise=request.site)

    def __del__(self) -> None:
        request = self._request
        state = request.state  # read once: the thread of the event loop changes it
        if state is HELD or state is WAITING:
            self._drop(request, state)

    def _drop(self, request: Request, state: object) -> None:
        """Withdraw the request, which the program can no longer reach. From any thread."""
        session = session_of(request)
        if not session.client.is_running():
            return
        # First, because the session may end with it. A recorded warning keeps the lease.
        self._anchor = None
        session.client.soon(partial(session.withdraw_dropped, request))
        what = f"{request.options.kind} {request.name!r} on {request.node}"
        if state is WAITING:
            what, advice = f"the place in the queue of {what}", "It is withdrawn now; withdraw it"
        else:
            what, advice = f"the lease of {what}", "It is released now; release it"
        warn_dropped(self, request.site or UNKNOWN, what, f"{advice}, or enter it with 'with'.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._request}>"

    # State

    @property
    def session(self) -> SessionHandle:
        """The `Session` that holds it, typed as its base."""
        return cast(SessionAnchor, self._anchor).handle()

    @property
    def name(self) -> str:
        """The name of the mutex, semaphore or election."""
        return self._request.name

    @property
    def node(self) -> str:
        """The path of the node."""
        return self._request.session.node

    @property
    def count(self) -> int:
        """Number of the semaphore's tokens that are held."""
        return self._request.count

    @property
    def fencing_token(self) -> int:
        """Number that rises with every grant in the store; pass it to what the lease protects.

        Raises:
            Unsupported: the store has no order of grants.
        """
        if self._request.order_id is None:
            raise Unsupported(
                f"this engine has no fencing tokens (for {self.name!r} on {self.node}); "
                f"{FULL_STORES} do",
                node=self.node,
                name=self.name,
            )
        return self._request.order_id

    @property
    def store_token(self) -> str:
        """The store's own token for this grant, for its other clients: a dflockd token.

        Empty when the lease has ended. A client with this token can renew and release the grant, so
        keep it secret.

        Raises:
            Unsupported: the store has no tokens of its own.
        """
        token = session_of(self._request).engine.token_of(self._request.id)
        if token is None:
            raise Unsupported(
                f"this engine's store has no tokens of its own (for {self.name!r} on {self.node}); "
                "dflockd:// does",
                node=self.node,
                name=self.name,
            )
        return token

    async def slot(self) -> int:
        """Return a number below the semaphore's limit that no other current holder has.

        The first call takes the lowest free number; the lease keeps it until it ends.

        Example::

            gpus = session.semaphore("gpu")
            await gpus.create(limit=4, exist_ok=True)
            async with gpus.acquire() as lease:
                await work(device=await lease.slot())

        Raises:
            InvalidArgument: the count is not 1 (use `slots`); or the semaphore is ephemeral, or
                its limit is above 1,024.
            AcquireTimeout, EngineUnavailable: the store cannot be reached, or does not answer.
            LeaseLost, LeaseReleased: the lease is no longer held.
        """
        if self._request.count != 1:
            raise InvalidArgument(
                f"the lease of {self.name!r} on {self.node} has {self.count} slots: use slots()",
                node=self.node,
                name=self.name,
            )
        (slot,) = await self.slots()
        return slot

    async def slots(self) -> tuple[int, ...]:
        """Return as many numbers as the lease's count, in ascending order; see `slot`.

        Raises:
            InvalidArgument: the semaphore is ephemeral, or its limit is above 1,024.
            AcquireTimeout, EngineUnavailable: the store cannot be reached, or does not answer.
            LeaseLost, LeaseReleased: the lease is no longer held.
        """
        request = self._request
        if request.slots is None:
            request.slots = Slots(request)
        return await request.slots.take()

    @property
    def deadline(self) -> float:
        """Time up to which the lease is proven: seconds on the client's clock (`Client.clock`)."""
        return session_of(self._request).deadline

    @property
    def held(self) -> bool:
        """True while the lease is held. Reads the clock at every call; safe from any thread."""
        return self._request.held

    @property
    def loss(self) -> LeaseLost | None:
        """The loss of the lease, or ``None``. Reads the clock; safe from any thread."""
        request = self._request
        return None if request.held else request.loss

    def check(self) -> None:
        """Raise unless the lease is held. Useful in loops and threads.

        Raises:
            LeaseLost: it was lost.
            LeaseReleased: it was released.
        """
        self._request.check()

    async def wait_lost(self) -> LeaseLost:
        """Wait until the lease is lost, and return the loss.

        Raises:
            LeaseReleased: it was released instead.
        """
        request = self._request
        while request.held:
            request.session.check_loop()
            await request.change()
        if request.loss is None:
            raise request.why_not_held()
        return request.loss

    # Actions

    async def guard(self, connection: object) -> None:
        """Let the transaction of `connection` succeed only while the lease is held.

        For a store in PostgreSQL, and a transaction in the same database. Call it before the first
        write. Until the transaction ends, the store grants the lease to no other request, even if
        this program is paused meanwhile. `release` waits for the end of the transaction, so end it
        before the lease's block.

        Example::

            import psycopg

            async with (
                tenure.connect("postgresql:///jobs") as client,
                client.mutex("report").lock() as lease,
                await psycopg.AsyncConnection.connect("dbname=jobs") as connection,
            ):
                await lease.guard(connection)
                await connection.execute("CREATE TABLE report (body text)")

        Args:
            connection: an ``AsyncConnection`` or ``AsyncCursor`` of psycopg, a ``Connection`` of
                asyncpg, or an ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy on these.

        Raises:
            LeaseLost: the lease is no longer held, by this program's clock or in the database. Roll
                the transaction back.
            LeaseReleased: it was released.
            Unsupported: the store is not in PostgreSQL, or is reached through a server; see
                `tenure.fencing`.
            InvalidArgument: `connection` is of another type.
            Misuse: no transaction is open, so the guard ended with its statement.
            Exception: any other error of the driver, such as a serialization failure.
        """
        await guard(self._request, connection)

    async def release(self) -> None:
        """Release the lease. Safe to call twice; takes effect even when cancelled.

        Raises:
            LeaseLost: it was lost before, even if only the release shows it because the store's
                queue no longer contains the request. `on_loss` is not carried out then.
        """
        request = self._request
        if not request.held and request.loss is not None:
            raise request.why_not_held()
        await request.leave()

    async def update(self, data: bytes | None = None, *, count: int | None = None) -> None:
        """Shrink the count, or replace the request's data; the place and the token are kept.

        Raises:
            InvalidArgument: the count would grow, or is not positive.
            LeaseLost, LeaseReleased: the lease is no longer held.
        """
        self.check()
        if count is None and data is None:
            raise InvalidArgument("update a lease's count, its data, or both", name=self.name)
        request = self._request
        session = session_of(request)
        try:
            answer = session.engine.alter(request.id, count=count, data=data)
            if answer is None:
                self._altered(count, None)
            else:
                when_answered(answer, partial(self._altered, count))
                await session.race(asyncio.shield(answer))
        except SessionExpired as error:
            raise session.expired(error) from None
        except LeaseReleased:
            # The store does not know the request, and the program has not released it (unless just
            # now).
            request.taken("its request was no longer in the store's queue")
            raise request.why_not_held() from None

    def _altered(self, count: int | None, answer: asyncio.Future[None] | None) -> None:
        """Process the store's answer, even if no task waits for it any more."""
        failed = answer is not None and (answer.cancelled() or answer.exception() is not None)
        if count is not None and not failed:
            self._request.count = count
            if self._request.slots is not None:
                self._request.slots.shrink(count)

    async def __aenter__(self) -> Lease:
        self._check_enterable()
        self._request.session.check_loop()
        self._enter()
        return self

    def _check_enterable(self) -> None:
        request = self._request
        held = request.held
        if request.scope is not None:
            raise self._entered_already()
        if not held:
            raise request.why_not_held()

    def _entered_already(self) -> Misuse:
        return Misuse(
            f"the lease of {self.name!r} has been entered already; a lease is entered once",
            node=self.node,
            name=self.name,
        )

    def _enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Enter in that task; by default, in the session's current one."""
        request = self._request
        try:
            del request.unentered
        except AttributeError:
            raise self._entered_already() from None
        request.scope = scope = Scope(request)
        scope.enter(task or asyncio.current_task(request.session.loop))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        request = self._request
        if request.scope is None:
            raise Misuse(
                f"the lease of {self.name!r} is left without having been entered",
                node=self.node,
                name=self.name,
            )
        cancelled = request.scope.exit(error)
        answer = start_leaving(self, request, error)
        if answer is not None:
            await finish_leaving(request, answer, error)
        if request.loss is not None:
            if error is None or cancelled:
                raise request.why_not_held()
            note_loss(request, error)


class Acquirable(AsyncHandle):
    """Base of the primitives that are blocks themselves: ``async with mutex:``.

    One object is entered by any number of tasks, and of threads of `tenure.blocking`, at once. Each
    of them leaves the lease that it entered last.
    """

    if TYPE_CHECKING:
        name: str

        def _acquired(self, site: CallSite) -> Coroutine[Any, Any, Lease]:
            """Acquire the lease of a block."""

    _blocks: dict[asyncio.Task[object] | None, list[Lease]]

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:  # pragma: no branch

        def __call__(self, *_):
            raise TypeError(
                f"{self!r} is no decorator, and is not called: write 'async with' inside the "
                "function, or @client.exclusive(name) or @client.limited(name, limit) above it"
            )

    async def __aenter__(self) -> Lease:
        lease = await self._acquired(call_site())
        lease._enter()  # noqa: SLF001  what entering its block would do
        self._blocks.setdefault(asyncio.current_task(), []).append(lease)
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(self._entered(asyncio.current_task()), kind, error, trace)

    def _entered(self, task: asyncio.Task[object] | None) -> Lease:
        """Return the lease that a task entered last; or the only one that there is.

        Exit stacks and fixtures leave a block in another task than they have entered it in.
        """
        leases = self._blocks.get(task) or [each for some in self._blocks.values() for each in some]
        if not leases or (task not in self._blocks and len(leases) > 1):
            raise Misuse(
                f"{self!r} is left by a task that is not inside; enter {self!r} in this task, or "
                "keep the lease",
                name=self.name,
            )
        return leases[-1]

    def _forget(self, lease: Lease) -> None:
        for task, leases in list(self._blocks.items()):
            if lease in leases:
                leases.remove(lease)
                if not leases:
                    del self._blocks[task]

    async def _leave(
        self,
        lease: Lease,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forget(lease)
        await lease.__aexit__(kind, error, trace)
