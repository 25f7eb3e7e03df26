"""The engine of one program for one etcd cluster, on one event loop.

It opens and closes the services shared by the sessions (`EtcdCluster`), and implements the
contract.

**Attaching** (`EtcdAttach`) opens a session, or takes one over from another program. A new session
gets the revision of a write as its number, then a lease of that number, and its key under that
lease. A takeover raises the attach number by a compare-and-swap on the key. From then on etcd
rejects transactions of the former attachment, and nothing proves it any more.

Each attachment has a *claim*: a key that exists while it may consider leases held. A takeover waits
until the claims of all others are deleted, or until the window has passed since the takeover, less
the time for which the lease had not been renewed by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tenure.background import Ending
from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.engines._kit.session import close_sessions, received, restores_default
from tenure.engines.contract import Attach, EngineDefaults, Finding, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.admin import EtcdNodes
from tenure.engines.etcd.answers import Lost, Refused, WatchEvent, failure, pauses
from tenure.engines.etcd.attachment import WrittenAttachment
from tenure.engines.etcd.cluster import EtcdAttempts, EtcdCluster
from tenure.engines.etcd.grpc import CallFailed, Code
from tenure.engines.etcd.keys import Record, config_text, queues
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.semaphores import all_under, check_sessions
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.engines.etcd.watching import Watching
from tenure.errors import EngineUnavailable, SessionClosed, TenureError, Unsupported
from tenure.identity import retold
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
)

T = TypeVar("T")
_log = logging.getLogger("tenure")

_LEAST_TTL = 2
"""Seconds; etcd grants no shorter lease."""


class EtcdAttach(EtcdAttempts):
    """Attempts to attach one session."""

    def __init__(
        self, cluster: EtcdCluster, caches: WatchCaches, how: Attach, events: SessionEvents
    ) -> None:
        super().__init__(cluster, how.node, cluster.address.connect_timeout)
        self._caches = caches
        self._how = how
        self._events = events
        self._unwanted = False
        self._claims: set[bytes] = set()  # claims of other attachments

    def error(self, lost: Lost) -> EngineUnavailable:
        """Return the error for an attach that has taken too long."""
        return EngineUnavailable(
            f"no session was attached on {self._node}: {self._cluster.url} did not answer within "
            f"{self._within:g} s ({lost}). Retry, or set a longer connect_timeout in the URL",
            node=self._node,
        )

    async def attach(self) -> EtcdSession:
        """Attach the session.

        Raises:
            NodeNotFound, SessionExpired, AuthenticationFailed, InvalidArgument, EngineUnavailable
        """
        how = self._how
        rules.check_path(how.node)
        if how.session_id is None:
            rules.check_window(how.recovery_window, how.node)
            rules.check_description(how.description, how.node)
            rules.check_key(how.key, how.node)
        try:
            if how.session_id is None:
                return await self._begin()
            return await self._take_over(how.session_id)
        except Refused as refused:
            raise self._cluster.failure(refused, how.node) from refused

    def _attached(self, number: int, record: Record, version: int, revision: int) -> EtcdSession:
        """Make the object of a session whose key was written at that revision."""
        attached = WrittenAttachment(self._how, self._events, number, record, version)
        session = EtcdSession(self._cluster, self._caches, attached)
        self._cluster.sessions.add(session)
        session.watch_key(revision)
        return session

    # A new session

    async def _begin(self) -> EtcdSession:
        cluster, how = self._cluster, self._how
        keys = cluster.keys
        token = secrets.token_hex(8)
        record = Record(token, True, how.recovery_window, how.description, how.liveness, how.key)
        seconds = max(_LEAST_TTL, math.ceil(how.recovery_window))
        node = wire.exists(keys.node(how.node))
        count = wire.get_all(keys.sessions(how.node), count_only=True)
        while True:
            numbered = await self.txn(wire.txn((node,), (wire.put(keys.serial, b""), count)))
            if numbered is None:
                continue
            if not numbered.ok:
                raise refusals.node_not_found(how.node)
            await check_sessions(cluster, how.node, numbered.parts[-1].count)
            number = cluster.base + numbered.revision  # unique
            key, at = keys.session(how.node, number), cluster.clock.now()
            session: EtcdSession | None = None
            try:
                request = wire.grant(number, seconds)
                await cluster.members.call(wire.LEASE_GRANT, request, cluster.timeout)
                put = wire.put(key, record.value(), number)
                claim = wire.put(record.claim(key), b"", number)
                answer = await cluster.txn(wire.txn((node,), (put, claim)), cluster.timeout)
                if not answer.ok:
                    raise refusals.node_not_found(how.node)
                session = self._attached(number, record, 1, answer.revision)
                session.prove(at)
                return session
            except Refused as refused:
                if not refused.no_lease:
                    raise
            except Lost as lost:
                await self.again(lost)
            finally:
                if session is None:
                    cluster.spawn(self._drop_lease(number))

    async def _drop_lease(self, number: int) -> None:
        """Revoke a lease that may have been granted without a session."""
        with contextlib.suppress(TenureError):
            await self._cluster.revoke(number, self._cluster.timeout)

    # A session of another program

    async def _take_over(self, number: int) -> EtcdSession:
        cluster = self._cluster
        swapping = cluster.spawn(self._swap(number))
        try:
            session = await received(swapping)
        except asyncio.CancelledError:
            self._unwanted = True
            raise
        until: float | None = None
        claims = wire.get_all(session.key + b"/b/", keys_only=True)

        async def remaining() -> float:
            nonlocal until
            if until is None:
                silent_for = await cluster.silent_for(number) or 0.0
                until = cluster.clock.now() + session.window - silent_for
            if self._claims:
                with contextlib.suppress(Lost):
                    await cluster.keep_alive(session)
                read = await session.read(claims)
                self._claims.intersection_update(kv.key for kv in read.parts[0].found)
            return until - cluster.clock.now() if self._claims else 0.0

        await session.take_over(
            None if self._how.assume_dead else remaining, lambda: self._resume(session)
        )
        return session

    async def _swap(self, number: int) -> EtcdSession:
        """Raise the attach number, and record the claims of other attachments.

        Once the session is unwanted, this only determines whether the swap was done: another
        program may have the session by then.
        """
        cluster, how = self._cluster, self._how
        key, token = cluster.keys.session(how.node, number), secrets.token_hex(8)
        read = wire.txn((), (wire.get(cluster.keys.node(how.node)), wire.get(key, key + b"0")))
        while True:
            found = await self.txn(read)
            if found is None:
                continue
            if not found.parts[0].found:
                raise refusals.node_not_found(how.node)
            by_key = {kv.key: kv for kv in found.parts[1].found}
            kv = by_key.get(key)
            if kv is None:
                raise rules.not_there_to_resume(how.node, number)
            old = Record.read(kv.value)
            rules.check_resumable(old.liveness, old.key, how.key, how.node, number)
            description = how.description if how.adopt else retold(old.description, how.description)
            record = Record(token, True, old.window, description, old.liveness, old.key)
            claim = record.claim(key)
            version, revision = kv.version, found.revision
            if old.token != token:  # otherwise an attempt whose answer was lost has done it
                if self._unwanted:
                    raise SessionClosed(f"attach on {how.node} was cancelled", node=how.node)
                puts = (wire.put(key, record.value(), number), wire.put(claim, b"", number))
                try:
                    answer = await self.txn(wire.txn((wire.version_is(key, version),), puts))
                except Refused as refused:
                    if refused.no_lease:
                        raise rules.not_there_to_resume(how.node, number) from refused
                    raise
                if answer is None or not answer.ok:
                    continue
                version, revision = version + 1, answer.revision
            self._claims = {each for each in by_key if each[len(key) :].startswith(b"/b/")} - {
                claim
            }
            session = self._attached(number, record, version, revision)
            if self._unwanted:
                session.abandon()  # at once: closing the engine would end it
            return session

    async def _resume(self, session: EtcdSession) -> None:
        """Complete the takeover: report the requests, and then later events."""
        cluster, pause = self._cluster, pauses()
        until = cluster.clock.now() + session.window
        while True:
            try:
                await cluster.keep_alive(session)
                break
            except Lost:
                session.check()
                if cluster.clock.now() > until:
                    raise session.expired() from None
                await asyncio.sleep(next(pause))
        prefix = cluster.keys.queues(session.path)
        while True:
            answer, _ = await session.transact(
                lambda: wire.txn((session.mine,), (wire.get_all(prefix),), (session.get,))
            )
            found = queues(answer.parts[0].found, prefix)
            data: dict[bytes, bytes] = {}
            try:
                for each in found:
                    if any(entry.session == session.id for entry in each.requests):
                        where = session.name(each.name).request_data
                        data.update(await all_under(session, where, answer.revision))
                break
            except Refused as refused:
                if not refused.compacted:
                    raise
        session.check()
        session.begin(found, data)


_LEAVING = 2.0
"""Seconds that closing waits for the tasks of the sessions."""
_OLDEST = (3, 4)
_RESTORING = 1.0
"""Seconds for running programs to write the base again after its deletion."""


class EtcdEngine(EtcdNodes, EngineDefaults):
    """The `Engine` of one etcd cluster."""

    capabilities = Capabilities(
        resume=True,
        durable=True,
        since=False,
        waiter_timeout=False,
        store_time=False,
        resize=True,
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
