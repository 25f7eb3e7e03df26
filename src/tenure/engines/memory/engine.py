"""One connection, and the state shared by connections of one name."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tenure.background import BackgroundQueue, BackgroundTimer, Failures
from tenure.clock import Clock, SystemClock
from tenure.core import refusals, rules
from tenure.core.node import StoredRequest
from tenure.core.rates import MICROSECONDS, RateAnswer, RateCall
from tenure.core.store import (
    CHANGED,
    DELETED,
    ENDED,
    EVICTED,
    GRANTED,
    RESIZED,
    TIMED_OUT,
    Store,
)
from tenure.engines.contract import Attach, EngineDefaults, Removal, SessionEvents
from tenure.engines.memory import describe
from tenure.engines.memory.describe import ALL, MemoryPages
from tenure.engines.memory.session import TICK, MemorySession, Shared
from tenure.errors import EngineUnavailable, TenureError
from tenure.identity import retold
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

_log = logging.getLogger("tenure")

_Push = tuple[MemorySession, int, Any]
"""An event for a session: (session, kind, subject)."""

_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_TAKEN_OVER = -1  # kind of a push that is not an effect of the core: (session, _TAKEN_OVER, error)


_Key = tuple[str, int | None]

_stores: dict[_Key, Shared] = {}
_opening = threading.Lock()


def forget(name: str = "") -> None:
    """Make the next open of that name create a new store, even if engines were never closed."""
    with _opening:
        for key in [key for key in _stores if key[0] == name]:
            del _stores[key]


def _forget_parents() -> None:
    """In a forked child: the stores, and the leases in them, are the parent's."""
    global _opening  # noqa: PLW0603  another thread may have held it
    _opening = threading.Lock()
    _stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


