"""Engine for one SQLite store: one program's access to one file, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import Answer, Attach, EngineDefaults, Finding, SessionEvents
from tenure.engines.sqlite import describe, nodes, quarantine, sessions, takeover
from tenure.engines.sqlite.life import Life, boot_id
from tenure.engines.sqlite.monitor import Monitor
from tenure.engines.sqlite.over import Attachment, check_alive, over_in_queue
from tenure.engines.sqlite.pages import SQLitePages
from tenure.engines.sqlite.session import SqliteSession
from tenure.engines.sqlite.store import Store, log
from tenure.engines.sqlite.takeover import AttachedRow
from tenure.engines.sqlite.transaction import Transaction
from tenure.engines.sqlite.url import SqliteUrl
from tenure.engines.sqlite.watches import SqliteWatches
from tenure.errors import EngineError, EngineUnavailable, Misuse, TenureError
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["SqliteEngine"]

T = TypeVar("T")

_LEAVING = 2.0
"""Seconds that closing waits for the turn. After that, others notice the released liveness lock."""
_READING = 1.0
"""Seconds that a description waits for dead participants and silent sessions to be removed."""


class SqliteEngine(EngineDefaults):
    """Engine of a ``sqlite://`` store."""

    capabilities = Capabilities(resume=True, durable=True, adopt=True)

    store: Store
    monitor: Monitor
    watches: SqliteWatches

    def __init__(self, address: SqliteUrl, clock: Clock) -> None:
        """Prepare the engine; `open` opens the file."""
        self.url = address.url
        self.clock = clock
        self._address = address
        self._open = False
        self._closing: asyncio.Task[None] | None = None
        self._registering: asyncio.Future[Any] | None = None
        self._taking_over: list[int | None] = []

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`."""
        from tenure.engines.sqlite.doctor import examine  # not needed by a program

        return examine(self._address)

    # Opening and closing

    async def open(self) -> None:
        """Open the file."""
        if self._open:
            return
        loop = asyncio.get_running_loop()
        self.store = store = Store(self._address, self.clock, loop)
        self.watches = SqliteWatches(self.do_unasked)
        self.monitor = store.committer.listener = Monitor(store, self.watches, self.acknowledge)
        self._open = True
        self._closing = None
        try:
            if not store.is_current():
                await self.wait(store.committer.do(sessions.new_boot, boot_id()))
            else:
                with store.reading() as tx:
                    reopened = sessions.is_reopened(tx)
                if reopened:
                    await self.wait(store.committer.do(sessions.reopen))
        except BaseException:
            self._let_go(EngineUnavailable(f"{self.url} could not be opened"), left=False)
            raise

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self._open or self.store.forked:
                return
            self._closing = asyncio.get_running_loop().create_task(self._close())
        elif self._closing.done():
            return
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        store = self.store
        error = self._was_closed()
        left = False
        try:
            for session in list(self.monitor.newsroom.sessions.values()):
                session.stop(error)
            if store.life is not None:
                answer = store.committer.do(
                    sessions.unregister, tuple(filter(None, self._taking_over))
                )
                if isinstance(answer, asyncio.Future):
                    await asyncio.wait([answer], timeout=_LEAVING)
                    if not answer.done():
                        error = EngineError(
                            f"{self.url} was closed while "
                            f"{self.monitor.stall(self.clock.now()) or 'its thread was at work'}; "
                            "what had not been done by then never will be, and what was held is "
                            "free now"
                        )
                        raise error
                    answer.result()
            left = True
        finally:
            self._let_go(error, left=left)

    def _let_go(self, error: TenureError, *, left: bool) -> None:
        if self._open:
            self._open = False
            self.monitor.stop()
            self.store.close(error, left=left)

    def liveness_fd(self) -> int:
        """Return the descriptor whose lock shows that this program is alive.

        A child process that inherits a copy keeps the lock after this program's death. The leases
        then pass on when the child has ended too, or when the recovery window has passed.

        Raises:
            EngineUnavailable: the engine is not open, or has no session yet.
        """
        life = self._opened().life
        if life is None:
            raise EngineUnavailable(f"{self.url} has no session yet")
        return life.fd

    def _was_closed(self) -> EngineError:
        return EngineError(f"{self.url} was closed")

    def _opened(self) -> Store:
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")
        if self.store.forked:
            raise Misuse(
                f"{self.url} was opened by the parent of this forked process, which uses it"
            )
        return self.store

    # Between the store and the sessions

    async def wait(self, answer: Answer[T]) -> T:
        """Wait for the result of an operation, if it was deferred."""
        return await answer if isinstance(answer, asyncio.Future) else answer

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        return await self.wait(self._opened().committer.do(work, *args))

    def forget(self, session: SqliteSession) -> None:
        """Remove a session that is over, with its watches."""
        self.monitor.forget(session)
        self.watches.forget(session)

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store grants nothing at this moment, if it is known."""
        return self.monitor.trouble(self.clock.now()) if self._open else None

    async def attach(self, how: Attach, events: SessionEvents) -> SqliteSession:
        """Attach a session, or take one over."""
        self._opened()
        store = await self._registered()
        if how.session_id is None:
            return await self._attach(store, how, events)
        self._taking_over.append(how.session_id)
        try:
            return await self._attach(store, how, events)
        finally:
            self._taking_over.remove(how.session_id)

    async def _attach(self, store: Store, how: Attach, events: SessionEvents) -> SqliteSession:
        life = store.life
        assert life is not None
        at = self.clock.now()
        slot = life.new_slot(at)
        session: SqliteSession | None = None

        def attached(row: AttachedRow | None) -> None:
            nonlocal session
            if row is None:
                life.free_slot(slot)
                return
            session = SqliteSession(self, how, events, row, life, slot)
            if self._closing is not None:  # too late
                session.stop(self._was_closed())
                return
            self.monitor.adopt(session)
            self.monitor.expect_silence(at + session.window)
            self.monitor.keep_ticking()

        work = sessions.attach if how.session_id is None else takeover.take_over
        answer = store.committer.do(work, how, slot, note=attached)
        if isinstance(answer, asyncio.Future):
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                self._taking_over.append(how.session_id)  # as long as the store may do it yet
                answer.add_done_callback(lambda _: self._drop(session))
                answer.add_done_callback(lambda _: self._taking_over.remove(how.session_id))
                raise
        assert session is not None
        if how.session_id is not None:
            at = await self._complete(session, assume_dead=how.assume_dead)
        events.proven(at)
        return session

    async def _complete(self, session: SqliteSession, *, assume_dead: bool) -> float:
        """Complete a takeover; return the time of the last heartbeat that proves the session."""

        def begin(found: list[takeover.Found] | None) -> None:
            if found is not None:
                session.begin(found)

        try:
            if not assume_dead:
                await self.monitor.wait_for_former(session)
            committer = self._opened().committer
            answer = committer.do(takeover.begin, session.me, session.path, note=begin)
            if isinstance(answer, asyncio.Future):
                while not answer.done():
                    session.keep()
                    await asyncio.wait([answer], timeout=session.window / 3)
                answer.result()
            return session.keep()
        except BaseException:
            self._drop(session)
            raise

    def _drop(self, session: SqliteSession | None) -> None:
        """Abandon an attachment that was never returned to a caller."""
        if session is not None and self._open:
            session.abandon()

    def acknowledge(self, former: Attachment, note: Callable[[Any], None] | None = None) -> None:
        """Confirm to the store, soon, that an attachment that was taken over has ended here."""
        self.store.loop.call_soon(self._acknowledge, former, note)

    def _acknowledge(self, former: Attachment, note: Callable[[Any], None] | None) -> None:
        with contextlib.suppress(TenureError):  # then its silence ends the wait
            self.do_unasked(takeover.acknowledge, former, note=note)

    async def _registered(self) -> Store:
        """Return the store, after registering this engine as a participant."""
        store = self._opened()
        if store.life is None:
            if self._registering is None:
                answer = store.committer.do(sessions.register, note=self._entered)
                if not isinstance(answer, asyncio.Future):
                    return store
                self._registering = answer
            await asyncio.shield(self._registering)
        return store

    def _entered(self, mine: tuple[int, Life] | None) -> None:
        self._registering = None
        if mine is not None:
            self.store.enter(*mine, self.monitor.rung)
            left = self.store.tx.quarantined_until - self.clock.now()
            if left > 0:
                log.warning("%s", quarantine.describe(self._address.path, left))

    def do_unasked(
        self, work: Callable[..., Any], *args: Any, note: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any] | None:
        """Run an operation in the background; return a future if it was deferred.

        `note` is that of the committer. A closed engine does nothing.
        """
        if not self._open:
            return None
        answer = self.store.committer.do(work, *args, note=note)
        return answer if isinstance(answer, asyncio.Future) else None

    async def describe(
        self, session: SqliteSession, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore as a session sees it: after all its earlier operations."""
        store = self._opened()
        where = (session.node, session.path, name)
        if owners or waiters:
            with store.reading() as tx:
                over = over_in_queue(tx, session.node, name)
            await self._take_out(*over)
        if not store.committer.idle:
            return await self._do(_described, session.me, *where, owners, waiters)
        with store.reading() as tx:
            return _described(tx, session.me, *where, owners, waiters)

    async def _read(self, path: str, work: Callable[..., T], *args: Any) -> T:
        """Read from a node, after dead participants and silent sessions were removed."""
        store = self._opened()
        with store.reading() as tx:
            over = sessions.over_on_node(tx, nodes.find(tx, path))
        await self._take_out(*over)
        with store.reading() as tx:
            return work(tx, nodes.find(tx, path), path, *args)

    async def _take_out(self, participants: Sequence[int], silent: Sequence[int]) -> None:
        """End dead participants and silent sessions, waiting at most `_READING` seconds.

        If the turn cannot be had by then, the caller describes the store as it is.
        """
        if participants or silent:
            with contextlib.suppress(TenureError):
                answer = self.do_unasked(sessions.reap, participants, silent)
                if answer is not None:
                    await asyncio.wait([answer], timeout=_READING)

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        return await self._read(path, describe.node)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        with self._opened().reading() as tx:
            return describe.node_list(tx)

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        return await self._read(path, describe.semaphore_list, owners, waiters)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_name(name, path)
        store = self._opened()
        with store.reading() as tx:
            over = over_in_queue(tx, nodes.find(tx, path), name)
        await self._take_out(*over)
        with store.reading() as tx:
            return describe.semaphore(tx, nodes.find(tx, path), path, name, owners, waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        return await self._read(path, describe.session_list)

    def pages(self) -> SQLitePages:
        """Return the lists in pages."""
        return SQLitePages(self._opened(), self._take_out)

    async def store_time(self) -> float:
        """Return the local wall clock: all programs are on one host."""
        return self.clock.wall()  # the file is used on one host

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        await self._do(nodes.create_node, path, config, exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        await self._do(nodes.alter_node, path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        await self._do(nodes.drop_node, path, force)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; returns false if there was none."""
        return await self._do(sessions.end_on_node, path, session_id, "an administrator ended it")

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; returns false if there was none."""
        return await self._do(nodes.evict, path, name, order_id)


def _described(
    tx: Transaction,
    me: Attachment,
    node: int,
    path: str,
    name: str,
    owners: bool,
    waiters: bool,
) -> SemaphoreDescription:
    check_alive(tx, me, path)
    return describe.semaphore(tx, node, path, name, owners, waiters)
