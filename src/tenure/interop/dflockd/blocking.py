"""`tenure.interop.dflockd` for threads: the same lock and semaphore, without ``await``.

A thread cannot be cancelled. `held` and `check` show whether the lock is held; the end of a
``with`` block and of `with_lock` raises `LeaseLost` if it was lost.

From acquiring or enqueuing until the release, the thread of `tenure.blocking` renews it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from tenure.blocking.blocks import as_it_is
from tenure.blocking.portal import Portal, the_portal
from tenure.blocking.wrapper import obtaining, releasing
from tenure.errors import AcquireTimeout, LeaseLost
from tenure.interop.dflockd import lock as async_lock
from tenure.interop.dflockd.lock import Enqueued, OnLockLost

__all__ = ["DistributedLock", "DistributedSemaphore"]

P = ParamSpec("P")
T = TypeVar("T")


class _Program:
    """Registration with the loop's thread while a lock is held or waited for."""

    def __init__(self, wrapped: async_lock.LockOrSemaphore) -> None:
        self._wrapped = wrapped
        self.closing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the servers, without secrets."""
        return self._wrapped.url

    async def aclose(self) -> None:
        """Close the asynchronous lock."""
        if self.closing is None:
            self.closing = asyncio.get_running_loop().create_task(self._wrapped.close())
        await asyncio.wait([self.closing])
        self.closing.result()


class _Holder:
    """Base of the lock and the semaphore."""

    def __init__(self, wrapped: async_lock.LockOrSemaphore) -> None:
        self._wrapped = wrapped
        self._portal: Portal = the_portal()
        self._program: _Program | None = None

    def __repr__(self) -> str:
        return repr(self._wrapped)

    @property
    def key(self) -> str:
        """Key of the lock or semaphore."""
        return self._wrapped.key

    @property
    def limit(self) -> int:
        """Maximum number of holders at a time."""
        return self._wrapped.limit

    @property
    def lease(self) -> int:
        """Lease in seconds that the server grants; it is renewed while it is held."""
        return self._wrapped.lease

    @property
    def token(self) -> str | None:
        """Token from the server; ``None`` when it is not held. Reads the clock."""
        return self._wrapped.token

    @property
    def held(self) -> bool:
        """Return whether it is held. Reads the clock at every call."""
        return self._wrapped.held

    @property
    def fencing_token(self) -> int:
        """Number that rises with every grant of this key. Raises `Misuse`, `Unsupported`."""
        return self._wrapped.fencing_token

    def acquire(self, *, force: bool = False) -> bool:
        """Wait for it, for `acquire_timeout` seconds; return false on timeout.

        Raises like the asynchronous method.
        """
        if force:
            self._stop()
        return self._got(self._obtain(self._wrapped.acquire))

    def enqueue(self) -> Enqueued:
        """Join the queue: ``"acquired"`` when it is held at once, else ``"queued"``."""
        return self._obtain(self._wrapped.enqueue)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the grant after `enqueue`; on timeout, withdraw and return false."""
        return self._got(self._obtain(self._wrapped.wait, timeout))

    def release(self) -> bool:
        """Release it, or leave the queue. Return false if it was not held (any more)."""
        was_held = self.held
        self._stop()
        return was_held

    def close(self) -> None:
        """Release the lock, as `release` does."""
        self._stop()

    def check(self) -> None:
        """Raise unless it is held: `LeaseLost`, or `Misuse` if it never was."""
        self._wrapped.check()

    def with_lock(self, work: Callable[[], T]) -> T:
        """Acquire, do the work in this thread, release.

        Raises:
            AcquireTimeout: it was not granted in time; the work was not done.
            LeaseLost: it was lost during the work.
        """
        with self:
            return work()

    def __enter__(self) -> Self:
        if not self.acquire():
            raise AcquireTimeout(f"{self.key!r} was not granted in time", name=self.key)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._wrapped.check()
        except LeaseLost as loss:
            if error is None:
                raise
            error.add_note(f"meanwhile: {loss}")
        finally:
            self._stop()

    # With the loop's thread

    @obtaining
    def _obtain(self, function: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Call a function on the loop; an interrupted caller holds nothing and does not wait."""
        started = self._program is None
        if started:
            self._program = program = _Program(self._wrapped)
        try:
            if started:
                self._portal.serve(program)
            return self._portal.obtain(as_it_is, self._undo, function, *args, **named)
        except BaseException:
            if started or self._wrapped.is_idle:
                self._stop()
            raise

    def _undo(self, _: object) -> None:
        """Leave the release of an abandoned lock to `_stop`, which follows."""

    def _got(self, granted: bool) -> bool:
        if not granted:
            self._stop()
        return granted

    @releasing
    def _stop(self) -> None:
        portal, program = self._portal, self._program
        if program is not None:
            try:
                portal.release(self._close, program)
            finally:
                portal.wait_for_end()

    async def _close(self, program: _Program) -> None:
        try:
            await self._portal.close(program, program.aclose)
        finally:
            self._program = None


class DistributedLock(_Holder):
    """`tenure.interop.dflockd.DistributedLock`, for threads.

    Args:
        key: the key, without white space, at most 255 bytes.
        on_lock_lost: called in the thread that renews, with the key and the token; it must not
            block.
        options: as for the asynchronous lock.
    """

    def __init__(self, key: str, *, on_lock_lost: OnLockLost | None = None, **options: Any) -> None:
        """Set the options; nothing is sent to the servers."""
        super().__init__(async_lock.DistributedLock(key, on_lock_lost=on_lock_lost, **options))


class DistributedSemaphore(_Holder):
    """`tenure.interop.dflockd.DistributedSemaphore`, for threads."""

    def __init__(
        self, key: str, limit: int, *, on_lock_lost: OnLockLost | None = None, **options: Any
    ) -> None:
        """Set the options; nothing is sent to the servers."""
        super().__init__(
            async_lock.DistributedSemaphore(key, limit, on_lock_lost=on_lock_lost, **options)
        )
