"""The lock of Node.js's ``exclusive-lock``, on the same keys of Redis or KeyDB.

One key, ``prefix:name``, set by whoever comes first and kept alive by refreshing it. The original
never looks whether the key is still its own; this one compares the contents, in a script, before
it refreshes or deletes. That needs contents that nobody else has, which is the default.

Rules:

* `ExclusiveLock.held` is what this program may rely on: it ends before the key can have expired,
  by this program's own clock.
* What a cancelled `acquire` may have obtained is given back, and a cancelled `release` goes on.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tenure.clock import Clock, SystemClock
from tenure.durations import Duration, seconds
from tenure.errors import EngineError, InvalidArgument, LeaseLost, TenureError
from tenure.interop.endings import Endings, margin
from tenure.interop.redis_py import Redis, RedisError

__all__ = ["Event", "ExclusiveLock", "Inspection"]

Event: TypeAlias = Literal["acquired", "refreshed", "released", "error"]

MIN_SLACK = 0.5
"""Seconds by which the time to live is longer than the time between two refreshes, at least."""

_REFRESH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

_log = logging.getLogger("tenure")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a lock's key.

    Attributes:
        contents: what its holder wrote there.
        ttl: seconds until it expires; ``None`` when it does not.
    """

    contents: bytes
    ttl: float | None


