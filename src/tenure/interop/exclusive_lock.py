"""The lock of Node.js's ``exclusive-lock``, on the same keys of Redis or KeyDB.

The lock is one key, ``prefix:name``, set by the holder and refreshed. The original does not check
whether the key is still its own; this port compares the contents, in a script, before it refreshes
or deletes. That requires unique contents, which is the default.

Rules:

* `ExclusiveLock.held` becomes false before the key can have expired, by this program's clock.
* A key that a cancelled `acquire` may have obtained is deleted. A cancelled `release` continues.
* Each acquisition has unique contents by default, so a late command of an earlier acquisition, such
  as a deletion, cannot affect it. With given contents, acquisitions wait for such commands.
  Acquisitions are serialised, so that undoing one cannot delete the key of another.
* redis-py may send a command again when the answer was lost. So an acquisition that finds its own
  contents has succeeded; given contents may be those of another program.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from tenure.clock import Clock, SystemClock
from tenure.durations import Duration, seconds
from tenure.errors import EngineError, InvalidArgument, LeaseLost, Misuse
from tenure.interop.endings import Endings, margin
from tenure.interop.redis_py import FAILURES, Redis, check_client, what_to_do

__all__ = ["Event", "ExclusiveLock", "Inspection"]

Event: TypeAlias = Literal["acquired", "refreshed", "released", "error"]

MIN_SLACK = 0.5
"""Minimum difference between the time to live and the refresh interval, in seconds."""

_ACQUIRE = """
if redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2], 'NX') then return 1 end
if ARGV[3] == '1' and redis.pcall('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
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
    """Contents and time to live of a lock's key.

    Attributes:
        contents: the contents, written by the holder.
        ttl: seconds until it expires; ``None``: it does not expire.
    """

    contents: bytes
    ttl: float | None


class _Gone(LeaseLost):
    """The key has expired, or belongs to another holder: there is nothing to release."""


class ExclusiveLock:
    """A lock, as used by one program. It belongs to one event loop.

    Args:
        name: the name of the lock; every run of characters other than letters, digits and ``_``
            becomes one ``-``, also in the prefix.
        redis: a client of redis-py, which stays open.
        lock_ttl: seconds after which the key expires unless it is refreshed.
        lock_refresh: seconds between two refreshes.
        lock_contents: the contents of the key; by default, unique for each acquisition. Holders
            with the same contents cannot distinguish their keys.
        key_prefix: prefix of the key.
        clock: the source of time, for tests.

    Attributes:
        name: the name of the lock.
        key: the key in Redis.
        contents: the contents that the last acquisition through this object wrote.

    Raises:
        InvalidArgument: an argument is of a wrong type, the name is empty, or there are less than
            0.5 s between refresh and expiry.
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
        """Set the options; nothing is sent to Redis."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the name of a lock is a str, and not empty: {name!r}")
        if not isinstance(key_prefix, str):
            raise InvalidArgument(f"a key_prefix is a str, not {key_prefix!r}", name=name)
        if not isinstance(lock_contents, str | bytes | None):
            raise InvalidArgument(
                f"lock_contents is a str or bytes, not {lock_contents!r}", name=name
            )
        check_client(redis)
        self._ttl = seconds(lock_ttl, "lock_ttl")
        self._interval = seconds(lock_refresh, "lock_refresh")
        if not self._interval:
            raise InvalidArgument("lock_refresh is more than 0 s", name=name)
        if self._ttl - self._interval < MIN_SLACK:
            raise InvalidArgument(
                f"lock_ttl ({self._ttl:g} s) is at least {MIN_SLACK:g} s longer than lock_refresh "
                f"({self._interval:g} s), so that a late refresh is still in time",
                name=name,
            )
        self.name = name
        self.key = f"{_plain(key_prefix)}:{_plain(name)}"
        self._given = lock_contents.encode() if isinstance(lock_contents, str) else lock_contents
        self.contents = self._new_contents()
        self._redis: Any = redis
        self._clock = clock or SystemClock()
        # At most half of the time between a refresh and the expiry, or each would be too late.
        self._life = self._ttl - min(margin(self._ttl), (self._ttl - self._interval) / 2)
        self._proven = float("-inf")
        self._keeping: asyncio.Task[None] | None = None
        self._left: bytes | None = None  # contents that could not be deleted
        self._endings = Endings()
        self._listeners: dict[Event, list[Callable[..., object]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Lock

    def __repr__(self) -> str:
        """Return the key, and whether the lock is held."""
        return f"<ExclusiveLock {self.key!r}{' held' if self.held else ''}>"

    @property
    def held(self) -> bool:
        """Return whether the lock is held, and cannot have expired yet."""
        return self._keeping is not None and self._clock.now() < self._proven + self._life

    async def acquire(self) -> bool:
        """Acquire the lock if it is free, and refresh it from then on.

        Return false if it is not free, also if it is held through this object.

        Raises:
            EngineError: Redis cannot be reached, or failed.
            Misuse: the lock is in use on another event loop.
        """
        self._enter_loop()
        async with self._turn:
            if self._keeping is not None and not self._keeping.done():
                return False
            if self._left is not None:
                await asyncio.shield(self._endings.start_undoing(self._delete(self._left)))
            contents = self._new_contents()
            obtain, delete = self._obtain(contents), partial(self._delete, contents)
            if not await self._endings.attempt(obtain, delete):
                return False
            self.contents = contents
            self._keeping = asyncio.get_running_loop().create_task(
                self._keep(contents), name=f"tenure-exclusive-lock-{self.key}"
            )
        self._emit("acquired", self.key)
        return True

    async def inspect(self) -> Inspection | None:
        """Return the contents of the key, written by any holder; ``None`` if there is no key.

        Raises:
            EngineError: Redis cannot be reached, or failed.
        """
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                contents, ttl = await pipeline.get(self.key).pttl(self.key).execute()
        except FAILURES as error:
            raise self._failed("inspected", error) from error
        if contents is None:
            return None
        raw = contents.encode() if isinstance(contents, str) else contents
        return Inspection(raw, ttl / 1000 if ttl >= 0 else None)

    async def release(self) -> None:
        """Release the lock, if it is held. Safe to call twice.

        Raises:
            EngineError: Redis cannot be reached, or failed; the key expires, unless a further
                `release` or `acquire` of this object deletes it.
            Misuse: the lock is in use on another event loop.
        """
        self._enter_loop()
        releasing = self.release_soon()
        if releasing is not None:
            await asyncio.shield(releasing)
        await self._endings.wait()

    def release_soon(self) -> asyncio.Task[None] | None:
        """Start a release; the lock owns the returned task."""
        keeping, self._keeping = self._keeping, None
        if keeping is None:
            left = self._left
            return None if left is None else self._endings.start_undoing(self._release_late(left))
        return self._endings.start_undoing(self._end(keeping, self.contents))

    def on(self, event: Event, listener: Callable[..., object]) -> Callable[[], None]:
        """Register a function for an event.

        It is called with the key after an acquisition or release, with the key and its time to live
        in seconds after a refresh, and with an exception after an error.

        After an error the lock is no longer held: `LeaseLost` if the key is lost or may have
        expired, else the error from Redis. The key is deleted if it may still be this holder's; if
        that fails, another error follows. Without a listener an error is logged.

        Returns:
            A function that ends the registration; safe to call twice.

        Raises:
            InvalidArgument: there is no such event, or the listener is not a function, or is a
                coroutine function.
        """
        if event not in get_args(Event):
            raise InvalidArgument(f"the events of a lock are {get_args(Event)}, not {event!r}")
        if not callable(listener) or inspect.iscoroutinefunction(listener):
            raise InvalidArgument(f"a listener is a function, not async, and not {listener!r}")
        listeners = self._listeners.setdefault(event, [])
        listeners.append(listener)

        def off() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return off

    # Commands

    async def _obtain(self, contents: bytes) -> bool:
        sent = self._clock.now()
        new = int(self._given is None)
        obtained = await self._eval("acquired", _ACQUIRE, contents, self._px, new)
        while obtained and self._clock.now() >= sent + self._life:  # so late, it proves nothing
            sent = self._clock.now()
            obtained = await self._refresh(contents)
        self._proven = sent
        return obtained

    async def _refresh(self, contents: bytes) -> bool:
        return await self._eval("refreshed", _REFRESH, contents, self._px)

    async def _delete(self, contents: bytes) -> bool:
        try:
            deleted = await self._eval("released", _RELEASE, contents)
        except EngineError:
            if self._given is None:
                self._left = contents
            raise
        if contents == self._left:
            self._left = None
        return deleted

    async def _eval(self, what: str, script: str, *arguments: bytes | int) -> bool:
        try:
            return bool(await self._redis.eval(script, 1, self.key, *arguments))
        except FAILURES as error:
            raise self._failed(what, error) from error

    @property
    def _px(self) -> int:
        return round(self._ttl * 1000)

    def _failed(self, what: str, error: Exception) -> EngineError:
        return EngineError(
            f"the lock {self.key!r} cannot be {what}: {error}{what_to_do(error)}", name=self.name
        )

    def _new_contents(self) -> bytes:
        return uuid.uuid4().hex.encode() if self._given is None else self._given

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise Misuse(
                f"the lock {self.key!r} is in use on another event loop; make one for each loop",
                name=self.name,
            )
        self._loop, self._turn = loop, asyncio.Lock()

    # While it is held

    async def _keep(self, contents: bytes) -> None:
        me = asyncio.current_task()
        try:
            while self._keeping is me:
                await asyncio.sleep(self._proven + self._interval - self._clock.now())
                await self._keep_once(contents)
        except Exception as error:
            if self._keeping is not me:
                return  # it is being released
            self._keeping = None
            self._emit("error", error)
            if not isinstance(error, _Gone):
                self._endings.start_undoing(self._release_late(contents))

    async def _keep_once(self, contents: bytes) -> None:
        sent = self._clock.now()
        left = self._proven + self._life - sent
        unconfirmed = LeaseLost(
            f"Redis did not confirm the lock {self.key!r} before it could expire", name=self.name
        )
        if left <= 0:
            raise unconfirmed
        try:
            async with asyncio.timeout(left):
                kept = await self._refresh(contents)
        except TimeoutError:
            raise unconfirmed from None
        if not kept:
            raise _Gone(f"the key {self.key!r} has expired, or is another holder's", name=self.name)
        self._proven = sent
        self._emit("refreshed", self.key, self._ttl)

    async def _end(self, keeping: asyncio.Task[None], contents: bytes) -> None:
        if not keeping.done():
            keeping.cancel()
            await asyncio.wait([keeping])
        await self._delete(contents)
        self._emit("released", self.key)

    async def _release_late(self, contents: bytes) -> None:
        """Release without a waiting caller: the result goes only to listeners."""
        try:
            await self._delete(contents)
        except EngineError as error:
            self._emit("error", error)
        else:
            self._emit("released", self.key)

    def _emit(self, event: Event, *facts: object) -> None:
        listeners = self._listeners.get(event, ())
        if event == "error" and not listeners:
            _log.warning("lock failed: name=%r error=%s", self.key, facts[0])
        for listener in list(listeners):
            try:
                listener(*facts)
            except Exception:
                _log.exception("a listener failed: event=%s name=%r", event, self.key)


def _plain(text: str) -> str:
    return re.sub(r"\W+", "-", text, flags=re.ASCII)
