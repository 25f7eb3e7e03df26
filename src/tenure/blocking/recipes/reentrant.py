"""Locking a re-entrant mutex in a thread: the parts of its wrappers that are not generated."""

from __future__ import annotations

from tenure import recipes as async_recipes
from tenure._client.lease import Lease as AsyncLease
from tenure._client.loss import OnLoss
from tenure.blocking.blocks import undo_acquire
from tenure.blocking.lease import Lease
from tenure.blocking.wrapper import SyncWrapper, obtaining, wrap
from tenure.durations import Duration


class InnerLeaseBlock(Lease):
    """Entering the block of an inner lease."""

    __slots__ = ()

    def _undo_entering(self, interruption: BaseException) -> None:
        # The request's scope is that of the outermost block.
        self._portal.leave(self._wrapped.__aexit__, type(interruption), interruption, None)


class ReentrantBlock(SyncWrapper["async_recipes.ReentrantMutex"]):
    """Locking a re-entrant mutex."""

    __slots__ = ()

    @obtaining
    def lock(
        self,
        *,
        holding: Lease | None = None,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Lease:
        """Lock the mutex, or enter it again: ``with mutex.lock() as lease``.

        The lease can be passed on, also to other threads. An inner one has the fencing token of the
        outermost block, and its `Lease.release` does nothing. The end of an inner block raises when
        the lease has ended before it: by a loss, or because the outermost block was left.

        Args:
            holding: a held lease of this mutex, obtained through the same client; the store is not
                called then, and the other arguments have no effect. ``None``: lock it.
            data: bytes of the request, which clients see in descriptions of the holder.
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after the loss; the lease
                counts as lost that much earlier.

        Raises:
            LeaseLost, LeaseReleased: `holding` is no longer held.
            InvalidArgument: `holding` is not a lease of this mutex; or a lasting semaphore has that
                name.
            AcquireTimeout: not granted in time.
            SelfDeadlock: what the program holds prevents the grant, and no other thread is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        lease: Lease = self._portal.obtain(
            wrap,
            _undo,
            self._wrapped.lock,
            holding=None if holding is None else _asynchronous(holding),
            data=data,
            timeout=timeout,
            on_loss=on_loss,
            stop_time=stop_time,
        )
        return lease


def _asynchronous(lease: Lease) -> AsyncLease:
    """Return the lease behind a wrapper; anything else is rejected later."""
    return lease._wrapped if isinstance(lease, Lease) else lease  # noqa: SLF001  its own class


def _undo(lease: AsyncLease) -> None:
    if not isinstance(lease, async_recipes.InnerLease):
        undo_acquire(lease)
