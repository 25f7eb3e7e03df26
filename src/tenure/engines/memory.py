"""``memory://``: the core on a clock, in one process; the reference for every other engine.

``memory://`` alone is a store of its own for each connection; ``memory://name`` is shared, by that
name, by all connections of the process, on whatever loop or thread, and lasts until the last of
them is closed.

Rules:

* One lock guards the core. It is held for one command, never across an await.
* What a command has to tell others goes to each concerned connection's loop, in order, one
  callback per turn of that loop; it is never delivered from inside the command.
* Each connection with something attached keeps one timer on its own loop, for the store's next
  deadline or a second, whichever comes first, so that a loop that is stuck delays only itself.
* What is told to a session is told to the attachment that it was meant for: one that has been
  taken over hears of its end, and of nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tenure.clock import Clock
from tenure.core import rules
from tenure.core.node import (
    CHANGED,
    DELETED,
    ENDED,
    EVICTED,
    GRANTED,
    TIMED_OUT,
    Session,
    Store,
)
from tenure.core.queue import Request, Semaphore
from tenure.engines.contract import Attach, Enqueued, Place, Removal, SessionEvents
from tenure.errors import EngineUnavailable, InvalidArgument, SessionExpired
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["connect"]

_TICK = 1.0
_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_REFUSED = Enqueued(Place.REFUSED, None)
_TAKEN_OVER = -1  # a kind of push beside the core's effects: (session, _TAKEN_OVER, error)


class _Shared:
    """A store, the lock that guards it, and who is connected."""

    def __init__(self) -> None:
        self.store = Store()
        self.lock = threading.Lock()
        self.engines: set[MemoryEngine] = set()


_named: dict[str, _Shared] = {}
_naming = threading.Lock()


def connect(url: str, clock: Clock) -> MemoryEngine:
    """The connector of ``memory://``."""
    name = url.partition("://")[2]
    if any(character in name for character in "?#@"):
        raise InvalidArgument(f"memory:// takes a name and nothing else, not {url!r}")
    return MemoryEngine(name.strip("/"), clock)


