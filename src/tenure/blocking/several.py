"""Several locks as one, for threads: as `tenure._client.several`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, overload

from tenure._client import several as async_several
from tenure._client.internals import abandon_all, note_lease_site
from tenure.blocking.blocks import undo_acquire
from tenure.blocking.lease import Lease
from tenure.blocking.portal import Portal
from tenure.blocking.primitives import Mutex, Semaphore
from tenure.blocking.wrapper import SyncWrapper, obtaining, releasing
from tenure.durations import Duration
from tenure.errors import InvalidArgument, LeaseLost


class Leases(SyncWrapper[async_several.Leases], Sequence[Lease]):
    """The leases of `Client.all_of`, in the order of its arguments.

    Example::

        gpu = client.semaphore("gpu", limit=4)
        with client.all_of(client.mutex("model"), (gpu, 2), timeout=5) as leases:
            model, gpus = leases
            work(model.fencing_token, devices=gpus.slots())
    """

    __slots__ = ()

    def __init__(self, portal: Portal, wrapped: async_several.Leases) -> None:
        super().__init__(portal, wrapped)
        for each in wrapped:
            note_lease_site(each)

    @overload
    def __getitem__(self, index: int) -> Lease: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Lease, ...]: ...

    def __getitem__(self, index: int | slice) -> Lease | tuple[Lease, ...]:
        """Return a lease by its number in the order of the arguments."""
        if isinstance(index, slice):
            return tuple(Lease(self._portal, each) for each in self._wrapped[index])
        return Lease(self._portal, self._wrapped[index])

    def __len__(self) -> int:
        """Return the number of leases."""
        return len(self._wrapped)

    @property
    def held(self) -> bool:
        """True while all are held. Reads the clock at every call; safe from any thread."""
        return self._wrapped.held

    @property
    def loss(self) -> LeaseLost | None:
        """The first loss, in the order of the leases, or ``None``. Safe from any thread."""
        return self._wrapped.loss

    def check(self) -> None:
        """Raise unless all are held. Useful in loops and threads.

        Raises:
            LeaseLost: one was lost, or another lease whose block the calling thread is inside.
            LeaseReleased: one was released.
        """
        self._portal.check_blocks()
        self._wrapped.check()


class AllOf(SyncWrapper[async_several.AllOf]):
    """Block of `Client.all_of`."""

    __slots__ = ()

    @obtaining
    def __enter__(self) -> Leases:
        """Take all locks."""
        return self._portal.obtain(Leases, abandon_all, self._wrapped.__aenter__)

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release all locks, or raise `LeaseLost`."""
        self._portal.leave(self._wrapped.__aexit__, kind, error, trace)


class Several(SyncWrapper[Any]):
    """Methods of a client that take several locks as one."""

    __slots__ = ()

    def all_of(
        self, *locks: Mutex | Semaphore | tuple[Semaphore, int], timeout: Duration | None = None
    ) -> AbstractContextManager[Leases]:
        """Take several locks as one: ``with client.all_of(a, (gpu, 2)) as leases``.

        The block holds all of them. After the loss of one, the next call of this library inside of
        it raises `LeaseLost`, and so does its end. They are taken one after the other, in the order
        of their names and not of the arguments, so that programs which need the same locks never
        wait for each other in a circle. Take all that the work needs in one call: a lock that is
        held around the block is outside of this order. While the last locks are waited for, the
        first ones are held already, and others wait for them.

        Args:
            *locks: mutexes, semaphores (one token), and pairs ``(semaphore, count)``. Any sessions,
                clients and stores.
            timeout: seconds to wait for all; 0 tries each once; ``None`` waits until they are
                granted.

        Raises:
            AcquireTimeout: not all were granted in time; nothing is kept. It names the one that was
                not.
            InvalidArgument: an argument is no lock, or stands there twice.
            LeaseLost: one was lost while the others were waited for.
            SelfDeadlock, SemaphoreNotFound, SessionExpired, SessionClosed: as for `Mutex.lock` and
                `Semaphore.acquire`.
        """
        wanted = map(_unwrapped, locks)
        return AllOf(self._portal, self._wrapped.all_of(*wanted, timeout=timeout))

    @obtaining
    def any_of(
        self, *locks: Mutex | Semaphore | tuple[Semaphore, int], timeout: Duration | None = None
    ) -> Lease:
        """Take the first of several locks that is free.

        ``with client.any_of(a, b) as lease``.

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
        wanted = map(_unwrapped, locks)
        return self._portal.obtain(
            Lease, undo_acquire, self._wrapped.any_of, *wanted, timeout=timeout
        )


def _unwrapped(lock: object) -> Any:
    match lock:
        case Mutex() | Semaphore():
            return lock._wrapped  # noqa: SLF001  its own class
        case (Semaphore() as semaphore, count):
            return semaphore._wrapped, count  # noqa: SLF001  its own class
        case Lease():
            raise InvalidArgument(
                f"{lock!r} is acquired already: write the mutex in place of mutex.lock(), and "
                "(semaphore, 2) in place of semaphore.acquire(2)",
                node=lock.node,
                name=lock.name,
            )
        case _:
            return lock  # the error says what it is not
