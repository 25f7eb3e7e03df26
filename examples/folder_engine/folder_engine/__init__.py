"""Engine of ``folder:///path``: coordination through one file in a folder.

It shows what each engine does: it answers at once or with a future, keeps the order of operations
through an outage, proves renewals, and delivers events, which it reads every `POLL` seconds. Each
operation reads and writes the whole file: an example, and no rival of SQLite.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import tenure
from folder_engine.store import Folder
from tenure.background import BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.core import rules
from tenure.core.node import Node, StoredSession
from tenure.core.store import Store
from tenure.engines import contract
from tenure.engines.contract import Answer, Attach, Enqueued, SessionEvents, Withdrawn
from tenure.engines.memory import describe
from tenure.model import UNCHANGED, Unchanged

POLL = 0.02
T = TypeVar("T")
Described = tenure.SemaphoreDescription


def connect(url: str, clock: Clock) -> FolderEngine:
    """Make the engine for a URL, without I/O."""
    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or parts.path in {"", "/"}:
        raise tenure.InvalidArgument(f"write folder:///path/of/the/folder, not {url!r}")
    return FolderEngine(url, Folder(Path(unquote(parts.path)), clock), clock)


class FolderEngine(contract.EngineDefaults):
    """One connection to the store in a folder.

    Operations of sessions wait in a queue while the folder cannot be used, in the order of the
    calls. The timer that reads events carries them out later.
    """

    capabilities = tenure.Capabilities()

    def __init__(self, url: str, folder: Folder, clock: Clock) -> None:
        self.url, self.folder, self.clock = url, folder, clock
        self.sessions: set[FolderSession] = set()
        self._waiting: deque[tuple[Callable[[Store, float], Any], asyncio.Future[Any]]] = deque()
        self._trouble: tenure.EngineUnavailable | None = None
        self._seen, self._due = b"", 0.0  # the file at the last look, and the next deadline

    async def open(self) -> None:
        failures = Failures(f"reading events of {self.url}", logging.getLogger("tenure"))
        loop = asyncio.get_running_loop()
        self._timer = BackgroundTimer(loop, self.clock.now, self._look, failures)
        with self.folder.transaction():
            self._timer.soon()

    async def aclose(self) -> None:
        while self.sessions:
            with contextlib.suppress(tenure.EngineUnavailable):
                self._now(self.sessions.pop().end)
        closed = tenure.SessionExpired(f"the connection to {self.url} was closed")
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(closed)
        self._timer.cancel()

    def _now(self, operation: Callable[[Store, float], T]) -> T:
        with self.folder.transaction() as (store, now):
            return operation(store, now)

    def trouble(self, name: str | None = None) -> tenure.TenureError | None:  # noqa: ARG002
        return self._trouble

    def do(self, operation: Callable[[Store, float], T]) -> Answer[T]:
        """Carry out an operation of a session: now, or as soon as the folder can be used."""
        if not self._waiting:
            with contextlib.suppress(tenure.EngineUnavailable):
                return self._now(operation)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda it: it.cancelled() or it.exception())  # retrieved
        self._waiting.append((operation, answer))
        return answer

    async def wait(self, operation: Callable[[Store, float], T]) -> T:
        """Do the same, and wait for the answer; a cancelled caller does not stop it."""
        answer = self.do(operation)
        return await asyncio.shield(answer) if isinstance(answer, asyncio.Future) else answer

    def _look(self) -> None:
        self._timer.by(self.clock.now() + POLL)
        before, self._trouble = self._trouble, None
        try:
            self._carry_out()
            self._deliver()
        except tenure.EngineUnavailable as error:
            self._trouble = error
        if (before is None) != (self._trouble is None):
            for session in list(self.sessions):
                if self._trouble is None:
                    session.events.attached()
                else:
                    session.events.detached(self._trouble)

    def _carry_out(self) -> None:
        while self._waiting:
            operation, answer = self._waiting[0]
            try:
                settle = partial(answer.set_result, self._now(operation))
            except tenure.EngineUnavailable:
                raise
            except tenure.TenureError as error:
                settle = partial(answer.set_exception, error)
            self._waiting.popleft()
            if not answer.done():  # else its caller was cancelled
                settle()

    def _deliver(self) -> None:
        """Deliver the events of all sessions, if the file has changed or a deadline has passed."""
        read = self.folder.read()
        if read == self._seen and self.clock.now() < self._due:
            return
        with self.folder.transaction() as (store, now):
            deadline = store.next_deadline()
            self._due = now + 1 if deadline is None else deadline
            taken = [(session, session.take_events(store)) for session in self.sessions]
        self._seen = read
        for session, events in taken:
            session.deliver(events)

    async def attach(self, how: Attach, events: SessionEvents) -> FolderSession:
        if how.liveness != "process" or how.session_id is not None:
            raise tenure.Unsupported("folder:// has no sessions that can be resumed; sqlite:// has")
        options = (how.node, how.description, how.recovery_window, how.liveness, how.key)
        with self.folder.transaction() as (store, now):
            state = store.attach(*options, now)
            state.sink = []
        session = FolderSession(self, how.node, state.id, events)
        self.sessions.add(session)
        events.proven(now)
        return session

    async def store_time(self) -> float:
        return self.clock.wall()

    async def create_node(self, path: str, config: tenure.NodeConfig, *, exist_ok: bool) -> None:
        self._now(lambda store, _: store.create_node(path, config, exist_ok=exist_ok))

    async def alter_node(self, path: str, config: tenure.NodeConfig) -> None:
        self._now(lambda store, _: store.alter_node(path, config))

    async def drop_node(self, path: str, *, force: bool) -> None:
        self._now(lambda store, _: store.drop_node(path, force=force))

    async def describe_node(self, path: str) -> tenure.NodeDescription:
        node = self._now(lambda store, _: store.node(path))
        return tenure.NodeDescription(path, node.config, len(node.sessions), len(node.semaphores))

    async def list_nodes(self) -> Sequence[str]:
        return self._now(lambda store, _: sorted(store.nodes))

    async def list_semaphores(self, path: str, *, owners: bool, waiters: bool) -> list[Described]:
        shown = partial(describe.semaphore, owners=owners, waiters=waiters)
        with self.folder.transaction() as (store, now):
            return [shown(each, now) for _, each in sorted(store.node(path).semaphores.items())]

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> Described:
        shown = partial(describe.semaphore, owners=owners, waiters=waiters)
        return self._now(lambda store, now: shown(store.node(path).semaphore(name), now))

    async def list_sessions(self, path: str) -> Sequence[tenure.SessionDescription]:
        with self.folder.transaction() as (store, now):
            found = sorted(store.node(path).sessions.items())
            return [describe.session(each, path, now) for _, each in found]

    async def end_session(self, path: str, session_id: int) -> bool:
        with self.folder.transaction() as (store, now):
            session = store.node(path).sessions.get(session_id)
            if session is not None:
                store.close(session, now)
            return session is not None

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return self._now(lambda store, now: store.evict(store.node(path), name, order_id, now))


class FolderSession(contract.SessionDefaults):
    """One attached session."""

    attach_number = 1

    def __init__(self, engine: FolderEngine, node: str, number: int, events: SessionEvents) -> None:
        self.id, self.events = number, events
        self._engine, self._node = engine, node
        self._do, self._wait = engine.do, engine.wait
        self._watches: dict[int, Callable[[], None]] = {}
        self._last_watch = 0

    def _find(self, store: Store) -> StoredSession:
        sessions = store.nodes[self._node].sessions if self._node in store.nodes else {}
        if self.id not in sessions:
            raise self._over()
        return sessions[self.id]

    def _on(self, store: Store) -> Node:
        return self._find(store).node

    def _over(self) -> tenure.SessionExpired:
        return tenure.SessionExpired(f"the session on {self._node} has ended", node=self._node)

    def take_events(self, store: Store) -> list[Any] | None:
        """Take the session's events out of the store; ``None`` if the session is over."""
        with contextlib.suppress(tenure.SessionExpired):
            session = self._find(store)
            events, session.sink = session.sink, []
            return list(events)
        return None

    def deliver(self, events: list[Any] | None) -> None:
        """Deliver events, unless the session was closed or left meanwhile."""
        if self not in self._engine.sessions:
            return
        if events is None:
            self._engine.sessions.remove(self)
            self.events.ended(self._over())
        for kind, *what in events or ():
            if kind == "granted":
                self.events.granted(*what)
            elif kind == "removed":
                self.events.removed(what[0], contract.Removal(what[1]))
            elif changed := self._watches.get(what[0]):
                changed()

    def renew(self) -> None:
        with contextlib.suppress(tenure.TenureError):  # which proves nothing
            with self._engine.folder.transaction() as (store, now):
                self._find(store).touch(now)
            self.events.proven(now)

    def end(self, store: Store, now: float) -> None:
        """End the session in the store, if it is there."""
        with contextlib.suppress(tenure.SessionExpired):
            store.close(self._find(store), now)

    async def close(self) -> None:
        self._engine.sessions.discard(self)
        await self._wait(self.end)

    async def detach(self) -> None:
        self._engine.sessions.discard(self)
        await self._wait(lambda store, now: store.detach(self._find(store), now))

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        await self._wait(lambda s, _: s.create(self._on(s), name, limit, data, exist_ok=exist_ok))

    async def update_semaphore(self, name: str, data: bytes) -> None:
        await self._wait(lambda s, _: s.update(self._on(s), name, data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        await self._wait(lambda s, _: s.delete(self._on(s), name, force=force))

    async def describe_semaphore(self, name: str, *, owners: bool, waiters: bool) -> Described:
        shown = partial(describe.semaphore, owners=owners, waiters=waiters)
        return await self._wait(lambda s, now: shown(self._on(s).semaphore(name), now))

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        def enqueue(store: Store, now: float) -> Enqueued:
            order_id = rules.next_order_id(store.last_order_id, 0, self._engine.clock.wall())
            how = (request_id, name, count, data, timeout, ephemeral)
            request = store.enqueue(self._find(store), *how, now, order_id)
            if request is None:
                return Enqueued(contract.Place.REFUSED, None)
            owns = request.granted_at is not None
            return Enqueued(contract.Place.GRANTED if owns else contract.Place.WAITING, order_id)

        return self._do(enqueue)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        what = (request_id, count, data)
        return self._do(lambda store, now: store.alter(self._find(store), *what, now, timeout))

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        def withdraw(store: Store, now: float) -> Withdrawn:
            session = self._find(store)
            session.sink = [each for each in session.sink if each[:2] != ["granted", request_id]]
            return Withdrawn.LEFT if store.withdraw(session, request_id, now) else Withdrawn.MISSING

        return self._do(withdraw)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        number = self._last_watch = self._last_watch + 1
        rules.check_name(name, self._node)
        register = partial(Store.watch, name=name, data=data, owners=owners, sink=number)
        self._do(lambda store, _: register(store, self._find(store)))
        self._watches[number] = changed

        def stop() -> None:
            if self._watches.pop(number, None) is not None:
                self._do(lambda store, _: self._stop_watching(store, number))

        return stop

    def _stop_watching(self, store: Store, number: int) -> None:
        with contextlib.suppress(tenure.SessionExpired):
            for watch in [each for each in self._find(store).watches if each.sink == number]:
                watch.stop()
