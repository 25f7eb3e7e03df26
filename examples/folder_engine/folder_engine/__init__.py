"""Engine of ``folder:///path``: coordination through one file in a folder.

It shows what each engine does: it answers at once or with a future, keeps the order of operations
through an outage, proves renewals, and tells its sessions the news, which it looks for every `POLL`
seconds. Each operation costs as much as the file is long: an example, and no rival of SQLite.
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
from tenure.engines.contract import (
    Answer,
    Attach,
    EngineDefaults,
    Enqueued,
    Place,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.memory import describe
from tenure.model import UNCHANGED, Unchanged

POLL = 0.02

T = TypeVar("T")


def connect(url: str, clock: Clock) -> FolderEngine:
    """Make the engine for a URL, without I/O."""
    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or parts.path in {"", "/"}:
        raise tenure.InvalidArgument(f"write folder:///path/of/the/folder, not {url!r}")
    return FolderEngine(url, Folder(Path(unquote(parts.path)), clock), clock)


class FolderEngine(EngineDefaults):
    """One connection to the store in a folder.

    What sessions ask for while the folder cannot be used waits in a queue, in the order of the
    calls, and the timer that looks for news tries it again.
    """

    capabilities = tenure.Capabilities()

    def __init__(self, url: str, folder: Folder, clock: Clock) -> None:
        self.url, self.folder, self.clock = url, folder, clock
        self.sessions: set[FolderSession] = set()
        self._asked: deque[tuple[Callable[[Store, float], Any], asyncio.Future[Any]]] = deque()
        self._trouble: tenure.EngineUnavailable | None = None
        self._seen, self._due = b"", 0.0  # the file at the last look, and the next deadline

    async def open(self) -> None:
        failures = Failures(f"looking for news in {self.url}", logging.getLogger("tenure"))
        loop = asyncio.get_running_loop()
        self._timer = BackgroundTimer(loop, self.clock.now, self._look, failures)
        with self.folder.transaction():
            self._timer.soon()

    async def aclose(self) -> None:
        for session in list(self.sessions):
            with (
                contextlib.suppress(tenure.EngineUnavailable),
                self.folder.transaction() as (store, now),
            ):
                session.end(store, now)
        self.sessions.clear()
        while self._asked:
            _, answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(
                    tenure.SessionExpired(f"the connection to {self.url} was closed")
                )
        self._timer.cancel()

    def trouble(self, name: str | None = None) -> tenure.TenureError | None:  # noqa: ARG002
        return self._trouble

    def do(self, operation: Callable[[Store, float], T]) -> Answer[T]:
        """Carry out an operation of a session: now, or as soon as the folder can be used."""
        if not self._asked:
            with (
                contextlib.suppress(tenure.EngineUnavailable),
                self.folder.transaction() as (store, now),
            ):
                return operation(store, now)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda it: it.cancelled() or it.exception())  # perhaps unheard
        self._asked.append((operation, answer))
        return answer

    async def wait(self, operation: Callable[[Store, float], T]) -> T:
        """Do the same, and wait for the answer; a cancelled caller does not stop it."""
        answer = self.do(operation)
        return await asyncio.shield(answer) if isinstance(answer, asyncio.Future) else answer

    def _look(self) -> None:
        self._timer.by(self.clock.now() + POLL)
        before = self._trouble
        try:
            self._answer()
            self._hear()
        except tenure.EngineUnavailable as error:
            self._trouble = error
        else:
            self._trouble = None
        if (before is None) != (self._trouble is None):
            for session in list(self.sessions):
                if self._trouble is None:
                    session.events.attached()
                else:
                    session.events.detached(self._trouble)

    def _answer(self) -> None:
        while self._asked:
            operation, answer = self._asked[0]
            result, failure = None, None
            try:
                with self.folder.transaction() as (store, now):
                    result = operation(store, now)
            except tenure.EngineUnavailable:
                raise
            except tenure.TenureError as error:
                failure = error
            self._asked.popleft()
            if answer.done():
                continue  # its caller was cancelled
            if failure is None:
                answer.set_result(result)
            else:
                answer.set_exception(failure)

    def _hear(self) -> None:
        """Read the news of all sessions, if the file has changed or something has run out."""
        read = self.folder.read()
        if read == self._seen and self.clock.now() < self._due:
            return
        with self.folder.transaction() as (store, now):
            deadline = store.next_deadline()
            self._due = now + 1 if deadline is None else deadline
            news = [(session, session.take_news(store)) for session in self.sessions]
        self._seen = read
        for session, told in news:
            session.hear(told)

    async def attach(self, how: Attach, events: SessionEvents) -> FolderSession:
        if how.liveness != "process" or how.session_id is not None:
            raise tenure.Unsupported("folder:// has no sessions that can be resumed; sqlite:// has")
        with self.folder.transaction() as (store, now):
            state = store.attach(
                how.node, how.description, how.recovery_window, how.liveness, how.key, now
            )
            state.sink = []
        session = FolderSession(self, how.node, state.id, events)
        self.sessions.add(session)
        events.proven(now)
        return session

    async def store_time(self) -> float:
        return self.clock.wall()

    async def create_node(self, path: str, config: tenure.NodeConfig, *, exist_ok: bool) -> None:
        with self.folder.transaction() as (store, _):
            store.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: tenure.NodeConfig) -> None:
        with self.folder.transaction() as (store, _):
            store.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        with self.folder.transaction() as (store, _):
            store.drop_node(path, force=force)

    async def describe_node(self, path: str) -> tenure.NodeDescription:
        with self.folder.transaction() as (store, _):
            node = store.node(path)
            return tenure.NodeDescription(
                path, node.config, len(node.sessions), len(node.semaphores)
            )

    async def list_nodes(self) -> Sequence[str]:
        with self.folder.transaction() as (store, _):
            return sorted(store.nodes)

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[tenure.SemaphoreDescription]:
        with self.folder.transaction() as (store, now):
            found = sorted(store.node(path).semaphores.items())
            return [
                describe.semaphore(each, now, owners=owners, waiters=waiters) for _, each in found
            ]

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> tenure.SemaphoreDescription:
        with self.folder.transaction() as (store, now):
            found = store.node(path).semaphore(name)
            return describe.semaphore(found, now, owners=owners, waiters=waiters)

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
        with self.folder.transaction() as (store, now):
            return store.evict(store.node(path), name, order_id, now)


class FolderSession(SessionDefaults):
    """One attached session."""

    attach_number = 1

    def __init__(self, engine: FolderEngine, node: str, number: int, events: SessionEvents) -> None:
        self.id, self.events = number, events
        self._engine, self._node = engine, node
        self._do, self._wait = engine.do, engine.wait
        self._watches: dict[int, Callable[[], None]] = {}
        self._last_watch = 0

    def _find(self, store: Store) -> StoredSession:
        node = store.nodes.get(self._node)
        session = None if node is None else node.sessions.get(self.id)
        if session is None:
            raise self._over()
        return session

    def _on(self, store: Store) -> Node:
        return self._find(store).node

    def _over(self) -> tenure.SessionExpired:
        return tenure.SessionExpired(f"the session on {self._node} is over", node=self._node)

    def take_news(self, store: Store) -> list[Any] | None:
        """Take what the store has to tell; ``None`` if the session is over."""
        try:
            session = self._find(store)
        except tenure.SessionExpired:
            return None
        news, session.sink = session.sink, []
        return list(news)

    def hear(self, news: list[Any] | None) -> None:
        """Pass on what the store had to tell."""
        if self not in self._engine.sessions:
            return  # it was closed or left meanwhile
        if news is None:
            self._engine.sessions.remove(self)
            self.events.ended(self._over())
        for kind, *what in news or ():
            if kind == "granted":
                self.events.granted(*what)
            elif kind == "removed":
                self.events.removed(what[0], Removal(what[1]))
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

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> tenure.SemaphoreDescription:
        shown = partial(describe.semaphore, owners=owners, waiters=waiters)
        return await self._wait(lambda s, now: shown(self._on(s).semaphore(name), now))

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        def enqueue(store: Store, now: float) -> Enqueued:
            order_id = rules.next_order_id(store.last_order_id, 0, self._engine.clock.wall())
            request = store.enqueue(
                self._find(store), hold, name, count, data, timeout, ephemeral, now, order_id
            )
            if request is None:
                return Enqueued(Place.REFUSED, None)
            owns = request.granted_at is not None
            return Enqueued(Place.GRANTED if owns else Place.WAITING, order_id)

        return self._do(enqueue)

    def alter(
        self,
        hold: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        return self._do(
            lambda store, now: store.alter(self._find(store), hold, count, data, now, timeout)
        )

    def withdraw(self, hold: int) -> Answer[Withdrawn]:
        def withdraw(store: Store, now: float) -> Withdrawn:
            session = self._find(store)
            session.sink = [each for each in session.sink if each[:2] != ["granted", hold]]
            was_there = store.withdraw(session, hold, now)
            return Withdrawn.LEFT if was_there else Withdrawn.MISSING

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
            for watch in list(self._find(store).watches):
                if watch.sink == number:
                    watch.stop()
