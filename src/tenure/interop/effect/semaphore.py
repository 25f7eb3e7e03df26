"""Semaphore whose permits live while their holder refreshes them, in a `Backing`.

Rules:

* The block of permits is entered in the same iteration in which the answer arrives.
* Permits that a cancelled acquisition may have obtained are released before the cancellation
  continues, if the store answers soon. `DistributedSemaphore.aclose` waits for all such
  releases, and for those of blocks.
* After an acquisition with an unknown outcome, the next attempt first checks whether its permits
  exist, because they would count against it.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from tenure.clock import Clock, SystemClock
from tenure.durations import Duration, seconds
from tenure.errors import AcquireTimeout, InvalidArgument
from tenure.interop.effect.permits import (
    Backing,
    BackingError,
    Permits,
    PermitsOrigin,
    PushBacking,
    in_time,
)
from tenure.interop.endings import Endings, margin

__all__ = ["DistributedSemaphore", "LockNotAcquired", "Retry", "recurs", "spaced"]


Retry: TypeAlias = Callable[[], Iterable[float]]
"""Called for each operation; yields the pauses before the second attempt, the third, and so on. At
its end the operation has failed."""


def spaced(interval: Duration) -> Retry:
    """Return a policy that retries for ever, at an interval in seconds."""
    pause = seconds(interval, "an interval")
    return lambda: itertools.repeat(pause)


def recurs(times: int) -> Retry:
    """Return a policy of that many further attempts, without pauses."""
    if not isinstance(times, int) or isinstance(times, bool) or times < 0:
        raise InvalidArgument(f"a number of attempts is a whole one from 0 on, not {times!r}")
    return lambda: itertools.repeat(0.0, times)


T = TypeVar("T")


class LockNotAcquired(AcquireTimeout):
    """The permits were not free in time, or those to take over did not exist."""


class DistributedSemaphore:
    """A semaphore, as used by one program.

    Args:
        key: the semaphore's name in the backing.
        backing: the store of the permits.
        limit: number of permits. All programs must use the same number.
        ttl: seconds that permits survive after their last refresh. All programs must use the same
            value, because each removes permits older than its own `ttl`.
        refresh_interval: seconds between two refreshes; a third of `ttl` by default.
        acquire_retry_policy: pauses between attempts while the permits are not free.
        backing_failure_retry_policy: pauses between attempts while the backing fails.
        clock: the source of time, for tests.

    Raises:
        InvalidArgument: an argument is of a wrong type, the key is empty, the limit is not
            positive, or the refresh interval is too long.
    """

    def __init__(
        self,
        key: str,
        backing: Backing,
        *,
        limit: int = 1,
        ttl: Duration = 30.0,
        refresh_interval: Duration | None = None,
        acquire_retry_policy: Retry | None = None,
        backing_failure_retry_policy: Retry | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Set the options; nothing is sent to the backing."""
        if not isinstance(key, str) or not key:
            raise InvalidArgument(f"the key of a semaphore is a str, and not empty: {key!r}")
        if not callable(getattr(backing, "try_acquire", None)):
            raise InvalidArgument(
                "permits are in a backing, such as a RedisBacking or a ClientBacking, not "
                f"in a {type(backing).__name__}",
                name=key,
            )
        for policy in (acquire_retry_policy, backing_failure_retry_policy):
            if policy is not None and not callable(policy):
                raise InvalidArgument(
                    f"a retry policy is a function, such as spaced(0.5), not {policy!r}",
                    name=key,
                )
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise InvalidArgument(f"a limit is a whole number from 1 on, not {limit!r}", name=key)
        self.key = key
        self.limit = limit
        self.ttl = seconds(ttl, "ttl")
        self.refresh_interval = (
            self.ttl / 3
            if refresh_interval is None
            else seconds(refresh_interval, "refresh_interval")
        )
        longest = self.ttl - margin(self.ttl)
        if not 0 < self.refresh_interval < longest:
            raise InvalidArgument(
                f"the refresh_interval of permits that live for {self.ttl:g} s is more than 0 and "
                f"less than {longest:g} s, not {self.refresh_interval:g} s",
                name=key,
            )
        self._backing = backing
        self._acquire_retry = acquire_retry_policy or spaced(0.1)
        self._failure_retry = backing_failure_retry_policy or recurs(3)
        self._clock = clock or SystemClock()
        self._endings = Endings()
        self._origin = PermitsOrigin(
            key,
            self.ttl,
            self.refresh_interval,
            backing,
            self._clock,
            self._endings,
            self._refresh,
            self._release,
        )

    def __repr__(self) -> str:
        """Return the key and the limit."""
        return f"<DistributedSemaphore {self.key!r} of {self.limit}>"

    # Operations

    async def with_permits(
        self,
        permits: int,
        work: Callable[[], Awaitable[T]],
        *,
        identifier: str | None = None,
        acquired_externally: bool = False,
    ) -> T:
        """Wait for permits, do the work, and release them; otherwise like `take`."""
        taking = self.take(permits, identifier=identifier, acquired_externally=acquired_externally)
        async with taking:
            return await work()

    async def with_permits_if_available(
        self,
        permits: int,
        work: Callable[[], Awaitable[T]],
        *,
        otherwise: T | None = None,
        identifier: str | None = None,
        acquired_externally: bool = False,
    ) -> T | None:
        """Do the work with permits if they are free; if not, return `otherwise` at once."""
        taking = self.try_take(
            permits, identifier=identifier, acquired_externally=acquired_externally
        )
        async with taking as taken:
            return otherwise if taken is None else await work()

    @asynccontextmanager
    async def take(
        self, permits: int, *, identifier: str | None = None, acquired_externally: bool = False
    ) -> AsyncIterator[Permits]:
        """Wait for permits, and hold them for the block: ``async with semaphore.take(2)``.

        Args:
            permits: number of permits; all of them are acquired, or none.
            identifier: the holder's name, unique among the holders; generated by default.
            acquired_externally: whether a holder of that identifier, perhaps in another program,
                has them already and hands them over; they are refreshed instead of acquired.

        Raises:
            LockNotAcquired: the retry policy ended, or there were no permits to take over.
            LockLost: they were lost; the body has been cancelled.
            BackingError: the store failed in every attempt of the policy.
            InvalidArgument: the count is not between 1 and the limit, or `acquired_externally` is
                given without an identifier.
        """
        held = self._checked(permits, identifier, acquired_externally)
        async with AsyncExitStack() as waiting:
            await self._acquire(held, acquired_externally, waiting)
            # Before any other await: a cancellation there would leave the permits behind.
            async with held:
                await waiting.aclose()
                yield held

    @asynccontextmanager
    async def try_take(
        self, permits: int, *, identifier: str | None = None, acquired_externally: bool = False
    ) -> AsyncIterator[Permits | None]:
        """Take permits without waiting; the block gets ``None`` if they are not free."""
        held = self._checked(permits, identifier, acquired_externally)
        if not await self._try(held, acquired_externally):
            yield None
            return
        async with held:
            yield held

    async def current_count(self) -> int:
        """Return the number of permits held. Raises `BackingError`."""
        return await self._persist(partial(self._backing.get_count, self.key, self.ttl))

    async def aclose(self) -> None:
        """Wait until all interrupted operations are released."""
        await self._endings.wait()

    # Implementation

    def _checked(self, count: int, identifier: str | None, externally: bool) -> Permits:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= self.limit:
            raise InvalidArgument(
                f"permits are a whole number from 1 to the limit, which is {self.limit}, not "
                f"{count!r}",
                name=self.key,
            )
        if externally and identifier is None:
            raise InvalidArgument(
                "permits that another program acquired are taken over by their identifier",
                name=self.key,
            )
        if identifier is not None and (not isinstance(identifier, str) or not identifier):
            raise InvalidArgument(
                f"an identifier is a str, and not empty: {identifier!r}", name=self.key
            )
        return Permits(self._origin, count, identifier or str(uuid.uuid4()))

    async def _acquire(self, permits: Permits, externally: bool, waiting: AsyncExitStack) -> None:
        """Wait for permits, and end `waiting` with the wait."""
        if await self._try(permits, externally):
            return
        if externally:
            raise LockNotAcquired(
                f"{permits.identifier!r} has no permits of {self.key!r} that could be taken over",
                name=self.key,
            )
        released = asyncio.Event()
        if isinstance(self._backing, PushBacking):
            await waiting.enter_async_context(
                self._backing.on_permits_released(self.key, released.set)
            )
        for pause in self._acquire_retry():
            retry_at = self._clock.now() + pause
            while not await self._try(permits, False):
                try:
                    async with asyncio.timeout(retry_at - self._clock.now()):
                        await released.wait()
                except TimeoutError:
                    break
                released.clear()
            else:
                return
        raise LockNotAcquired(
            f"{permits.count} of {self.limit} permits of {self.key!r} were not free in time",
            name=self.key,
        )

    async def _try(self, permits: Permits, externally: bool) -> bool:
        return await self._endings.attempt(
            self._obtain(permits, externally),
            partial(self._release, permits),
            halfway=not externally,
            abandoned=permits.abandoned.set,
        )

    async def _obtain(self, permits: Permits, externally: bool) -> bool:
        backing, again = self._backing, externally
        arguments = (self.key, permits.identifier, self.ttl, self.limit, permits.count)

        async def call() -> bool:
            nonlocal again
            sent = self._clock.now()
            before, again = again, True
            obtained = before and await backing.refresh(*arguments)
            if not obtained and not externally:
                obtained = await backing.try_acquire(*arguments)
            if obtained:
                permits.live_until(sent)
            return obtained

        return await self._persist(call, permits.abandoned)

    async def _refresh(self, held: Permits) -> bool:
        arguments = (self.key, held.identifier, self.ttl, self.limit, held.count)
        return await self._persist(partial(self._backing.refresh, *arguments))

    async def _release(self, held: Permits) -> None:
        arguments = (self.key, held.identifier, held.count)
        await self._persist(partial(self._backing.release, *arguments))

    async def _persist(
        self, call: Callable[[], Coroutine[Any, Any, T]], abandoned: asyncio.Event | None = None
    ) -> T:
        """Call, and retry according to the policy, unless the attempt is abandoned."""
        pauses = iter(self._failure_retry())
        abandoned = abandoned or asyncio.Event()
        while True:
            try:
                return await call()
            except BackingError:
                pause = next(pauses, None)
                if pause is None or await in_time(abandoned.wait(), pause):
                    raise