class MemoryEngine:
    """One connection to a store in this process."""

    capabilities = Capabilities(resume=True)

    def __init__(self, name: str, clock: Clock) -> None:
        self.url = f"memory://{name}"
        self.clock = clock
        self._name = name
        self._shared: _Shared | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: set[MemorySession] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._pushes: deque[tuple[MemorySession, int, Any]] = deque()
        self._seen = 0

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        with _naming:
            shared = _named.get(self._name) if self._name else None
            if shared is None:
                shared = _Shared()
                if self._name:
                    _named[self._name] = shared
            shared.engines.add(self)
        self._shared = shared

    async def aclose(self) -> None:
        shared = self._shared
        if shared is None:
            return
        for session in list(self._sessions):
            if session._state.attached:
                await session.close()
        with _naming:
            shared.engines.discard(self)
            if self._name and not shared.engines:
                _named.pop(self._name, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._shared = None

    def _opened(self) -> _Shared:
        if self._shared is None:
            raise EngineUnavailable(f"{self.url} is not open")
        return self._shared

    # Effects

    def _settle(self, store: Store) -> None:
        """Hand what the last command has to tell to those concerned. Under the lock."""
        for session, kind, what in store.effects:
            self._push(session.sink, kind, what)
        store.effects.clear()

    def _push(self, sink: MemorySession, kind: int, what: Any) -> None:
        """Have something told to a session. Under the lock."""
        if sink.deaf and kind not in {ENDED, _TAKEN_OVER}:
            return  # what it finds will be told to it first
        engine = sink.engine
        engine._pushes.append((sink, kind, what))
        if len(engine._pushes) == 1:
            engine._wake(self._loop)

    def _wake(self, from_loop: asyncio.AbstractEventLoop | None) -> None:
        loop = self._loop
        assert loop is not None
        if loop is from_loop:
            loop.call_soon(self._deliver)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        pushes = self._pushes
        for _ in range(len(pushes)):
            sink, kind, what = pushes.popleft()
            if kind == _TAKEN_OVER:
                sink.over(what)
            elif sink.superseded:
                continue
            elif kind == GRANTED:
                sink.events.granted(what.hold, what.order_id)
            elif kind == CHANGED:
                if what in what.session.watches:  # or else it has ended since
                    what.sink()
            elif kind == ENDED:
                path = sink.node
                sink.over(SessionExpired(f"the session on {path} is over: {what}", node=path))
            else:
                sink.events.removed(what.hold, _REMOVALS[kind])
        if pushes:
            assert self._loop is not None
            self._loop.call_soon(self._deliver)

    # Deadlines

    def _tick(self) -> None:
        self._timer = None
        shared = self._shared
        if shared is not None:
            with shared.lock:
                self._expire(shared.store)
                self._set_timer(shared.store)

    def _set_timer(self, store: Store) -> None:
        """See to it that this connection's timer fires by the next deadline. Under the lock."""
        if not self._sessions:
            return
        now = self.clock.now()
        due = now + _TICK
        first = store.next_deadline()
        if first is not None and first < due:
            due = max(first, now)
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        assert self._loop is not None
        self._timer_due = due
        self._timer = self._loop.call_later(due - now, self._tick)

    # The contract

    async def attach(self, how: Attach, events: SessionEvents) -> MemorySession:
        if how.session_id is not None:
            return await self._take_over(how, how.session_id, events)
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            state = store.attach(
                how.node, how.description, how.recovery_window, how.liveness, how.key, now
            )
            session = MemorySession(self, shared, state, events)
            self._sessions.add(session)
            self._set_timer(store)
        events.proven(now)
        return session

    async def _take_over(self, how: Attach, number: int, events: SessionEvents) -> MemorySession:
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            state = store.take_over(how.node, number, how.key)
            former: MemorySession = state.sink
            former.cut_off()
            self._push(former, _TAKEN_OVER, rules.taken_over(how.node))
            session = MemorySession(self, shared, state, events, former)
            self._sessions.add(session)
            store.touch(state, now)
            self._set_timer(store)
        try:
            if not how.assume_dead:
                await session.until_nobody_believes()
            session.begin()
        except BaseException:
            await session.detach()
            raise
        return session

    def _command(self) -> tuple[_Shared, Store, float]:
        shared = self._opened()
        return shared, shared.store, self.clock.now()

    def _expire(self, store: Store) -> None:
        """End what has run out, whoever's timer it was that should have. Under the lock."""
        store.expire(self.clock.now())
        self._settle(store)

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        shared, store, _ = self._command()
        with shared.lock:
            store.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        shared, store, _ = self._command()
        with shared.lock:
            store.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        shared, store, _ = self._command()
        with shared.lock:
            self._expire(store)
            try:
                store.drop_node(path, force=force)
            finally:
                self._settle(store)

    async def describe_node(self, path: str) -> NodeDescription:
        shared, store, _ = self._command()
        with shared.lock:
            self._expire(store)
            node = store.node(path)
            return NodeDescription(path, node.config, len(node.sessions), len(node.semaphores))

    async def list_nodes(self) -> Sequence[str]:
        shared, store, _ = self._command()
        with shared.lock:
            return sorted(store.nodes)

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            node = store.node(path)
            return [
                _describe(node.semaphores[name], now, owners=owners, waiters=waiters)
                for name in sorted(node.semaphores)
            ]

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            return [
                SessionDescription(
                    session.id,
                    path,
                    session.description,
                    session.window,
                    session.attached,
                    now - session.last_contact,
                )
                for _, session in sorted(store.node(path).sessions.items())
            ]

    async def end_session(self, path: str, session_id: int) -> bool:
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            session = store.node(path).sessions.get(session_id)
            if session is None:
                return False
            store.close(session, now, "an administrator ended it")
            self._settle(store)
            return True

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        shared, store, now = self._command()
        with shared.lock:
            self._expire(store)
            evicted = store.evict(store.node(path), name, order_id, now)
            self._settle(store)
            return evicted


class MemorySession:
    """One attachment of a session, of which it is the state's `sink` until another takes over.

    Attributes:
        deaf: nothing but its end is told to it: its take-over is not complete.
        superseded: another one has taken over.
    """

    def __init__(
        self,
        engine: MemoryEngine,
        shared: _Shared,
        state: Session,
        events: SessionEvents,
        former: MemorySession | None = None,
    ) -> None:
        """Under the lock; with `former`, that one is taken over."""
        state.sink = self
        self.id = state.id
        self.node = state.node.path
        self.attach_number = state.attach_number
        self.engine = engine
        self.events = events
        self.superseded = False
        self.deaf = former is not None
        self._believes = former is None  # that it holds what it was told
        self._until = 0.0  # that it can believe so, once superseded
        self._former = former
        self._look = asyncio.Event()
        self._state = state
        self._shared = shared
        self._store = shared.store
        self._lock = shared.lock
        self._now = engine.clock.now
        self._wall = engine.clock.wall

    def over(self, error: SessionExpired) -> None:
        """The store ended it, or another one has taken over."""
        self.engine._sessions.discard(self)
        self.events.ended(error)
        with self._lock:
            self._disbelieve()

    def renew(self) -> None:
        now = self._now()
        with self._lock:
            lives = not self.superseded and self._store.touch(self._state, now)
        if lives:
            self.events.proven(now)

    async def close(self) -> None:
        with self._lock:
            if not self.superseded:
                self._store.close(self._state, self._now())
                self.engine._settle(self._store)
            self._disbelieve()
        self.engine._sessions.discard(self)

    async def detach(self) -> None:
        with self._lock:
            if not self.superseded:
                self._store.detach(self._state, self._now())
            self._disbelieve()

    def _alive(self) -> Session:
        if self.superseded:
            raise rules.taken_over(self.node)
        if not self._state.alive:
            raise SessionExpired(f"the session on {self.node} is over", node=self.node)
        return self._state

    # Taking over

    def cut_off(self) -> None:
        """Another one takes over. Under the lock."""
        self.superseded = True
        self._until = self._state.last_contact + self._state.window
        self._wake()

    def _disbelieve(self) -> None:
        """From now on it does not believe that it holds anything. Under the lock."""
        self._believes = False
        self._state.sink._wake()  # perhaps a successor waits for that

    def _wake(self) -> None:
        loop = self.engine._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._look.set)

    def _believes_until(self) -> float:
        """Until when somebody who came before the next one may believe. Under the lock."""
        loop = self.engine._loop
        dead = loop is not None and loop.is_closed()
        mine = self._until if self._believes and not dead else 0.0
        return max(mine, 0.0 if self._former is None else self._former._believes_until())

    async def until_nobody_believes(self) -> None:
        """Return when no attachment before this one can believe that it holds anything.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        assert self._former is not None
        while True:
            now = self._now()
            with self._lock:
                self._store.touch(self._alive(), now)
                wait = self._former._believes_until() - now
            if wait <= 0:
                return
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, _TICK, self._state.window / 3)):
                    await self._look.wait()

    def begin(self) -> None:
        """The take-over is complete: from now on this is the program that holds."""
        now = self._now()
        with self._lock:
            state = self._alive()
            self._store.touch(state, now)
            found = sorted(state.requests.values(), key=lambda request: request.order_id)
            self.events.resumed(tuple(map(_recovered, found)))
            self.deaf = False
            self._believes = True
            self._former = None
        self.events.proven(now)

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        with self._lock:
            self._store.create(self._alive().node, name, limit, data, exist_ok=exist_ok)
            self.engine._settle(self._store)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        with self._lock:
            self._store.update(self._alive().node, name, data)
            self.engine._settle(self._store)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        with self._lock:
            self._store.delete(self._alive().node, name, force=force)
            self.engine._settle(self._store)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        with self._lock:
            found = self._store.semaphore(self._alive().node, name)
            return _describe(found, self._now(), owners=owners, waiters=waiters)

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Enqueued:
        engine, store = self.engine, self._store
        with self._lock:
            if self.superseded:
                raise rules.taken_over(self.node)
            last = store.last_order_id
            order_id = rules.next_order_id(last, engine._seen, self._wall())
            request = store.enqueue(
                self._state, hold, name, count, data, timeout, ephemeral, self._now(), order_id
            )
            if store.effects:
                engine._settle(store)
            if request is None:
                return _REFUSED
            if request.granted_at is not None:
                return Enqueued(Place.GRANTED, order_id)
            if request.deadline is not None:
                engine._set_timer(store)
            return Enqueued(Place.WAITING, order_id)

    def alter(self, hold: int, *, count: int | None, data: bytes | None) -> None:
        with self._lock:
            self._store.alter(self._alive(), hold, count, data, self._now())
            self.engine._settle(self._store)

    def withdraw(self, hold: int) -> None:
        store = self._store
        with self._lock:
            if self.superseded:
                return
            store.withdraw(self._state, hold, self._now())
            if store.effects:
                self.engine._settle(store)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        with self._lock:
            watch = self._store.watch(self._alive(), name, data=data, owners=owners, sink=changed)

        def stop() -> None:
            with self._lock:
                self._store.unwatch(watch)

        return stop


def _recovered(request: Request) -> Recovered:
    semaphore = request.semaphore
    return Recovered(
        request.hold,
        semaphore.name,
        request.order_id,
        request.count,
        request.data,
        semaphore.ephemeral,
        request.granted_at is not None,
    )


def _describe(
    semaphore: Semaphore, now: float, *, owners: bool, waiters: bool
) -> SemaphoreDescription:
    owning: list[RequestDescription] = []
    waiting: list[RequestDescription] = []
    if owners or waiters:
        for request in semaphore:
            owns = request.granted_at is not None
            if owns and owners:
                owning.append(_describe_request(request, now))
            elif not owns:
                if not waiters:
                    break
                waiting.append(_describe_request(request, now))
    return SemaphoreDescription(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        tuple(owning),
        tuple(waiting),
        semaphore.waiting,
    )


def _describe_request(request: Request, now: float) -> RequestDescription:
    session = request.session
    since = request.joined_at if request.granted_at is None else request.granted_at
    waits = request.granted_at is None and request.deadline is not None
    return RequestDescription(
        session.id,
        request.order_id,
        request.count,
        request.data,
        since=now - since,
        timeout=max(0.0, (request.deadline or 0.0) - now) if waits else None,
        remaining=max(0.0, session.last_contact + session.window - now),
        session_description=session.description,
    )
