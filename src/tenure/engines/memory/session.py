"""One attachment of a session, and its takeover by another one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.core.node import StoredRequest, StoredSession
from tenure.core.store import Store
from tenure.engines.contract import Enqueued, Place, SessionDefaults, SessionEvents, Withdrawn
from tenure.engines.memory import describe
from tenure.errors import SessionExpired
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

TICK = 1.0
"""Longest time between two readings of the clock, in seconds."""
_REFUSED = Enqueued(Place.REFUSED, None)
_GRANTED = Place.GRANTED
_LEFT, _MISSING = Withdrawn.LEFT, Withdrawn.MISSING
_enqueued = partial(tuple.__new__, Enqueued)  # `Enqueued`, faster


class _Engine(Protocol):
    """The connection, as seen by its sessions."""

    clock: Clock
    loop: asyncio.AbstractEventLoop | None
    sessions: set[MemorySession]
    seen: int

    def settle(self, store: Store, /) -> None: ...

    def settle_grants(self, store: Store, /) -> list[tuple[MemorySession, StoredRequest]]: ...

    def deliver(
        self,
        from_loop: asyncio.AbstractEventLoop | None,
        push: tuple[MemorySession, int, Any],
        /,
    ) -> None: ...

    def grant_again(
        self, session: MemorySession, request: StoredRequest, error: Exception, /
    ) -> None: ...

    def set_timer(self, store: Store, /) -> None: ...


class Shared:
    """A store, the lock that guards it, and the connected engines."""

    def __init__(self) -> None:
        self.store = Store()
        self.lock = threading.Lock()
        self.engines: set[_Engine] = set()


class MemorySession(SessionDefaults):
    """One attachment of a session; it is the state's `sink` until it is taken over.

    Attributes:
        deaf: whether it receives only its end, because its takeover is not complete.
        superseded: whether another attachment has taken over.
    """

    def __init__(
        self,
        engine: _Engine,
        shared: Shared,
        state: StoredSession,
        events: SessionEvents,
        former: MemorySession | None = None,
    ) -> None:
        """Make an attachment, under the lock; with `former`, it takes over from that one."""
        state.sink = self
        self.id = state.id
        self.node = state.node.path
        self.attach_number = state.attach_number
        self.engine = engine
        self.events = events
        self.superseded = False
        self.deaf = former is not None
        self._holds = former is None  # whether it considers its granted leases held
        self._until = 0.0  # when that ends, once superseded
        self._former = former
        self._look = asyncio.Event()
        self.state = state
        self._shared = shared
        self._store = shared.store
        self._lock = shared.lock
        self._now = engine.clock.now
        self._wall = engine.clock.wall

    def over(self, error: SessionExpired) -> None:
        """End it: the store has ended the session, or another attachment has taken it over."""
        self.engine.sessions.discard(self)
        self.events.ended(error)
        with self._lock:
            self._release_all()

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        now = self._now()
        with self._lock:
            lives = not self.superseded and self.state.touch(now)
        if lives:
            self.events.proven(now)

    async def close(self) -> None:
        """End the session."""
        with self._lock:
            if not self.superseded:
                self._store.close(self.state, self._now())
                self.engine.settle(self._store)
            self._release_all()
        self.engine.sessions.discard(self)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        with self._lock:
            if not self.superseded:
                self._store.detach(self.state, self._now())
            self._release_all()

    def _alive(self) -> StoredSession:
        if self.superseded:
            raise rules.taken_over(self.node)
        if not self.state.alive:
            raise refusals.session_over(self.node)
        return self.state

    def takes_grants_of(self, engine: _Engine) -> bool:
        """Return true if it belongs to that connection, and may receive a grant. Under the lock."""
        return self.engine is engine and not self.deaf and not self.superseded

    # Takeover

    def cut_off(self) -> None:
        """Cut it off: another attachment takes over. Under the lock."""
        self.superseded = True
        self._until = self.state.last_contact + self.state.window
        self.wake()

    def _release_all(self) -> None:
        """Record that it no longer considers anything held. Under the lock."""
        self._holds = False
        self.state.sink.wake()  # a takeover may wait for that

    def wake(self) -> None:
        """Wake a waiting takeover, so that it checks again. From any thread."""
        loop = self.engine.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._look.set)

    def held_until(self) -> float:
        """Return until when it, or an earlier one, may consider anything held. Under the lock."""
        loop = self.engine.loop
        dead = loop is not None and loop.is_closed()
        mine = self._until if self._holds and not dead else 0.0
        return max(mine, 0.0 if self._former is None else self._former.held_until())

    async def wait_for_former(self) -> None:
        """Return when no earlier attachment can still consider anything held.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over again.
        """
        assert self._former is not None
        while True:
            now = self._now()
            with self._lock:
                self._alive().touch(now)
                wait = self._former.held_until() - now
            if wait <= 0:
                return
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, TICK, self.state.window / 3)):
                    await self._look.wait()

    def begin(self) -> None:
        """Complete the takeover: from now on this program is the holder."""
        now = self._now()
        with self._lock:
            state = self._alive()
            state.touch(now)
            found = sorted(state.requests.values(), key=lambda request: request.order_id)
            self.events.resumed(tuple(map(describe.recovered, found)))
            self.deaf = False
            self._holds = True
            self._former = None
        self.events.proven(now)

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        with self._lock:
            self._store.create(self._alive().node, name, limit, data, exist_ok=exist_ok)
            self.engine.settle(self._store)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        with self._lock:
            self._store.update(self._alive().node, name, data)
            self.engine.settle(self._store)

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a semaphore."""
        with self._lock:
            self._store.resize(self._alive().node, name, limit, self._now())
            self.engine.settle(self._store)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        with self._lock:
            self._store.delete(self._alive().node, name, force=force)
            self.engine.settle(self._store)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        with self._lock:
            found = self._alive().node.semaphore(name)
            return describe.semaphore(found, self._now(), owners=owners, waiters=waiters)

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Enqueued:
        """Add a request at the end of a queue."""
        engine, store, lock = self.engine, self._store, self._lock
        now, wall = self._now, self._wall
        lock.acquire()
        try:
            if self.superseded:
                raise rules.taken_over(self.node)
            last = store.last_order_id
            order_id = rules.next_order_id(last, engine.seen, wall())
            request = store.enqueue(
                self.state, request_id, name, count, data, timeout, ephemeral, now(), order_id
            )
            if store.effects:
                engine.settle(store)
            if request is None:
                return _REFUSED
            if request.granted_at is not None:
                return _enqueued((_GRANTED, order_id))
            if request.deadline is not None:
                engine.set_timer(store)
            return Enqueued(Place.WAITING, order_id)
        finally:
            lock.release()

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> None:
        """Change a request in place."""
        with self._lock:
            self._store.alter(self._alive(), request_id, count, data, self._now(), timeout)
            self.engine.settle(self._store)
            if timeout is not UNCHANGED:
                self.engine.set_timer(self._store)

    def withdraw(self, request_id: int) -> Withdrawn:
        """Take a request out of its queue."""
        store, lock, now = self._store, self._lock, self._now
        lock.acquire()
        try:
            if self.superseded or not store.withdraw(self.state, request_id, now()):
                self._alive()
                return _MISSING
            if not store.effects:
                return _LEFT
            granted = self.engine.settle_grants(store)
        finally:
            lock.release()
        for session, request in granted:
            try:
                session.events.granted(request.request_id, request.order_id)
            except Exception as error:
                self.engine.grant_again(session, request, error)
        return _LEFT

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
        with self._lock:
            watch = self._store.watch(self._alive(), name, data=data, owners=owners, sink=changed)

        def stop() -> None:
            with self._lock:
                watch.stop()

        return stop
