"""Attaching of a session: a new one, or one of another program.

A new session gets the revision of a write as its number, then a lease of that number, and its key
under that lease. A takeover raises the attach number by a compare-and-swap on the key. From then on
etcd rejects transactions of the former attachment, and nothing proves it any more.

Each attachment has a *claim*: a key that exists while it may consider leases held. A takeover waits
until the claims of all others are deleted, or until the window has passed since the takeover, less
the time for which the lease had not been renewed by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets

from tenure.core import refusals, rules
from tenure.engines._kit.session import received
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.etcd import wire
from tenure.engines.etcd.attachment import WrittenAttachment
from tenure.engines.etcd.cluster import EtcdAttempts, EtcdCluster
from tenure.engines.etcd.errors import Lost, Refused, pauses
from tenure.engines.etcd.keys import Record, queues
from tenure.engines.etcd.semaphores import all_under, check_sessions
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.errors import EngineUnavailable, SessionClosed, TenureError
from tenure.identity import retold

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
