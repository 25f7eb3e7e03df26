"""The engine of one program for one etcd cluster, on one event loop.

It opens and closes the services shared by the sessions (`EtcdCluster`), and implements the
contract.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tenure.background import Ending
from tenure.clock import Clock
from tenure.engines._kit.session import close_sessions, received, restores_default
from tenure.engines.contract import Attach, EngineDefaults, Finding, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.admin import EtcdNodes
from tenure.engines.etcd.answers import WatchEvent
from tenure.engines.etcd.attaching import EtcdAttach
from tenure.engines.etcd.errors import Lost, Refused, failure, pauses
from tenure.engines.etcd.grpc import CallFailed, Code
from tenure.engines.etcd.keys import config_text
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.engines.etcd.watching import Watching
from tenure.errors import EngineUnavailable, TenureError, Unsupported
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
)

T = TypeVar("T")
_log = logging.getLogger("tenure")

_LEAVING = 2.0
"""Seconds that closing waits for the tasks of the sessions."""
_OLDEST = (3, 4)
_RESTORING = 1.0
"""Seconds for running programs to write the base again after its deletion."""


class EtcdEngine(EtcdNodes, EngineDefaults):
    """The `Engine` of one etcd cluster."""

    capabilities = Capabilities(
        resume=True, durable=True, since=False, waiter_timeout=False, store_time=False
    )

    def __init__(self, address: EtcdUrl, clock: Clock, members: Members | None = None) -> None:
        """Prepare the engine; `open` connects."""
        super().__init__(address, clock, members)
        self._caches = WatchCaches(self)
        self._closing: Ending | None = None

    @property
    def guarantees(self) -> str:
        """The guarantees of this store, in a few sentences."""
        return (
            "Every grant is confirmed by a majority of the members before it is reported, and "
            "survives the loss of any minority. Without a majority nothing is granted, and holders "
            "keep their leases only as long as they were proven. Leases expire by the clock of the "
            "leader; a new leader restarts it. Fencing tokens rise as long as the cluster keeps "
            "its data: after restoring a snapshot use another prefix."
        )

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`."""
        from tenure.engines.etcd.doctor import examine  # not needed by a program

        return examine(self.address)

    # Opening and closing

    async def open(self) -> None:
        """Connect to the store."""
        if self.is_open:
            return
        self._closing = None
        self._open_services()
        self.watching = Watching(self.members, self.keys.base, self.timeout, self._up, self._down)
        self.members.moved = self.watching.moved
        try:
            revision = await self._greet()
        except BaseException:
            await self.members.aclose()
            raise
        self.is_open = True
        self.watching.add(self.keys.base, b"", revision + 1, self._base_changed, self._restore_base)
        self.watching.open()

    async def _greet(self) -> int:
        """Find a member that answers, and create the base and the default node if needed.

        A base that is missing beside other keys was deleted: the programs that know it get time to
        write it again, since another one would give lower tokens to some of them. Returns the
        revision at which the base was read.
        """
        address, attempts = self.address, pauses()
        hello = wire.txn(
            (wire.exists(self.keys.base), wire.exists(self.keys.node(DEFAULT_NODE))),
            (wire.get(self.keys.base),),
            (
                wire.nested(
                    wire.txn(
                        (wire.created_at(self.keys.base, wire.ABSENT),),
                        (wire.put(self.keys.base, b"%d" % int(self.clock.wall() * 1e6)),),
                    )
                ),
                wire.put(self.keys.node(DEFAULT_NODE), config_text(NodeConfig())),
                wire.get(self.keys.base),
            ),
        )
        look = wire.txn(
            (wire.exists(self.keys.base),), (), (wire.get_all(self.keys.prefix, count_only=True),)
        )
        restored_by = self.clock.now() + _RESTORING
        until = self.clock.now() + address.connect_timeout
        while True:
            left = max(until - self.clock.now(), 0.1)
            within = min(left, self.timeout)
            try:
                version = answers.read_string(await self.members.call(wire.STATUS, b"", within), 2)
                self._check_version(version)
                await self._check_renewals(within)
                looked = await self.txn(look, within)
                if not looked.ok and looked.parts[0].count and self.clock.now() < restored_by:
                    await asyncio.sleep(_RESTORING / 20)
                    continue
                answer = await self.txn(hello, within)
            except Lost as lost:
                pause = next(attempts)
                if self.clock.now() + pause >= until:
                    raise EngineUnavailable(
                        f"{self.url} could not be reached within {address.connect_timeout:g} s: "
                        f"{lost}. Check that most of its members run there, {address.transport}; "
                        "'tenure doctor' examines each"
                    ) from lost
                await asyncio.sleep(pause)
            except Refused as refused:
                raise failure(self.url, refused) from refused
            else:
                kv = answer.parts[-1].first
                assert kv is not None
                self.base = int(kv.value)
                return answer.revision

    def _base_changed(self, events: Sequence[WatchEvent]) -> None:
        last = events[-1]
        if last.deleted:
            self._restore_base()
        elif (base := int(last.kv.value)) != self.base:
            self.base = base
            for session in list(self.sessions):
                session.end("the base of the fencing tokens was replaced")

    def _restore_base(self) -> None:
        """Write the base again, unless there is one: the tokens of all programs rise from it."""
        base = self.keys.base
        put = wire.txn((wire.created_at(base, wire.ABSENT),), (wire.put(base, b"%d" % self.base),))
        self.spawn(self.eventually(put, self.address.connect_timeout, "restore the base"))

    def _check_version(self, version: str) -> None:
        numbers = tuple(int(each) for each in version.split(".")[:2] if each.isdigit())
        if numbers < _OLDEST:
            raise Unsupported(f"{self.url} is etcd {version}. Use 3.4 or newer")

    async def _check_renewals(self, within: float) -> None:
        """Refuse etcd's ``grpc-proxy``, which answers renewals from memory.

        Such an answer proves nothing: the lease may have been renewed long before. The proxy is
        recognized by a renewal, of no lease, after which nothing is sent: it does not answer that.
        """
        call = await self.members.converse(self.members.turn, wire.KEEP_ALIVE)
        try:
            call.write(wire.lease(secrets.randbits(62)))
            call.done_writing()
            async with asyncio.timeout(within):
                await call.read()
        except CallFailed as failed:
            if failed.code is Code.UNKNOWN and "context canceled" in str(failed):
                raise Unsupported(
                    f"{self.url} is etcd's grpc-proxy, which answers renewals from memory, so that "
                    "a holder could outlive its lease. Name the members, or an 'etcd gateway'"
                ) from failed
            raise Lost(str(failed)) from failed
        except TimeoutError as late:
            raise Lost("a renewal was not answered") from late
        finally:
            call.cancel()

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self.is_open:
                return
            self._closing = Ending(self._close)
        await self._closing.wait()

    async def _close(self) -> None:
        self.is_open = False
        is_late = True
        try:
            await close_sessions(list(self.sessions), self.url, lambda: self.members.trouble)
            is_late = False
        finally:
            await self._finish(cancel=is_late)
            await self.watching.aclose()
            await self._heartbeat.aclose()
            await self.members.aclose()

    async def _finish(self, *, cancel: bool) -> None:
        """Wait for the tasks of the sessions, and cancel those that take too long."""
        while self.tasks:
            if cancel:
                for task in self.tasks:
                    task.cancel()
            # Tasks that these begin, such as the detach after a cancelled takeover, have time, too.
            _, late = await asyncio.wait(list(self.tasks), timeout=_LEAVING)
            cancel = cancel or bool(late)

    # Contact with the cluster

    def _up(self) -> None:
        for session in list(self.sessions):
            session.contact(True)

    def _down(self, why: str) -> None:
        _log.debug("connection lost, trying another member: url=%s error=%s", self.url, why)
        cause = EngineUnavailable(why)
        for session in list(self.sessions):
            session.contact(False, cause)

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        if not self.is_open or self.watching.is_up or not self.members.trouble:
            return None
        return EngineUnavailable(self.members.trouble)

    # The contract

    @restores_default
    async def attach(self, how: Attach, events: SessionEvents) -> EtcdSession:
        """Attach a session, or take one over."""
        self.check_open()
        attaching = self.spawn(EtcdAttach(self, self._caches, how, events).attach())
        try:
            return await received(attaching)
        except asyncio.CancelledError:
            attaching.cancel()
            raise

    async def store_time(self) -> float:
        """Return the local wall clock, since etcd has none."""
        self.check_open()
        return self.clock.wall()  # etcd's clock cannot be read
