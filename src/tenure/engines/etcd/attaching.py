"""Attach a session: a new one, or one that another program had.

A new one gets the revision of a write as its number, then a lease of that number, and its key
under that. Taking over is a compare-and-swap on the key, which
raises the number of the attachment, so that etcd refuses whatever the other side still sends, and
nothing proves it any more. Each attachment has a key of its own for as long as it may believe that
it holds something. An attachment that takes over waits until the keys of all others are gone, or
until the window has passed since the takeover, less the time for which the lease had not been
renewed by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from functools import partial

from tenure.core import rules
from tenure.engines._kit.session import received
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.cluster import EtcdAttempts, EtcdCluster, no_node
from tenure.engines.etcd.keys import Record, queues
from tenure.engines.etcd.members import Lost, Refused
from tenure.engines.etcd.semaphores import all_under, check_sessions, count
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.errors import EngineUnavailable, SessionClosed, TenureError
from tenure.identity import retold

__all__ = ["attach"]

_LEAST_TTL = 2
"""Seconds; etcd gives no lease for less."""
_FIRST_PAUSE = 0.01


async def attach(
    engine: EtcdCluster, caches: WatchCaches, how: Attach, events: SessionEvents
) -> EtcdSession:
    """Attach a session.

    Raises:
        NodeNotFound, SessionExpired, AuthenticationFailed, InvalidArgument, EngineUnavailable
    """
    rules.check_path(how.node)
    if how.session_id is None:
        rules.check_window(how.recovery_window, how.node)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
    try:
        if how.session_id is None:
            return await _begin(engine, caches, how, events)
        return await _take_over(engine, caches, how, how.session_id, events)
    except Refused as refused:
        raise engine.failure(refused, how.node) from refused


class _Attaching(EtcdAttempts):
    """Attempts to attach a session."""

    def __init__(self, engine: EtcdCluster, node: str) -> None:
        super().__init__(engine, node, engine.address.connect_timeout)

    def error(self, lost: Lost) -> EngineUnavailable:
        return EngineUnavailable(
            f"no session was attached on {self._node}: {self._engine.url} did not answer "
            f"within {self._within:g} s ({lost})",
            node=self._node,
        )


# A new one


async def _begin(
    engine: EtcdCluster, caches: WatchCaches, how: Attach, events: SessionEvents
) -> EtcdSession:
    trying = _Attaching(engine, how.node)
    record = Record(
        secrets.token_hex(8), True, how.recovery_window, how.description, how.liveness, how.key
    )
    seconds = max(_LEAST_TTL, math.ceil(how.recovery_window))
    serial = wire.txn(
        (wire.exists(engine.keys.node(how.node)),),
        (wire.put(engine.keys.serial, b""), count(engine.keys.sessions(how.node))),
    )
    while True:
        numbered = await trying.txn(serial)
        if numbered is None:
            continue
        if not numbered.ok:
            raise no_node(how.node)
        await check_sessions(engine, how.node, numbered.parts[-1].count)
        number = engine.base + numbered.revision  # never the same one twice
        at = engine.clock.now()
        session: EtcdSession | None = None
        try:
            await engine.call(wire.LEASE_GRANT, wire.grant(number, seconds), engine.patience)
            session = await _put(engine, caches, how, number, record, events)
            session.prove(at)
            return session
        except Refused as refused:
            if not refused.no_lease:
                raise
        except Lost as lost:
            await trying.again(lost)
        finally:
            if session is None:
                engine.spawn(_drop_lease(engine, number))


async def _put(
    engine: EtcdCluster,
    caches: WatchCaches,
    how: Attach,
    number: int,
    record: Record,
    events: SessionEvents,
) -> EtcdSession:
    session = EtcdSession(engine, caches, how, number, record, 1, events)
    answer = await engine.txn(
        wire.txn(
            (wire.exists(engine.keys.node(how.node)),),
            (
                wire.put(session.key, record.value(), number),
                wire.put(session.believes, b"", number),
            ),
        ),
        engine.patience,
    )
    if not answer.ok:
        raise no_node(how.node)
    engine.sessions.add(session)
    session.listen(answer.revision)
    return session


async def _drop_lease(engine: EtcdCluster, number: int) -> None:
    """Revoke a lease that may have been granted to no session."""
    with contextlib.suppress(TenureError):
        await engine.revoke(number, engine.patience)


# One that another program had


async def _take_over(
    engine: EtcdCluster, caches: WatchCaches, how: Attach, number: int, events: SessionEvents
) -> EtcdSession:
    unwanted = asyncio.Event()
    believing: set[bytes] = set()
    swapping = engine.spawn(_swap(engine, caches, how, number, events, unwanted, believing))
    try:
        session = await received(swapping)
    except asyncio.CancelledError:
        unwanted.set()
        raise
    until: float | None = None
    prefix = session.key + b"/b/"
    there = wire.get(wire.range_(prefix, wire.after(prefix), keys_only=True))

    async def remaining() -> float:
        nonlocal until
        if until is None:
            until = engine.clock.now() + session.window - await _unheard_for(engine, number)
        if believing:
            with contextlib.suppress(Lost):
                await engine.keep_alive(session)
            read = await session.read(there)
            believing.intersection_update(kv.key for kv in read.parts[0].found)
        return until - engine.clock.now() if believing else 0.0

    await session.take_over(
        None if how.assume_dead else remaining, partial(_go_on, engine, session)
    )
    return session


async def _swap(
    engine: EtcdCluster,
    caches: WatchCaches,
    how: Attach,
    number: int,
    events: SessionEvents,
    unwanted: asyncio.Event,
    believing: set[bytes],
) -> EtcdSession:
    """Raise the number of the attachment; note in `believing` the keys of those that may believe.

    Once it is unwanted, it finds out whether it was done, and does not do it any more: another
    program may have the session by then.
    """
    trying, key = _Attaching(engine, how.node), engine.keys.session(how.node, number)
    token = secrets.token_hex(8)
    read = wire.txn(
        (),
        (
            wire.get(wire.range_(engine.keys.node(how.node))),
            wire.get(wire.range_(key, key + b"0")),
        ),
    )
    while True:
        found = await trying.txn(read)
        if found is None:
            continue
        if not found.parts[0].found:
            raise no_node(how.node)
        by_key = {kv.key: kv for kv in found.parts[1].found}
        kv = by_key.get(key)
        if kv is None:
            raise rules.not_there_to_resume(how.node, number)
        old = Record.read(kv.value)
        rules.check_resumable(old.liveness, old.key, how.key, how.node, number)
        description = how.description if how.adopt else retold(old.description, how.description)
        record = Record(token, True, old.window, description, old.liveness, old.key)
        version, revision = kv.version, found.revision
        if old.token != token:  # or else an attempt whose answer was lost
            if unwanted.is_set():
                raise SessionClosed(f"the session on {how.node} is not wanted", node=how.node)
            believes = wire.put(key + b"/b/" + token.encode(), b"", number)
            put = wire.put(key, record.value(), number)
            try:
                answer = await trying.txn(
                    wire.txn((wire.version_is(key, version),), (put, believes))
                )
            except Refused as refused:
                if refused.no_lease:
                    raise rules.not_there_to_resume(how.node, number) from refused
                raise
            if answer is None or not answer.ok:
                continue
            version, revision = version + 1, answer.revision
        session = EtcdSession(engine, caches, how, number, record, version, events)
        engine.sessions.add(session)
        session.listen(revision)
        believing.update(each for each in by_key if each[len(key) :].startswith(b"/b/"))
        believing.discard(session.believes)
        return session


async def _unheard_for(engine: EtcdCluster, number: int) -> float:
    """Seconds for which a lease has not been renewed, at the least."""
    try:
        answer = await engine.call(wire.TIME_TO_LIVE, wire.time_to_live(number), engine.patience)
    except (Lost, Refused):
        return 0.0
    lease = answers.read_lease(answer)
    return max(0.0, lease.granted - lease.left - 1.0) if lease.left >= 0 else 0.0


async def _go_on(engine: EtcdCluster, session: EtcdSession) -> None:
    """The take-over is complete: tell what was found, and then what has happened since."""
    at = engine.clock.now()
    while True:
        try:
            await engine.keep_alive(session)
            break
        except Lost:
            session.check()
            if engine.clock.now() > at + session.window:
                raise session.expired() from None
            await asyncio.sleep(_FIRST_PAUSE)
    prefix = engine.keys.queues(session.path)
    while True:
        answer, _ = await session.ask(
            lambda: wire.txn(
                (session.mine,),
                (wire.get(wire.range_(prefix, wire.after(prefix))),),
                (session.get,),
            )
        )
        found = queues(answer.parts[0].found, prefix)
        data: dict[bytes, bytes] = {}
        try:
            for each in found:
                if any(entry.session == session.id for entry in each.requests):
                    where = session.name(each.name).request_data
                    data.update(await all_under(session, where, answer.revision))
        except Refused as refused:
            if refused.compacted:
                continue
            raise
        break
    session.check()
    session.begin(found, data)
