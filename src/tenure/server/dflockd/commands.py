"""Commands of the protocol, and their replies.

A command is a function of the connection, the key, the argument and the time. It returns the reply,
or ``None`` if the connection is *busy* with it. Then `settle` or `update` of the connection sends
the reply later, and further requests of the client wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

from tenure.errors import TenureError
from tenure.server.dflockd.claims import HELD, OVER, Key, readable
from tenure.server.dflockd.connection import DflockdServerConnection
from tenure.server.dflockd.locks import Locks
from tenure.server.limits import LimitReached
from tenure.server.reads import SLICE, Reader
from tenure.wire.lines import (
    ERROR,
    ERROR_ALREADY_ENQUEUED,
    ERROR_DRAINING,
    ERROR_LIMIT_MISMATCH,
    ERROR_MAX_LOCKS,
    ERROR_MAX_WAITERS,
    ERROR_NOT_ENQUEUED,
    OK,
    acquire_terms,
    enqueue_terms,
    grant,
    is_key,
    renew_terms,
    wait_terms,
)

_KINDS = ("locks", "semaphores", "idle_locks", "idle_semaphores")


async def stats(locks: Locks, connections: int, reader: Reader) -> bytes:
    """Return the reply to `stats`: the keys that this server's clients use or have used, as JSON.

    It is built in slices, between which keys may change.

    Raises:
        LimitReached: it would exceed the limit of a client's unread output.
    """
    entries_of: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    most = locks.context.limits.output_bytes // 2
    size = 0
    async with reader.whole_answer():
        keys = list(locks.keys.values())
        while keys:
            async with reader.turn():
                now, work = locks.now(), 0
                while keys and work < SLICE:
                    key = keys.pop()
                    work += 1 + len(key.claims) // 8
                    kind, facts = _describe(key, now)
                    entry = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
                    entries_of[kind].append(entry)
                    size += len(entry)
            if size > most:
                raise LimitReached(
                    f"the reply to stats has more than {most} bytes, which this server's limit "
                    "output_bytes allows",
                    "output_bytes",
                )
        lists = [
            f'"{kind}":[{",".join(reversed(entries))}]' for kind, entries in entries_of.items()
        ]
        return f'ok {{"connections":{connections},{",".join(lists)}}}\n'.encode()


def _describe(key: Key, now: float) -> tuple[str, dict[str, Any]]:
    """Return the list that a key belongs to, and its entry there."""
    mutex = key.limit == 1
    if not key.claims:
        idle = {"key": readable(key.name), "idle_s": round(max(0.0, now - key.used_at), 3)}
        return "idle_locks" if mutex else "idle_semaphores", idle
    held = [each for each in key.claims if each.stage is HELD]
    if mutex:
        owner = held[0].holder.connection if held else None
        return "locks", {
            "key": readable(key.name),
            "owner_conn_id": 0 if owner is None else owner.number,
            "lease_expires_in_s": round(max(0.0, held[0].deadline - now), 3) if held else 0.0,
            "waiters": key.waiting,
        }
    return "semaphores", {
        "key": readable(key.name),
        "limit": key.limit,
        "holders": len(held),
        "waiters": key.waiting,
    }


Command: TypeAlias = Callable[[DflockdServerConnection, str, str, float], bytes | None]


# Clients use only a few different timeouts and leases.
_lock_terms = lru_cache(maxsize=1024)(partial(acquire_terms, counted=False))
_semaphore_terms = lru_cache(maxsize=1024)(partial(acquire_terms, counted=True))


def _lock(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:
    terms = _lock_terms(argument)
    if terms is None:
        return ERROR
    timeout, limit, lease = terms
    return _claim(conn, name, limit, lease, timeout, now)


def _semaphore_lock(
    conn: DflockdServerConnection, name: str, argument: str, now: float
) -> bytes | None:
    terms = _semaphore_terms(argument)
    if terms is None:
        return ERROR
    timeout, limit, lease = terms
    return _claim(conn, name, limit, lease, timeout, now)


def _enqueue(
    conn: DflockdServerConnection, name: str, argument: str, now: float, *, counted: bool = False
) -> bytes | None:
    terms = enqueue_terms(argument, counted=counted)
    if terms is None:
        return ERROR
    former = conn.enqueued.get(name)
    if former is not None:
        if former.stage is HELD and former.deadline <= now:
            conn.locks.expire(former, now)
        if former.stage is not OVER:
            return ERROR_ALREADY_ENQUEUED
        del conn.enqueued[name]
    return _claim(conn, name, terms[0], terms[1], None, now)


def _claim(
    conn: DflockdServerConnection,
    name: str,
    limit: int,
    lease: int | None,
    timeout: float | None,
    now: float,
) -> bytes | None:
    """Take a place in the queue, and wait there unless the timeout is 0."""
    locks = conn.locks
    key = locks.keys.get(name)
    if key is None:
        if not is_key(name):
            return ERROR
        if locks.draining:
            return ERROR_DRAINING
        key = locks.keys.add(name, limit, now, conn.engine.account)
        if key is None:
            return ERROR_MAX_LOCKS
    elif key.limit != limit:
        return ERROR_LIMIT_MISMATCH
    elif locks.draining:
        return ERROR_DRAINING
    if lease is None:
        lease = locks.options.default_lease
    holder = conn.holder
    if holder is None:
        return conn.put_off(conn.attach(lease))
    if key.claims:
        locks.evict(key, now)
        if 0 < locks.max_waiters <= key.waiting:
            return ERROR_MAX_WAITERS
    if len(holder.claims) >= conn.most_claims:
        return ERROR_MAX_LOCKS
    if limit > 1 and not key.made:
        return conn.put_off(locks.keys.make(key, holder.session, conn.engine.account))
    claim = locks.claim(key, holder, lease, timeout, now)
    if timeout is not None and claim.stage is HELD:
        return grant("ok", claim.token, lease)
    return conn.outcome(claim, enqueued=timeout is None)


def _wait(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:
    timeout = wait_terms(argument)
    if timeout is None or not is_key(name):
        return ERROR
    claim = conn.enqueued.pop(name, None)
    if claim is None:
        return ERROR_NOT_ENQUEUED
    locks = conn.locks
    if claim.stage is HELD and claim.deadline <= now:
        locks.sweep(now)
    if claim.stage is OVER:
        return claim.verdict
    if claim.stage is HELD:
        try:
            answer = locks.renew(claim, claim.lease, now)
        except TenureError:
            return ERROR
        return conn.settle(answer, grant("ok", claim.token, claim.lease), claim)
    if locks.draining:
        locks.abandon(claim, ERROR_DRAINING, now)
        return ERROR_DRAINING
    try:
        retimed = claim.holder.session.alter(
            claim.request_id, count=None, data=None, timeout=timeout
        )
    except TenureError:
        return ERROR
    conn.wait_for(claim)
    if retimed is not None:
        retimed.add_done_callback(_retimed)  # its answer is an event
    return None


def _release(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:
    locks = conn.locks
    claim = locks.find(name, argument)
    if claim is None:
        return conn.put_off(conn.home.remote.release(conn.reader, name, argument.strip()))
    if claim.deadline <= now:
        locks.expire(claim, now)
        return ERROR
    if conn.enqueued and conn.enqueued.get(name) is claim:
        del conn.enqueued[name]
    try:
        answer = locks.withdraw(claim)
    except TenureError:
        locks.drop(claim, ERROR, now)
        return ERROR
    locks.drop(claim, ERROR_NOT_ENQUEUED, now)
    return conn.settle(answer, OK)


def _renew(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:
    terms = renew_terms(argument)
    if terms is None:
        return ERROR
    locks = conn.locks
    token, lease = terms
    if lease is None:
        lease = locks.options.default_lease
    claim = locks.find(name, token)
    if claim is None:
        remote = conn.home.remote.renew(conn.reader, name, token, lease, conn.attached)
        return conn.put_off(remote)
    if claim.deadline <= now:
        locks.expire(claim, now)
        return ERROR
    if not claim.holder.can_promise(lease, now):
        return ERROR
    try:
        answer = locks.renew(claim, lease, now)
    except TenureError:
        return ERROR
    return conn.settle(answer, b"ok %d\n" % lease, claim)


def _stats(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:  # noqa: ARG001
    return conn.put_off(stats(conn.locks, len(conn.home.connections), conn.reader))


def _ping(conn: DflockdServerConnection, name: str, argument: str, now: float) -> bytes | None:  # noqa: ARG001
    return OK


def _retimed(answer: Any) -> None:
    if not answer.cancelled():
        answer.exception()


_enqueue_many: Command = partial(_enqueue, counted=True)

COMMANDS: dict[str, Command] = {
    "l": _lock,
    "sl": _semaphore_lock,
    "e": _enqueue,
    "se": _enqueue_many,
    "w": _wait,
    "sw": _wait,
    "r": _release,
    "sr": _release,
    "n": _renew,
    "sn": _renew,
    "stats": _stats,
    "ping": _ping,
}