class MemoryEngine(EngineDefaults):
    """One connection to a store in this process."""

    capabilities = Capabilities(resume=True, adopt=True, resize=True, rates=True)

    def __init__(self, name: str, clock: Clock) -> None:
        """Prepare the connection; `open` finds or creates the store."""
        self.url = f"memory://{name}"
        self.clock = clock
        # Times of a clock for tests mean nothing in a store that others use.
        self._key: _Key = (name, None if name or isinstance(clock, SystemClock) else id(clock))
        self._shared: Shared | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: set[MemorySession] = set()
        self._failures = Failures(f"looking after {self.url}", _log)
        self._timer: BackgroundTimer | None = None
        self._delivery: BackgroundQueue[_Push] | None = None
        self._pushes: deque[_Push] = deque()
        self.seen = 0

    async def open(self) -> None:
        """Connect to the store of this name, or create it."""
        self.loop = loop = asyncio.get_running_loop()
        now = self.clock.now
        self._timer = BackgroundTimer(loop, now, self._tick, self._failures)
        self._delivery = BackgroundQueue(loop, now, self._deliver, self._failures)
        self._pushes = self._delivery.items
        with _opening:
            shared = _stores.get(self._key)
            if shared is None:
                shared = _stores[self._key] = Shared()
            shared.engines.add(self)
        self._shared = shared

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        shared = self._shared
        if shared is None:
            return
        for session in list(self.sessions):
            if session.state.attached:
                await session.close()
        with _opening:
            shared.engines.discard(self)
            if not shared.engines and _stores.get(self._key) is shared:
                del _stores[self._key]
        if self._timer is not None:
            self._timer.cancel()
        self._shared = None

    def _opened(self) -> Shared:
        if self._shared is None:
            raise EngineUnavailable(f"{self.url} is not open")
        return self._shared

    # Effects

    def settle(self, store: Store) -> None:
        """Deliver the effects of the last command to their sessions. Under the lock."""
        for session, kind, what in store.effects:
            self._push(session.sink, kind, what)
        store.effects.clear()

    def settle_grants(self, store: Store) -> list[tuple[MemorySession, StoredRequest]]:
        """Settle, but return the grants that the caller can deliver now, outside the lock.

        This is possible if all effects are grants to this connection's sessions, and no earlier
        event waits.
        """
        if not self._pushes:
            granted = [
                (session.sink, what)
                for session, kind, what in store.effects
                if kind == GRANTED and session.sink.takes_grants_of(self)
            ]
            if len(granted) == len(store.effects):
                store.effects.clear()
                return granted
        self.settle(store)
        return []

    def _push(self, sink: MemorySession, kind: int, what: Any) -> None:
        """Queue an event for a session. Under the lock."""
        if sink.deaf and kind not in {ENDED, _TAKEN_OVER}:
            return  # first it receives the recovered requests (`begin`)
        sink.engine.deliver(self.loop, (sink, kind, what))

    def deliver(self, from_loop: asyncio.AbstractEventLoop | None, push: _Push) -> None:
        """Deliver an event to one of this connection's sessions, on the connection's loop."""
        delivery = self._delivery
        assert delivery is not None
        if self.loop is from_loop:
            delivery.put((push,))
        else:
            delivery.put_threadsafe(push)

    def grant_again(self, session: MemorySession, request: StoredRequest, error: Exception) -> None:
        """Report a failure to deliver a grant, and deliver it later."""
        self._failures.report(error)
        self.deliver(self.loop, (session, GRANTED, request))

    def _deliver(self, push: _Push) -> None:
        sink, kind, what = push
        if kind == _TAKEN_OVER:
            sink.over(what)
        elif sink.superseded:
            return
        elif kind == GRANTED:
            sink.events.granted(what.request_id, what.order_id)
        elif kind == CHANGED:
            if what in what.session.watches:  # otherwise it has ended since
                what.sink()
        elif kind == ENDED:
            path = sink.node
            sink.over(refusals.session_over(path, what))
        elif kind == RESIZED:
            request, limit = what
            sink.events.removed(request.request_id, Removal.resized(limit))
        else:
            sink.events.removed(what.request_id, _REMOVALS[kind])

    # Deadlines

    def _tick(self) -> None:
        shared = self._shared
        if shared is not None:
            with shared.lock:
                shared.store.expire(self.clock.now())
                self.settle(shared.store)
                self.set_timer(shared.store)

    def set_timer(self, store: Store) -> None:
        """Set this connection's timer to fire by the next deadline. Under the lock."""
        if not self.sessions:
            return
        now = self.clock.now()
        due = now + TICK
        first = store.next_deadline()
        if first is not None and first < due:
            due = max(first, now)
        assert self._timer is not None
        self._timer.by(due)

    # The contract

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return ``None``: the store is always reachable."""
        return None

    async def attach(self, how: Attach, events: SessionEvents) -> MemorySession:
        """Attach a session, or take one over."""
        if how.session_id is not None:
            return await self._take_over(how, how.session_id, events)
        with self._command() as (store, now):
            state = store.attach(
                how.node, how.description, how.recovery_window, how.liveness, how.key, now
            )
            session = MemorySession(self, self._opened(), state, events)
            self.sessions.add(session)
            self.set_timer(store)
        events.proven(now)
        return session

    async def _take_over(self, how: Attach, number: int, events: SessionEvents) -> MemorySession:
        with self._command() as (store, now):
            state = store.take_over(how.node, number, how.key)
            if not how.adopt:
                state.description = retold(state.description, how.description)
            former: MemorySession = state.sink
            former.cut_off()
            self._push(former, _TAKEN_OVER, rules.taken_over(how.node))
            session = MemorySession(self, self._opened(), state, events, former)
            self.sessions.add(session)
            state.touch(now)
            if how.adopt:
                store.adopt(state, how.recovery_window, how.description)
            self.set_timer(store)
        try:
            if not how.assume_dead:
                await session.wait_for_former()
            session.begin()
        except BaseException:
            await session.detach()
            raise
        return session

    @contextmanager
    def _command(self) -> Iterator[tuple[Store, float]]:
        """Lock the store, and expire what is overdue; deliver the effects of the block."""
        shared = self._opened()
        with shared.lock:
            store, now = shared.store, self.clock.now()
            store.expire(now)
            self.settle(store)
            try:
                yield store, now
            finally:
                self.settle(store)

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        with self._command() as (store, _):
            store.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        with self._command() as (store, _):
            store.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        with self._command() as (store, _):
            store.drop_node(path, force=force)

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        with self._command() as (store, _):
            node = store.node(path)
            return NodeDescription(path, node.config, len(node.sessions), len(node.semaphores))

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        with self._command() as (store, _):
            return sorted(store.nodes)

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        pages = MemoryPages(self._command)
        return await pages.semaphores(path, owners=owners, waiters=waiters, after="", most=ALL)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        with self._command() as (store, now):
            found = store.node(path).semaphore(name)
            return describe.semaphore(found, now, owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        return await MemoryPages(self._command).sessions(path, after=0, most=ALL)

    def pages(self) -> MemoryPages:
        """Return the lists in pages."""
        return MemoryPages(self._command)

    async def store_time(self) -> float:
        """Return the wall clock of the engine."""
        return self.clock.wall()

    def rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Carry out an operation on a rate."""
        rules.check_name(name, path)
        shared = self._opened()
        with shared.lock:  # a rate has no part in the queues, so nothing else is due
            now = int(self.clock.now() * MICROSECONDS)
            return shared.store.node(path).rates.decide(name, call, now)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; return false if it did not exist."""
        with self._command() as (store, now):
            session = store.node(path).sessions.get(session_id)
            if session is None:
                return False
            store.close(session, now, "an administrator ended it")
            return True

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        with self._command() as (store, now):
            return store.evict(store.node(path), name, order_id, now)
