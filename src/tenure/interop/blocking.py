"""`tenure.interop` for threads: the same locks, without ``await``.

A `Connection` makes them, and runs a thread that refreshes held locks until it is closed.

Example::

    from tenure.interop.blocking import connect

    with connect("redis://localhost") as redis:
        lock = redis.exclusive_lock("nightly")
        if lock.acquire():
            work()
            lock.release()
        with redis.semaphore("pool", limit=4).take(2) as permits:
            work(permits.count)

A thread cannot be cancelled. Long work should check `ExclusiveLock.held` or call `Permits.check`
from time to time; the block of lost permits raises `LockLost` at its end in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

from tenure.blocking.blocks import as_it_is
from tenure.blocking.portal import Portal, the_portal
from tenure.blocking.wrapper import obtaining, releasing
from tenure.errors import Misuse, SessionClosed
from tenure.interop import exclusive_lock as async_lock
from tenure.interop.effect import permits as async_permits
from tenure.interop.effect import semaphore as async_semaphore
from tenure.interop.effect.client import RedisBacking
from tenure.interop.effect.permits import LockLost
from tenure.interop.endings import UNDO_TIMEOUT
from tenure.interop.exclusive_lock import Event, Inspection
from tenure.interop.program import Program

__all__ = ["Connection", "DistributedSemaphore", "ExclusiveLock", "Permits", "Taking", "connect"]

T = TypeVar("T")
P = TypeVar("P", bound="Permits | None")
Wrapped: TypeAlias = "async_permits.Permits | None"


def connect(url: str, **options: Any) -> Connection:
    """Return a connection to the Redis at `url`; URL and options are those of redis-py.

    Raises:
        ValueError: the URL is wrong.
        Unsupported: threads have been replaced by eventlet, or by gevent after the first use.
    """
    portal = the_portal()
    portal.check_caller()
    program = Program(url, options)
    connection = Connection(portal, program)
    try:
        portal.serve(program)
        return connection
    except BaseException:
        portal.discard(program)
        raise


class Connection:
    """A connection to Redis; `connect` makes one. Any number of threads may use it."""

    def __init__(self, portal: Portal, program: Program) -> None:
        """Use the connection `program`, which belongs to the portal's loop."""
        self._portal = portal
        self._program = program

    def exclusive_lock(self, name: str, **how: Any) -> ExclusiveLock:
        """Return an `ExclusiveLock`, with the arguments of `tenure.interop.exclusive_lock`'s."""
        lock = async_lock.ExclusiveLock(name, self._program.redis, **how)
        return ExclusiveLock(self._portal, self._program, lock)

    def semaphore(
        self, key: str, *, key_prefix: str = "semaphore:", push: bool = True, **how: Any
    ) -> DistributedSemaphore:
        """Return a `DistributedSemaphore`, with the arguments of `tenure.interop.effect`'s."""
        backing = RedisBacking(self._program.redis, key_prefix=key_prefix, push=push)
        semaphore = async_semaphore.DistributedSemaphore(key, backing, **how)
        return DistributedSemaphore(self._portal, self._program, semaphore)

    @releasing
    def close(self) -> None:
        """Release the locks that are held, and close the connection. Safe to call twice.

        Raises:
            EngineError: a lock could not be released; it will expire. The connection is closed
                nevertheless.
        """
        portal = self._portal
        try:
            portal.release(portal.close, self._program, self._program.aclose)
        finally:
            portal.wait_for_end()

    def __enter__(self) -> Connection:
        """Enter the block that closes the connection at its end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()


class ExclusiveLock:
    """`tenure.interop.exclusive_lock.ExclusiveLock`, for threads."""

    def __init__(self, portal: Portal, program: Program, wrapped: async_lock.ExclusiveLock) -> None:
        """Wrap an asynchronous lock."""
        self._portal = portal
        self._program = program
        self._wrapped = wrapped

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._wrapped.name

    @property
    def key(self) -> str:
        """The key in Redis."""
        return self._wrapped.key

    @property
    def contents(self) -> bytes:
        """Contents that are written into the key."""
        return self._wrapped.contents

    @property
    def held(self) -> bool:
        """Return whether the lock is held, and cannot have expired yet."""
        return self._wrapped.held

    @obtaining
    def acquire(self) -> bool:
        """Acquire the lock if it is free. Raises `EngineError`."""
        return self._portal.obtain(as_it_is, self._undo, self._acquire)

    async def _acquire(self) -> bool:
        self._program.check_open()
        self._program.locks.add(self._wrapped)
        return await self._wrapped.acquire()

    def _undo(self, acquired: bool) -> None:
        if acquired:
            self._wrapped.release_soon()

    def inspect(self) -> Inspection | None:
        """Return the contents of the key, written by any holder. Raises `EngineError`."""
        return self._portal.call(self._inspect)

    async def _inspect(self) -> Inspection | None:
        self._program.check_open()
        return await self._wrapped.inspect()

    @releasing
    def release(self) -> None:
        """Release the lock, if it is held. Raises `EngineError`."""
        self._portal.release(self._wrapped.release)

    def on(self, event: Event, listener: Callable[..., object]) -> Callable[[], None]:
        """Register a function for an event, called in the refreshing thread; it must not block."""
        return self._wrapped.on(event, listener)


class DistributedSemaphore:
    """`tenure.interop.effect.DistributedSemaphore`, for threads."""

    def __init__(
        self, portal: Portal, program: Program, wrapped: async_semaphore.DistributedSemaphore
    ) -> None:
        """Wrap an asynchronous semaphore."""
        self._portal = portal
        self._program = program
        self._wrapped = wrapped

    @property
    def key(self) -> str:
        """Name of the semaphore in the backing."""
        return self._wrapped.key

    @property
    def limit(self) -> int:
        """Number of permits of the semaphore."""
        return self._wrapped.limit

    def take(
        self, permits: int, *, identifier: str | None = None, acquired_externally: bool = False
    ) -> Taking[Permits]:
        """Wait for permits, and hold them for the block: ``with semaphore.take(2) as permits``."""
        how: dict[str, Any] = {
            "identifier": identifier,
            "acquired_externally": acquired_externally,
        }
        take = partial(self._wrapped.take, permits, **how)
        return Taking(self._portal, self._program, self._wrapped, take, _permits)

    def try_take(
        self, permits: int, *, identifier: str | None = None, acquired_externally: bool = False
    ) -> Taking[Permits | None]:
        """Take permits without waiting; the block gets ``None`` if they are not free."""
        how: dict[str, Any] = {
            "identifier": identifier,
            "acquired_externally": acquired_externally,
        }
        take = partial(self._wrapped.try_take, permits, **how)
        return Taking(self._portal, self._program, self._wrapped, take, _wrap_or_none)

    def with_permits(self, permits: int, work: Callable[[], T], **how: Any) -> T:
        """Wait for permits, do the work in this thread, and release them."""
        with self.take(permits, **how):
            return work()

    def with_permits_if_available(
        self, permits: int, work: Callable[[], T], *, otherwise: T | None = None, **how: Any
    ) -> T | None:
        """Do the work with permits if they are free; if not, return `otherwise` at once."""
        with self.try_take(permits, **how) as taken:
            return otherwise if taken is None else work()

    def current_count(self) -> int:
        """Return the number of permits held. Raises `BackingError`."""
        return self._portal.call(self._current_count)

    async def _current_count(self) -> int:
        self._program.check_open()
        return await self._wrapped.current_count()


class Taking(Generic[P]):
    """Permits for the block of one ``with`` statement.

    A separate task holds them on the loop, so that their loss does not interrupt a call of the
    thread.
    """

    def __init__(
        self,
        portal: Portal,
        program: Program,
        wrapped: async_semaphore.DistributedSemaphore,
        take: Callable[[], AbstractAsyncContextManager[Wrapped]],
        handle: Callable[[Wrapped], P],
    ) -> None:
        """Prepare the block; nothing is acquired before it is entered."""
        self._portal = portal
        self._program = program
        self._wrapped = wrapped
        self._take = take
        self._handle = handle
        self._holding: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()

    @obtaining
    def __enter__(self) -> P:
        """Acquire the permits."""
        return self._portal.obtain(self._taken_by, self._undo, self._begin)

    def _taken_by(self, _: Portal, taken: Wrapped) -> P:
        return self._handle(taken)

    @releasing
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the permits."""
        self._portal.leave(self._end, kind, error, trace)

    # On the loop

    async def _begin(self) -> Wrapped:
        self._program.check_open()
        if self._holding is not None:
            raise Misuse("permits are taken for one block; take permits again for another one")
        self._program.semaphores.add(self._wrapped)
        taken: asyncio.Future[Wrapped] = asyncio.get_running_loop().create_future()
        self._holding = holding = self._program.hold(self._hold(taken))
        holding.add_done_callback(lambda _: taken.cancel())
        try:
            return await taken
        except asyncio.CancelledError:
            if not holding.done():
                holding.cancel()
                await asyncio.wait([holding], timeout=UNDO_TIMEOUT)
                raise
            holding.result()  # the error, if it failed
            raise

    async def _hold(self, taken: asyncio.Future[Wrapped]) -> None:
        async with self._take() as permits:
            taken.set_result(permits)
            await self._leave.wait()

    def _undo(self, _: object) -> None:
        assert self._holding is not None
        self._holding.cancel()

    async def _end(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        holding = self._holding
        assert holding is not None
        self._leave.set()
        await asyncio.wait([holding])
        try:
            holding.result()
        except asyncio.CancelledError:
            if error is None:
                raise SessionClosed("the connection to Redis was closed meanwhile") from None
        except LockLost as loss:
            if error is None:
                raise
            if error is not loss:
                error.add_note(f"meanwhile: {loss}")


class Permits:
    """Permits that are held for a block."""

    def __init__(self, wrapped: async_permits.Permits) -> None:
        """Wrap asynchronous permits."""
        self._wrapped = wrapped

    @property
    def count(self) -> int:
        """Number of permits."""
        return self._wrapped.count

    @property
    def identifier(self) -> str:
        """Identifier of the holder, with which another program can take over the permits."""
        return self._wrapped.identifier

    @property
    def held(self) -> bool:
        """Return whether the permits are held, and cannot have expired yet."""
        return self._wrapped.held

    @property
    def loss(self) -> LockLost | None:
        """Error that reports the loss of the permits, if they were lost."""
        return self._wrapped.loss

    def check(self) -> None:
        """Raise `LockLost` unless they are held."""
        self._wrapped.check()


def _wrap_or_none(wrapped: Wrapped) -> Permits | None:
    return None if wrapped is None else Permits(wrapped)


def _permits(wrapped: Wrapped) -> Permits:
    assert wrapped is not None
    return Permits(wrapped)
