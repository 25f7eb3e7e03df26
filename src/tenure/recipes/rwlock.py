"""A read/write lock: many readers or one writer, in strict FIFO order. It needs no set-up.

It is an ephemeral semaphore: a reader acquires 1 token, a writer all of them. Order, fencing and
loss are the semaphore's.
"""

from __future__ import annotations

from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure.durations import Duration
from tenure.model import EPHEMERAL_LIMIT
from tenure.recipes.base import Source


class RWLock:
    """A read/write lock on a node. Not re-entrant.

    Example::

        from tenure.recipes import RWLock

        catalogue = RWLock(session, "catalogue")
        async with catalogue.write() as lease:
            await work(lease.fencing_token)
        async with catalogue.read():
            await work()

    Readers share it, a writer is alone. No request overtakes another: readers queue behind a
    waiting writer, so neither readers nor writers can starve. Fencing tokens rise in the order of
    the queue, for readers and writers alike.

    To downgrade from writing to reading atomically, shrink the lease: ``await
    lease.update(count=1)``. Upgrading is not possible: two readers that upgrade would wait for each
    other. A task that waits again without a timeout inside of a block that is the obstacle gets
    `SelfDeadlock`. A reader that reads again behind a waiting writer is not detected, so pass the
    lease on instead.

    A mutex of the same name counts as a writer.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes.
    """

    def __init__(self, source: Source, name: str) -> None:
        """Set the name; nothing is sent to the store."""
        self.name = name
        self._semaphore = source.semaphore(name, ephemeral=True)

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<RWLock {self.name!r}>"

    def read(
        self,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Lease]:
        """Lock for reading: ``async with lock.read() as lease``, or ``await`` it.

        Args:
            data: bytes of the request, which clients see in descriptions of the holders.
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            AcquireTimeout: not granted in time.
            InvalidArgument: a lasting semaphore has that name.
            SelfDeadlock: what the program holds prevents the grant, and no other task is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        return self._semaphore.acquire(
            1, data=data, timeout=timeout, on_loss=on_loss, stop_time=stop_time
        )

    def write(
        self,
        *,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Lease]:
        """Lock for writing: ``async with lock.write() as lease``, or ``await`` it.

        The arguments and the errors are those of `read`.
        """
        return self._semaphore.acquire(
            EPHEMERAL_LIMIT, data=data, timeout=timeout, on_loss=on_loss, stop_time=stop_time
        )

    async def try_read(
        self, *, data: bytes = b"", on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Lease | None:
        """Lock for reading if there are no writers and no waiters; else ``None``."""
        return await self._semaphore.try_acquire(1, data=data, on_loss=on_loss, stop_time=stop_time)

    async def try_write(
        self, *, data: bytes = b"", on_loss: OnLoss | None = None, stop_time: Duration = 0.0
    ) -> Lease | None:
        """Lock for writing if there are no holders and no waiters; else ``None``."""
        return await self._semaphore.try_acquire(
            EPHEMERAL_LIMIT, data=data, on_loss=on_loss, stop_time=stop_time
        )