class ExclusiveLock:
    """One lock, as one program takes it. It belongs to one event loop.

    Args:
        name: what is locked; every run of characters other than letters, digits and ``_`` counts
            as one ``-``, in the prefix as well.
        redis: a client of redis-py's, which stays open.
        lock_ttl: seconds after which the key expires when nobody refreshes it.
        lock_refresh: seconds between two refreshes.
        lock_contents: what is written into the key. The default is a word that no other lock has.
            Of those that give the same contents each takes the other's key for its own.
        key_prefix: what the key begins with.
        clock: where time comes from, for tests.

    Raises:
        InvalidArgument: there is no name, or less than 0.5 s between refresh and expiry.
    """

    def __init__(
        self,
        name: str,
        redis: Redis,
        *,
        lock_ttl: Duration = 3.0,
        lock_refresh: Duration = 1.0,
        lock_contents: str | bytes | None = None,
        key_prefix: str = "exclusive-lock",
        clock: Clock | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the name of a lock is a str, and not empty: {name!r}")
        self._ttl = seconds(lock_ttl, "lock_ttl")
        self._interval = seconds(lock_refresh, "lock_refresh")
        if self._ttl - self._interval < MIN_SLACK:
            raise InvalidArgument(
                f"lock_ttl ({self._ttl:g} s) is at least {MIN_SLACK:g} s longer than lock_refresh "
                f"({self._interval:g} s), so that a refresh that is late is not too late",
                name=name,
            )
        self.name = name
        self.key = f"{_plain(key_prefix)}:{_plain(name)}"
        contents = uuid.uuid4().hex if lock_contents is None else lock_contents
        self.contents = contents.encode() if isinstance(contents, str) else contents
        self._redis: Any = redis
        self._clock = clock or SystemClock()
        self._until = float("-inf")
        self._keeping: asyncio.Task[None] | None = None
        self._endings = Endings()
        self._listeners: dict[Event, list[Callable[..., object]]] = {}

    def __repr__(self) -> str:
        return f"<ExclusiveLock {self.key!r}{' held' if self.held else ''}>"

    @property
    def held(self) -> bool:
        """Whether it is held, and cannot have expired yet."""
        return self._keeping is not None and self._clock.now() < self._until

    async def acquire(self) -> bool:
        """Take it if it is free; from then on it is refreshed. False when it is not free.

        Raises:
            EngineError: Redis cannot be asked.
        """
        sent = self._clock.now()
        if not await self._endings.attempt(self._set(), self._delete):
            return False
        self._until = sent + self._ttl - margin(self._ttl)
        self._keeping = asyncio.get_running_loop().create_task(
            self._keep(), name=f"tenure-exclusive-lock-{self.key}"
        )
        self._tell("acquired", self.key)
        return True

    async def inspect(self) -> Inspection | None:
        """What is in the key, whoever wrote it; ``None`` when there is nothing.

        Raises:
            EngineError: Redis cannot be asked.
        """
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                contents, ttl = await pipeline.get(self.key).pttl(self.key).execute()
        except (RedisError, OSError) as error:
            raise self._failed("inspected", error) from error
        if contents is None:
            return None
        raw = contents.encode() if isinstance(contents, str) else contents
        return Inspection(raw, ttl / 1000 if ttl >= 0 else None)

    async def release(self) -> None:
        """Give it back, if it is held. Safe to call twice.

        Raises:
            EngineError: Redis cannot be asked; the key will expire.
        """
        releasing = self.release_soon()
        if releasing is not None:
            await asyncio.shield(releasing)
        await self._endings.wait()

    def release_soon(self) -> asyncio.Task[None] | None:
        """Begin to give it back; the lock sees to the end of what is returned."""
        keeping, self._keeping = self._keeping, None
        if keeping is None:
            return None
        self._until = float("-inf")
        return self._endings.begin(self._let_go(keeping))

    def on(self, event: Event, listener: Callable[..., object]) -> Callable[[], None]:
        """Have a function called at an event.

        With the key when it was acquired or released, with the key and the seconds to live when it
        was refreshed, with an exception at an error.

        An error ends the hold: `LeaseLost` when the key is not ours any more or cannot be relied
        on, else what Redis said. Without a listener it is logged.

        Returns:
            what ends it; safe to call twice.
        """
        listeners = self._listeners.setdefault(event, [])
        listeners.append(listener)

        def off() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return off

    # On the way to Redis

    async def _set(self) -> bool:
        try:
            done = await self._redis.set(
                self.key, self.contents, px=round(self._ttl * 1000), nx=True
            )
        except (RedisError, OSError) as error:
            raise self._failed("acquired", error) from error
        return bool(done)

    async def _delete(self) -> bool:
        try:
            return bool(await self._redis.eval(_RELEASE, 1, self.key, self.contents))
        except (RedisError, OSError) as error:
            raise self._failed("released", error) from error

    async def _refresh(self) -> bool:
        ttl = round(self._ttl * 1000)
        try:
            return bool(await self._redis.eval(_REFRESH, 1, self.key, self.contents, ttl))
        except (RedisError, OSError) as error:
            raise self._failed("refreshed", error) from error

    def _failed(self, what: str, error: Exception) -> EngineError:
        return EngineError(
            f"the lock {self.key!r} cannot be {what}: {error} (is Redis there?)", name=self.name
        )

    # While it is held

    async def _keep(self) -> None:
        me = asyncio.current_task()
        try:
            await asyncio.sleep(self._interval)
            while self._keeping is me:
                await self._keep_once()
                await asyncio.sleep(self._interval)
        except TenureError as error:
            if self._keeping is not me:
                return  # it is being released
            self._keeping = None
            self._until = float("-inf")
            self._tell("error", error)
            if not isinstance(error, LeaseLost):
                self._endings.begin(self._let_go(None))

    async def _keep_once(self) -> None:
        sent = self._clock.now()
        try:
            async with asyncio.timeout(self._until - sent):
                kept = await self._refresh()
        except TimeoutError:
            raise LeaseLost(
                f"Redis did not confirm the lock {self.key!r} before it could expire",
                name=self.name,
            ) from None
        if not kept:
            raise LeaseLost(
                f"the key {self.key!r} has expired, or is another holder's", name=self.name
            )
        self._until = sent + self._ttl - margin(self._ttl)
        self._tell("refreshed", self.key, self._ttl)

    async def _let_go(self, keeping: asyncio.Task[None] | None) -> None:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        await self._delete()
        self._tell("released", self.key)

    def _tell(self, event: Event, *facts: object) -> None:
        listeners = self._listeners.get(event, ())
        if event == "error" and not listeners:
            _log.warning("%s", facts[0])
        for listener in list(listeners):
            try:
                listener(*facts)
            except Exception:
                _log.exception("a listener to %r of the lock %r failed", event, self.key)


def _plain(text: str) -> str:
    return re.sub(r"\W+", "-", text, flags=re.ASCII)
