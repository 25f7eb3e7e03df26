"""One engine: one program's way to one etcd cluster, on one event loop.

It holds what all sessions share: the members, the stream of watches, renewals, the base of the
order ids, and every task begun for a caller, which `aclose` waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines._kit.watchers import Watchers
from tenure.engines.contract import Attach, EngineDefaults, Finding, SessionEvents
from tenure.engines.etcd import admin, answers, attaching, wire
from tenure.engines.etcd.admin import Patient
from tenure.engines.etcd.keys import Keys, Name, config_text
from tenure.engines.etcd.late import LateWaiters
from tenure.engines.etcd.lookout import Lookout, Watcher
from tenure.engines.etcd.members import Lost, Members, Refused, failure
from tenure.engines.etcd.renewing import Renewer, Rounds
from tenure.engines.etcd.request import Request
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watching import Watching
from tenure.errors import EngineError, EngineUnavailable, TenureError, Unsupported
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["EtcdEngine"]

T = TypeVar("T")
_log = logging.getLogger("tenure")

_LEAVING = 2.0
"""Seconds that closing waits for the cluster."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_NAMES = 4096
"""How many names are remembered, with what is prepared for them."""
_OLDEST = (3, 4)


class EtcdEngine(EngineDefaults):
    """The `Engine` of one etcd cluster.

    Attributes:
        keys: where everything lies.
        base: what is added to a create revision to make an order id.
        revision: the highest that a member has told of.
        local: the requests of all sessions here, by their keys.
        patience: seconds after which an unanswered call is asked of another member, at the most.
    """

    capabilities = Capabilities(
        resume=True, durable=True, since=False, waiter_timeout=False, store_time=False
    )

    loop: asyncio.AbstractEventLoop
    watching: Watching

    def __init__(self, address: EtcdUrl, clock: Clock, members: Members | None = None) -> None:
        self.url = address.url
        self.clock = clock
        self.keys = Keys(address.prefix)
        self.base = 0
        self.revision = 0
        self.patience = address.timeout
        self.address = address
        self._members = Members(address) if members is None else members
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None
        self._thread = 0
        self._sessions: set[EtcdSession] = set()
        self.local: dict[bytes, Request] = {}
        self.late = LateWaiters(self)
        self._names: dict[tuple[str, str], Name] = {}
        self._lookouts: dict[tuple[str, str], Lookout] = {}
        self._watchers: Watchers[Lookout, EtcdSession, Watcher] = Watchers()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def guarantees(self) -> str:
        """The guarantees of this store, in a few sentences."""
        return (
            "Every grant is confirmed by a majority of the members before it is told, and survives "
            "the loss of any minority. Without a majority nothing is granted, and holders keep "
            "their leases only as long as they were proven. Leases expire by the clock of the "
            "leader, which a new one starts afresh. Fencing tokens rise as long as the cluster "
            "keeps its data: after restoring a snapshot use another prefix."
        )

    def diagnose(self) -> Iterable[Finding]:
        from tenure.engines.etcd.doctor import examine  # not needed by a program

        return examine(self.address)

    # Opening and closing

    async def open(self) -> None:
        if self._is_open:
            return
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closing = None
        self._members.open()
        self._rounds = Rounds(self._members, self.clock, self.spawn)
        self._renewer = Renewer(self.address, self.clock, self.loop)
        self.watching = Watching(self._members, self.keys.base, self.patience, self._up, self._down)
        self._members.moved = self.watching.moved
        try:
            await self._greet()
        except BaseException:
            await self._members.aclose()
            raise
        self._is_open = True
        self.watching.open()

    async def _greet(self) -> None:
        """See who is there, and that there is a base, and the default node."""
        address, pause = self.address, _FIRST_PAUSE
        hello = wire.txn(
            (wire.exists(self.keys.base), wire.exists(self.keys.node(DEFAULT_NODE))),
            (wire.get(wire.range_(self.keys.base)),),
            (
                wire.nested(
                    wire.txn(
                        (wire.created_at(self.keys.base, wire.ABSENT),),
                        (wire.put(self.keys.base, b"%d" % int(self.clock.wall() * 1e6)),),
                    )
                ),
                wire.put(self.keys.node(DEFAULT_NODE), config_text(NodeConfig())),
                wire.get(wire.range_(self.keys.base)),
            ),
        )
        until = self.clock.now() + address.connect_timeout
        while True:
            left = max(until - self.clock.now(), 0.1)
            within = min(left, self.patience)
            try:
                version = answers.read_string(await self._members.call(wire.STATUS, b"", within), 2)
                self._check_version(version)
                answer = await self.txn(hello, within)
            except Lost as lost:
                if self.clock.now() + pause >= until:
                    raise EngineUnavailable(
                        f"{self.url} could not be reached within {address.connect_timeout:g} s: "
                        f"{lost}; do most of its members run there, {address.transport}? "
                        "'tenure doctor' asks each"
                    ) from lost
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Refused as refused:
                raise failure(self.url, refused) from refused
            else:
                kv = answer.parts[-1].first
                assert kv is not None
                self.base = int(kv.value)
                return

    def _check_version(self, version: str) -> None:
        numbers = tuple(int(each) for each in version.split(".")[:2] if each.isdigit())
        if numbers < _OLDEST:
            raise Unsupported(f"{self.url} is etcd {version}; tenure needs 3.4 or newer")

    async def aclose(self) -> None:
        if self._closing is None:
            if not self._is_open:
                return
            self._closing = self.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._is_open = False
        sessions = list(self._sessions)
        leaving = [self.loop.create_task(session.close()) for session in sessions]
        late: set[asyncio.Task[None]] = set()
        try:
            if leaving:
                done, late = await asyncio.wait(leaving, timeout=_LEAVING)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
                    raise EngineError(
                        f"{self.url} was closed while it could not be reached "
                        f"({self._members.trouble or 'no answer'}); its sessions end with their "
                        "windows"
                    )
                for task in done:
                    task.result()
        finally:
            for session in sessions:
                session.stop(EngineError(f"{self.url} was closed"))
            await self._finish(cancel=bool(late))
            await self.watching.aclose()
            await self._renewer.aclose()
            await self._members.aclose()

    async def _finish(self, *, cancel: bool) -> None:
        """Wait for what is under way; not for long."""
        while self._tasks:
            if cancel:
                for task in self._tasks:
                    task.cancel()
            await asyncio.wait(list(self._tasks), timeout=_LEAVING)
            cancel = True

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task that `aclose` waits for."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if it is not open."""
        if not self._is_open:
            raise EngineUnavailable(f"{self.url} is not open")

    # Whether there is contact

    def _up(self) -> None:
        for session in list(self._sessions):
            session.contact(True)

    def _down(self, why: str) -> None:
        _log.debug("%s: %s; asking another member", self.url, why)
        cause = EngineUnavailable(why)
        for session in list(self._sessions):
            session.contact(False, cause)

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        if not self._is_open or self.watching.is_up or not self._members.trouble:
            return None
        return EngineUnavailable(self._members.trouble)

    # Asking

    async def txn(self, request: bytes, timeout: float) -> answers.Answer:
        """Send a transaction. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        answer = answers.read_answer(await self._members.call(wire.TXN, request, timeout))
        self.revision = max(self.revision, answer.revision)
        return answer

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Call the current member. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        return await self._members.call(method, request, timeout)

    def reader(self, node: str) -> Patient:
        """Return a reader that repeats its calls until the engine's patience is over."""
        return Patient(self, node)

    def failure(self, refused: Refused, node: str | None, name: str | None = None) -> TenureError:
        """Make an error of a refusal."""
        return failure(self.url, refused, node=node, name=name)

    async def eventually(self, request: bytes, within: float, what: str) -> None:
        """See to it that something is done that may be done twice."""
        until, pause = self.clock.now() + within, _FIRST_PAUSE
        while self.clock.now() < until:
            try:
                await self.txn(request, self.patience)
            except Lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except (Refused, TenureError) as error:
                _log.debug("%s: %s was not written: %s", self.url, what, error)
                return
            else:
                return

    # Leases

    def renew(self, session: EtcdSession) -> None:
        """Have a session's lease kept alive. From any thread."""
        if threading.get_ident() == self._thread:
            self._rounds.renew(session)
        else:
            self._renewer.renew(session)

    async def keep_alive(self, session: EtcdSession) -> None:
        """Keep a lease alive, for one who leaves it or is taking it over. Raises `Lost`."""
        turn = self._members.turn
        try:
            async with asyncio.timeout(session.patience):
                await self._rounds.keep_alive(turn, [session])
        except (Lost, TimeoutError) as error:
            self._members.leave(turn, str(error) or "a lease was not renewed in time")
            raise Lost(str(error)) from error

    async def revoke(self, number: int, within: float) -> None:
        """Revoke a lease, with everything under it."""
        until, pause = self.clock.now() + within, _FIRST_PAUSE
        while self.clock.now() < until:
            try:
                await self.call(wire.LEASE_REVOKE, wire.lease(number), self.patience)
            except Lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Refused as refused:
                if refused.no_lease:
                    return
                raise self.failure(refused, None) from refused
            else:
                return

    # What sessions share

    def remember(self, session: EtcdSession) -> None:
        """A session is attached."""
        self._sessions.add(session)

    def forget(self, session: EtcdSession) -> None:
        """A session is over."""
        self._sessions.discard(session)
        for lookout, watcher in self._watchers.of(session):
            lookout.remove(watcher)

    def name(self, path: str, name: str) -> Name:
        """The keys of a semaphore."""
        found = self._names.get((path, name))
        if found is None:
            if len(self._names) >= _NAMES:
                del self._names[next(iter(self._names))]
            found = self._names[path, name] = self.keys.name(path, name)
        return found

    def look_out(
        self,
        session: EtcdSession,
        name: Name,
        data: bool,
        owners: bool,
        changed: Callable[[], None],
    ) -> Callable[[], None]:
        """Watch a semaphore; returns what ends that."""
        key = (name.path, name.name)
        lookout = self._lookouts.get(key)
        if lookout is None:
            lookout = self._lookouts[key] = Lookout(self, name, self._watchers)
        stop = lookout.add(session, data, owners, changed)
        session.turns.wait_for(self.spawn(lookout.in_place()))
        return stop

    def look_away(self, name: Name, lookout: Lookout) -> None:
        """Forget a watch cache without watchers."""
        if self._lookouts.get((name.path, name.name)) is lookout:
            del self._lookouts[name.path, name.name]

    # The contract

    async def attach(self, how: Attach, events: SessionEvents) -> EtcdSession:
        self.check_open()
        attaching_ = self.spawn(attaching.attach(self, how, events))
        try:
            return await asyncio.shield(attaching_)
        except asyncio.CancelledError:
            attaching_.add_done_callback(self._abandon)
            attaching_.cancel()
            raise

    def _abandon(self, attached: asyncio.Task[EtcdSession]) -> None:
        """Leave a session whose caller was cancelled, as it was before."""
        if attached.cancelled() or attached.exception() is not None:
            return
        session = attached.result()
        self.spawn(session.abandon())

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        await self._administer(path, admin.create_node(self, path, config, exist_ok=exist_ok))

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        await self._administer(path, admin.alter_node(self, path, config))

    async def drop_node(self, path: str, *, force: bool) -> None:
        await self._administer(path, admin.drop_node(self, path, force=force))

    async def describe_node(self, path: str) -> NodeDescription:
        return await self._administer(path, admin.describe_node(self, path))

    async def list_nodes(self) -> Sequence[str]:
        return await self._administer(None, admin.list_nodes(self))

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        return await self._administer(
            path, admin.list_semaphores(self, path, owners=owners, waiters=waiters)
        )

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        return await self._administer(
            path, admin.describe_semaphore(self, path, name, owners=owners, waiters=waiters)
        )

    async def store_time(self) -> float:
        self.check_open()
        return self.clock.wall()  # etcd tells no time

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        return await self._administer(path, admin.list_sessions(self, path))

    async def end_session(self, path: str, session_id: int) -> bool:
        return await self._administer(path, admin.end_session(self, path, session_id))

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return await self._administer(path, admin.evict(self, path, name, order_id))

    async def _administer(self, path: str | None, operation: Coroutine[Any, Any, T]) -> T:
        with contextlib.closing(operation):
            self.check_open()
            try:
                return await operation
            except Refused as refused:
                raise self.failure(refused, path) from refused
