"""A mutex: one holder at a time, in strict FIFO order. It needs no set-up.

It is an ephemeral semaphore of which a holder takes all tokens. It exists while it has a holder or
a waiter.
"""

from __future__ import annotations

from typing import Never

from tenure._client.acquire import acquire, try_acquire
from tenure._client.habits import unknown_argument
from tenure._client.handles import CallSite, call_site
from tenure._client.lease import Acquirable, Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import RequestOptions
from tenure._client.source import SessionSource
from tenure._client.ticket import Ticket, enqueue, recover
from tenure._client.watch import described_now
from tenure.core import rules
from tenure.durations import Duration, timeout_seconds
from tenure.model import EPHEMERAL_LIMIT, MutexHolder, SemaphoreDescription


class Mutex(Acquirable):
    """A mutex on a node. Not re-entrant.

    Example::

        mutex = session.mutex("nightly")
        async with mutex as lease:
            await work(lease.fencing_token)

        async with mutex.lock(timeout=5) as lease:
            await work(lease.fencing_token)

        if lease := await mutex.try_lock():
            async with lease:
                await work(lease.fencing_token)

    The mutex itself is the block of `lock` without arguments. Any number of tasks may enter one
    object; each waits for its turn.

    A mutex and a service registry must not share a name: the store cannot distinguish them.

    Attributes:
        name: 1 to 1,024 bytes.
    """

    def __init__(self, source: SessionSource, name: str) -> None:
        rules.check_name(name)
        self.name = name
        self._source = source
        self._blocks = {}
        self._plain = RequestOptions("mutex", name, EPHEMERAL_LIMIT, handle=Lease, ephemeral=True)

    def __repr__(self) -> str:
        return f"<Mutex {self.name!r}>"

    def lock(
        self,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
        **_unknown: Never,
    ) -> Once[Lease]:
        """Lock the mutex: ``async with mutex.lock() as lease``, or ``await`` it.

        Args:
            data: bytes of the request, which clients see in descriptions of the holder.
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            AcquireTimeout: not granted in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            InvalidArgument: a lasting semaphore has that name.
            Deadlock: this wait is the victim of a deadlock, in a session that was opened with
                ``on_deadlock="raise"``.
            SelfDeadlock: what the program holds prevents the grant, and no other task is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        if _unknown:
            raise unknown_argument("lock", _unknown)
        options = self._plain
        if data != b"" or on_loss is not None or stop_time != 0.0:
            options = self._options(data, on_loss, stop_time)
        limit = None if timeout is None else timeout_seconds(timeout)
        return Once(options, acquire, self._source, options, limit, call_site())

    async def try_lock(
        self,
        *,
        data: bytes = b"",
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
        **_unknown: Never,
    ) -> Lease | None:
        """Lock the mutex if it is free and has no waiters; else ``None``.

        Raises:
            AcquireTimeout: the store cannot be reached, or does not answer; ``__cause__`` is the
                failure.
        """
        if _unknown:
            raise unknown_argument("try_lock", _unknown)
        options = self._options(data, on_loss, stop_time)
        return await try_acquire(self._source, options, 0.0, call_site())

    def enqueue(
        self, *, data: bytes = b"", on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Once[Ticket[Lease]]:
        """Join the queue now, and wait for the grant later, with the ticket.

        ``async with mutex.enqueue() as ticket``, or ``await`` it. Raises as `lock`.

        Args:
            data: bytes of the request, as for `lock`.
            on_loss: reaction to a loss, besides raising it, as for `lock`.
            stop_time: seconds that the work needs to stop, as for `lock`.
        """
        options = self._options(data, on_loss, stop_time)
        return Once(options, enqueue, self._source, options, call_site())

    def recover(
        self, *, on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Ticket[Lease] | None:
        """Claim the first request for this mutex of a resumed session, or return ``None``.

        Each request is returned once. The ticket keeps it, and can `wait` for it or withdraw it.

        Args:
            on_loss: reaction to a loss, besides raising it, as for `lock`.
            stop_time: seconds that the work needs to stop, as for `lock`.
        """
        return recover(self._source, self._options(b"", on_loss, stop_time), call_site())

    async def locked(self) -> bool:
        """Read whether the mutex has a holder, in this program or another.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: a lasting semaphore has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return (await self.describe()).held > 0

    async def describe(
        self, *, owners: bool = False, waiters: bool = False
    ) -> SemaphoreDescription:
        """Describe the mutex: an ephemeral semaphore, empty while the mutex is free.

        Args:
            owners: include the holder.
            waiters: include the waiting requests, in their order.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: a lasting semaphore has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return await self._source.contact.answered(
            f"mutex {self.name!r} on {self._source.node}",
            self._described_now(owners=owners, waiters=waiters),
        )

    async def _described_now(self, *, owners: bool, waiters: bool) -> SemaphoreDescription:
        session = await self._source.obtain()
        return await described_now(
            session, self.name, ephemeral=True, owners=owners, waiters=waiters
        )

    async def inspect(self) -> MutexHolder | None:
        """Read the holder of the mutex, or ``None`` when it is free. A short form of `describe`.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
        """
        return await self._source.contact.answered(
            f"mutex {self.name!r} on {self._source.node}", self._holder_now()
        )

    async def _holder_now(self) -> MutexHolder | None:
        session = await self._source.obtain()
        described = await described_now(session, self.name, ephemeral=True, owners=True)
        if not described.owners:
            return None
        owner = described.owners[0]
        return MutexHolder(
            data=owner.data,
            is_me=owner.session_id == session.id,
            fencing_token=owner.order_id,
            since=owner.since,
            remaining=owner.remaining,
            waiting=described.waiting,
            host=owner.host,
            pid=owner.pid,
            program=owner.program,
            description=owner.session_description,
        )

    def _wanted(self, _count: int) -> RequestOptions[Lease]:
        return self._plain

    async def _acquired(self, site: CallSite) -> Lease:
        return await acquire(self._source, self._plain, None, site)

    def _options(
        self, data: bytes, on_loss: OnLoss | None, stop_time: Duration
    ) -> RequestOptions[Lease]:
        return RequestOptions(
            "mutex",
            self.name,
            EPHEMERAL_LIMIT,
            data,
            handle=Lease,
            ephemeral=True,
            on_loss=on_loss,
            stop_time=stop_time,
        )
