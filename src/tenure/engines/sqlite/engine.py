"""Engine for one SQLite store: one program's access to one file, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from tenure.background import Ending, persist
from tenure.clock import Clock
from tenure.engines._kit.session import restores_default
from tenure.engines.contract import (
    Attach,
    EngineDefaults,
    Finding,
    RateAnswer,
    RateCall,
    RateReply,
    SessionEvents,
)
from tenure.engines.sqlite import nodes, participants, rates, sessions
from tenure.engines.sqlite.descriptions import SqliteDescriptions
from tenure.engines.sqlite.expiry import Attachment
from tenure.engines.sqlite.liveness import LivenessFile
from tenure.engines.sqlite.monitor import POLL, Monitor
from tenure.engines.sqlite.participants import describe_quarantine
from tenure.engines.sqlite.session import SqliteSession
from tenure.engines.sqlite.sessions import AttachedRow
from tenure.engines.sqlite.store import Store, answered, log
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

T = TypeVar("T")

_LEAVING = 2.0
"""Seconds that closing waits for the turn. After that, others notice the released liveness lock."""


_FORMER = 5.0
"""Seconds that joining waits for participants whose files were removed or replaced."""

_FORMER_CHECK = 0.02

_PORTABLE = (
    "The store is in portable mode: the death of a process is not noticed, so that its leases pass "
    "on after its recovery window. A waiter learns of its grant by polling, within "
    f"{POLL * 1000:g} ms, and processes that write at the same time have no order. Files that are "
    "removed, replaced or set back while in use are noticed within a second at best."
)


class SqliteEngine(EngineDefaults):
    """Engine of a ``sqlite://`` store."""

    capabilities = Capabilities(resume=True, durable=True, adopt=True, resize=True, rates=True)

    store: Store
    monitor: Monitor
    watches: SqliteWatches
    descriptions: SqliteDescriptions

    def __init__(self, address: SqliteUrl, clock: Clock) -> None:
        """Prepare the engine; `open` opens the file."""
        self.url = address.url
        self.clock = clock
        self._address = address
        self._open = False
        self._closing: Ending | None = None
        self._registering: asyncio.Future[Any] | None = None

    @property
    def guarantees(self) -> str:
        """The limits of the portable mode; empty in native mode."""
        return _PORTABLE if self._address.portable else ""

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
        self.watches = SqliteWatches(self.do_in_background)
        self.descriptions = SqliteDescriptions(store, self.do_in_background)
        self.monitor = store.committer.listener = Monitor(store, self.watches, self.acknowledge)
        self._open = True
        self._closing = None
        try:
            if not store.is_current():
                await answered(store.committer.do(participants.new_boot, store.boot()))
            else:
                with store.reading() as tx:
                    restarted = participants.was_restarted(tx)
                    reopened = participants.is_reopened(tx)
                    incomplete = nodes.is_default_missing(tx)
                if incomplete:
                    await answered(store.committer.do(nodes.restore_default))
                if restarted:
                    await answered(store.committer.do(participants.new_boot, store.boot()))
                elif reopened:
                    await answered(store.committer.do(participants.reopen))
        except BaseException:
            self._release(EngineUnavailable(f"{self.url} could not be opened"), left=False)
            raise

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self._open or self.store.forked:
                return
            self._closing = Ending(self._close)
        elif not self._open:
            return
        await self._closing.wait()

    async def _close(self) -> None:
        if not self._open:
            return
        store = self.store
        error = self._was_closed()
        left = False
        try:
            for session in list(self.monitor.delivery.sessions.values()):
                session.stop(error)
            lost = store.are_files_lost()  # then nothing can be written
            if store.life is not None and not lost:
                answer = store.committer.do(participants.unregister, tuple(self.monitor.takeovers))
                if isinstance(answer, asyncio.Future):
                    await persist(partial(asyncio.wait, [answer], timeout=_LEAVING))
                    if not answer.done():
                        error = EngineError(
                            f"{self.url} was closed while "
                            f"{self.monitor.stall(self.clock.now()) or 'its thread was busy'}. "
                            "Its pending operations are lost, and its leases are released"
                        )
                        raise error
                    answer.result()
            left = not lost
        finally:
            self._release(error, left=left)

    def _release(self, error: TenureError, *, left: bool) -> None:
        if self._open:
            self._open = False
            self.monitor.stop()
            self.store.close(error, left=left)

    def liveness_fd(self) -> int | None:
        """Return the descriptor whose lock shows that this program is alive.

        A child process that inherits a copy keeps the lock after this program's death. The leases
        are then released when the child has ended, too, or when the recovery window has passed. In
        portable mode there is none.

        Raises:
            EngineUnavailable: the engine is not open, or has no session yet.
        """
        life = self._opened().life
        if self._address.portable:
            return None
        if life is None:
            raise EngineUnavailable(f"{self.url} has no session yet")
        return life.fd

    def _was_closed(self) -> EngineError:
        return EngineError(f"{self.url} was closed")

    def _opened(self) -> Store:
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open. Call open() first")
        if self.store.forked:
            raise Misuse(
                f"{self.url} was opened by the parent of this forked process. Connect again here"
            )
        return self.store

    # Between the store and the sessions

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        return await answered(self._opened().committer.do(work, *args))

    def forget(self, session: SqliteSession) -> None:
        """Remove a session that has ended, with its watches."""
        self.monitor.forget(session)
        if self._closing is None:  # otherwise all watches end with the participant
            self.watches.forget(session)

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        return self.monitor.trouble(self.clock.now()) if self._open else None

    @restores_default
    async def attach(self, how: Attach, events: SessionEvents) -> SqliteSession:
        """Attach a session, or take one over."""
        self._opened()
        store = await self._registered()
        if how.session_id is None:
            return await self._attach(store, how, events)
        takeovers = self.monitor.takeovers
        takeovers.append(how.session_id)
        try:
            session = await self._attach(store, how, events)
            events.proven(await self._complete(session, assume_dead=how.assume_dead))
        finally:
            takeovers.remove(how.session_id)
        return session

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

        work = sessions.attach if how.session_id is None else sessions.take_over
        answer = store.committer.do(work, how, slot, note=attached)
        if isinstance(answer, asyncio.Future):
            try:
                await asyncio.shield(answer)
            except asyncio.CancelledError:
                takeovers = self.monitor.takeovers
                taken = () if how.session_id is None else (how.session_id,)
                takeovers += taken  # while the store may still do it

                def abandon(_: object) -> None:
                    if session is not None:
                        session.abandon()
                    for each in taken:
                        takeovers.remove(each)

                answer.add_done_callback(abandon)
                raise
        assert session is not None
        if how.session_id is None:
            events.proven(at)
        return session

    async def _complete(self, session: SqliteSession, *, assume_dead: bool) -> float:
        """Complete a takeover; return the time of the last heartbeat that proves the session."""

        async def remaining() -> float:
            return self.monitor.remaining(session)

        async def begin() -> float:
            do = self._opened().committer.do
            answer = do(sessions.begin, session.me, session.path, note=session.begin)
            if isinstance(answer, asyncio.Future):
                while not answer.done():
                    session.keep()
                    await asyncio.wait([answer], timeout=session.window / 3)
                answer.result()
            return session.keep()

        return await session.take_over(None if assume_dead else remaining, begin)

    def acknowledge(self, former: Attachment, note: Callable[[Any], None] | None = None) -> None:
        """Confirm to the store, soon, that an attachment that was taken over has ended here."""
        self.store.loop.call_soon(self._acknowledge, former, note)

    def _acknowledge(self, former: Attachment, note: Callable[[Any], None] | None) -> None:
        with contextlib.suppress(TenureError):  # its silence then ends the wait
            self.do_in_background(sessions.acknowledge, former, note=note)

    async def _registered(self) -> Store:
        """Return the store, after registering this engine as a participant."""
        store = self._opened()
        if store.life is None:
            await self._wait_for_former_files(store)
        if store.life is None:
            if self._registering is None:
                answer = store.committer.do(
                    participants.register, store.mark_files, note=self._entered
                )
                if not isinstance(answer, asyncio.Future):
                    return store
                self._registering = answer
            await asyncio.shield(self._registering)
        return store

    async def _wait_for_former_files(self, store: Store) -> None:
        """Wait until no participant works with files that were removed, replaced or set back.

        Raises:
            EngineUnavailable: one has not noticed it in time.
        """
        until = asyncio.get_running_loop().time() + _FORMER
        while not store.marks.marked and (store.are_former_files_used() or store.is_set_back()):
            if asyncio.get_running_loop().time() > until:
                raise store.former_files()
            await asyncio.sleep(_FORMER_CHECK)
            self._opened()

    def _entered(self, mine: tuple[int, LivenessFile] | None) -> None:
        self._registering = None
        if mine is None:
            self.store.clear_marks()
        else:
            self.store.enter(*mine, self.monitor.notified)
            left = self.store.tx.quarantined_until - self.clock.now()
            if left > 0:
                why = describe_quarantine(self._address.path, left)
                log.warning("the store is quarantined: url=%s error=%s", self.url, why)

    def do_in_background(
        self, work: Callable[..., Any], *args: Any, note: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any] | None:
        """Run an operation in the background; return a future if it was deferred.

        `note` is that of the committer. A closed engine does nothing.
        """
        if not self._open:
            return None
        answer = self.store.committer.do(work, *args, note=note)
        self.monitor.keep_polling()  # for a watch that was added
        return answer if isinstance(answer, asyncio.Future) else None

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        return await self.pages().node(path)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        return await self.pages().nodes()

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        return await self.pages().semaphores(path, owners=owners, waiters=waiters)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        return await self.pages().semaphore(path, name, owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        return await self.pages().sessions(path)

    def pages(self) -> SqliteDescriptions:
        """Return the lists in pages."""
        self._opened()
        return self.descriptions

    async def store_time(self) -> float:
        """Return the local wall clock: all programs are on one host."""
        return self.clock.wall()  # the file is used on one host

    def rate(self, path: str, name: str, call: RateCall) -> RateReply:
        """Carry out an operation on a rate."""
        store = self._opened()
        if store.life is None:
            return self._first_rate(path, name, call)
        return store.committer.do(rates.carry_out, path, name, call)

    async def _first_rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Register first: a participant notices a reboot, and files that were replaced."""
        await self._registered()
        return await self._do(rates.carry_out, path, name, call)

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
        """End a session; return false if it did not exist."""
        return await self._do(sessions.end, path, session_id, "an administrator ended it")

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        return await self._do(nodes.evict, path, name, order_id)
