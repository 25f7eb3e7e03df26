"""Operations on semaphores, and their descriptions.

A change is a read, and a transaction that succeeds only if the state has not changed since. An
unanswered change is not made twice: it was done if its result is found, or if the key was changed
after the read.

A transaction of etcd can count keys, but not compare their number. So the keys of a node are
counted first, which is cheap while they are few. Only if they may be too many, the sessions or
semaphores are counted. Concurrent clients may exceed a limit together. Creating an ephemeral
semaphore counts nothing, because that would slow down every lock.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from tenure.core import refusals, rules
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue, Refused
from tenure.engines.etcd.attachment import EtcdAttachment
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import (
    Entry,
    Name,
    Queue,
    Record,
    entries,
    limit_value,
    nonce_of,
    note,
    number_owning,
    queues,
    resized,
    taking_out,
)
from tenure.model import RequestDescription, SemaphoreDescription

_MOST_NOTED = 40
"""Requests that are removed in one transaction; etcd's maximum is 128 operations."""
_MOST_COMPARED = 100
"""Keys that are compared in one transaction; etcd's maximum is 128, too."""
_MOST_KEYS = 100
"""Keys that are read along with a page; etcd's maximum is 128 operations."""
_FIRST_PAGE, _MOST_IN_PAGE, _SMALL_PAGE = 8, 4096, 256 * 1024


_PAGE = 4096


class Reader(Protocol):
    """A session or an engine, as a reader."""

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority."""
        ...


async def create(
    session: EtcdAttachment, name: Name, limit: int, data: bytes, *, exist_ok: bool
) -> None:
    """Create a lasting semaphore."""
    await check_semaphores(session.engine, session, name)
    value = limit_value(limit, secrets.token_bytes(8))
    then = (wire.put(name.limit, value), wire.put(name.data, data) if data else name.drop_data)
    otherwise = (session.get, name.get_limit)
    answer, _ = await session.transact(
        lambda: wire.txn((session.mine, name.absent, name.empty), then, otherwise)
    )
    if answer.ok:
        return
    found = answer.parts[1].first
    if found is None:
        rules.check_kind(False, True, name.path, name.name)
    elif found.value != value:  # otherwise one of our attempts has done it
        there = Queue(name.name, found, []).limit.tokens
        if not exist_ok or there != limit:
            raise refusals.semaphore_exists(name.path, name.name, there)


async def update(session: EtcdAttachment, name: Name, data: bytes) -> None:
    """Replace a semaphore's data, unless it is equal."""
    get_data = wire.get(name.data)
    while True:
        read = await session.read(name.get_limit, name.first_request, get_data)
        limit, request, old = (part.first for part in read.parts)
        if limit is None and request is None:
            raise refusals.semaphore_not_found(name.path, name.name)
        if data == (b"" if old is None else old.value):
            return
        there = limit or request
        assert there is not None
        modified = 0 if old is None else old.modified
        answer, again = await session.transact(
            partial(_updating, session, there, name, modified, data)
        )
        if answer.ok:
            return
        now = answer.parts[1].first  # as `_updating` reads it
        if again and now is not None and now.modified != modified:
            return


def _updating(
    session: EtcdAttachment, there: KeyValue, name: Name, modified: int, data: bytes
) -> bytes:
    """Replace the data, if neither the semaphore nor the data has changed since the read."""
    compares = (
        session.mine,
        wire.created_at(there.key, there.created),
        wire.modified_at(name.data, modified),
    )
    get_data = wire.get(name.data)
    return wire.txn(compares, (wire.put(name.data, data),), (session.get, get_data))


async def resize(session: EtcdAttachment, name: Name, limit: int) -> None:
    """Change the limit of a semaphore, and remove the waiters that are too large for it.

    The limit's key says which requests own at that time. They are those that were read if the
    owners and the first waiter have not changed since, and no request has joined behind owners
    alone. The transaction compares that; if they are too many, it reads the queue again.
    """
    changed = 0  # the revision of our change
    while True:
        read = await session.read(name.get_limit, name.queue)
        queue = Queue(name.name, read.parts[0].first, entries(read.parts[1].found))
        if changed and queue.limit.modified != changed:
            return  # it was changed again, or deleted
        if not queue.exists:
            raise refusals.semaphore_not_found(name.path, name.name)
        rules.check_resizable(
            queue.limit.tokens, name.path, name.name, ephemeral=queue.limit_kv is None
        )
        too_large = [each for each in queue.requests[queue.owning :] if each.count > limit]
        changes = queue.limit.tokens != limit
        if not changes and not too_large:
            return
        try:
            answer, _ = await session.transact(
                partial(_resizing, session, name, queue, limit, read.revision, too_large)
            )
        except Refused as refused:
            if not refused.no_lease:
                raise
            continue  # a session has just ended; if it is ours, the next read raises
        if answer.ok and changes:
            changed = answer.revision
            if queue.owning >= _MOST_COMPARED:
                changed = await _correct(session, name, queue, limit, answer)


def _resizing(
    session: EtcdAttachment,
    name: Name,
    queue: Queue,
    limit: int,
    revision: int,
    too_large: Sequence[Entry],
) -> bytes:
    """Build the transaction that changes a limit, and removes waiters that are too large."""
    kv, owning = queue.limit_kv, queue.owning
    assert kv is not None
    then: list[bytes] = []
    compares = [session.mine, wire.modified_at(name.limit, kv.modified)]
    if queue.limit.tokens != limit:
        value = limit_value(limit, nonce_of(kv.value), _last_owner(queue.requests, owning))
        then.append(wire.put(name.limit, value))
        if owning >= _MOST_COMPARED:
            return wire.txn(tuple(compares), (*then, name.queue), (session.get,))
        deciding = queue.requests[: owning + 1]  # the owners, and the first waiter
        compares += [wire.modified_at(each.key, each.modified) for each in deciding]
        if owning == len(queue.requests):
            compares.append(wire.created_before(name.requests, revision + 1))
    for each in too_large[:_MOST_NOTED]:
        key = session.engine.keys.session(name.path, each.session)
        then += taking_out(name, each, key, resized(limit))
    return wire.txn(tuple(compares), tuple(then), (session.get,))


def _last_owner(queue: Sequence[Entry], owning: int) -> int:
    return queue[owning - 1].created if owning else 0


async def _correct(
    session: EtcdAttachment, name: Name, before: Queue, limit: int, answer: answers.Answer
) -> int:
    """Have the limit's key name the requests that owned at its change.

    Args:
        session: the session that has changed the limit.
        name: the semaphore.
        before: the queue as it was read before the change.
        limit: the new limit.
        answer: the answer to the change, which has read the queue.

    Returns:
        The revision of the key.
    """
    assert before.limit_kv is not None
    there = entries(answer.parts[-1].found)
    owned = _last_owner(there, number_owning(there, before.limit))
    if owned == _last_owner(before.requests, before.owning):
        return answer.revision
    value = limit_value(limit, nonce_of(before.limit_kv.value), owned)
    same = wire.modified_at(name.limit, answer.revision)
    corrected, _ = await session.transact(
        lambda: wire.txn((session.mine, same), (wire.put(name.limit, value),), (session.get,))
    )
    return corrected.revision if corrected.ok else answer.revision


async def delete(session: EtcdAttachment, name: Name, *, force: bool) -> None:
    """Delete a semaphore; by force with everything in its queue."""
    tried: int | None = None  # creation of the one that we may have deleted
    while True:
        read = await session.read(name.get_limit, name.queue)
        limit = read.parts[0].first
        queue = Queue(name.name, limit, entries(read.parts[1].found))
        created = 0 if limit is None else limit.created
        if not queue.exists or tried not in {None, created}:
            if tried is not None:
                return
            raise refusals.semaphore_not_found(name.path, name.name)
        if queue.requests and not force:
            raise refusals.semaphore_busy(name.path, name.name)
        try:
            answer, again = await session.transact(
                partial(_deleting, session, name, queue, read.revision)
            )
        except Refused as refused:
            if not refused.no_lease:
                raise
            continue  # a session has just ended; if it is ours, the next read raises
        if answer.ok and len(queue.requests) <= _MOST_NOTED:
            return
        tried = created if again or answer.ok else tried


def _deleting(session: EtcdAttachment, name: Name, queue: Queue, revision: int) -> bytes:
    """Build the transaction that deletes a semaphore with its queue, or the end of a long queue."""
    compares = (
        session.mine,
        wire.created_at(name.limit, queue.limit_kv.created if queue.limit_kv else 0),
        wire.created_before(name.requests, revision + 1),
    )
    last = queue.requests[-_MOST_NOTED:]
    notes = [note(session.engine.keys.session(name.path, each.session), each) for each in last]
    if len(last) < len(queue.requests):
        gone = [wire.delete(each.key) for each in last]
        gone += [wire.delete(name.data_of(each.key)) for each in last]
    else:
        gone = [wire.delete(name.all, wire.after(name.all)), name.drop_data]
        gone.append(wire.delete(name.request_data, wire.after(name.request_data)))
    return wire.txn(compares, (*gone, *notes), (session.get,))


# Descriptions


async def describe(
    reader: Reader, engine: EtcdCluster, name: Name, *, owners: bool, waiters: bool
) -> SemaphoreDescription:
    """Describe one semaphore, in two reads unless its queue is long."""
    sessions = engine.keys.sessions(name.path)
    get_all = wire.get_all(name.all)
    while True:
        read = await reader.read(get_all, wire.get(name.data))
        prefix = engine.keys.queues(name.path)
        found = queues(read.parts[0].found, prefix)
        if not found:
            raise refusals.semaphore_not_found(name.path, name.name)
        data = read.parts[1].first
        queue, more = found[0], {}
        shown = queue.requests[0 if owners else queue.owning : None if waiters else queue.owning]
        try:
            if owners or waiters:
                of_sessions = {engine.keys.session(name.path, each.session) for each in shown}
                more = await all_under(reader, name.request_data, read.revision, of_sessions)
        except Refused as refused:
            if refused.compacted:
                continue
            raise
        return described(
            queue,
            b"" if data is None else data.value,
            {
                key[len(name.request_data) :]: value
                for key, value in more.items()
                if key.startswith(name.request_data)
            },
            engine.base,
            owners=owners,
            waiters=waiters,
            descriptions=descriptions(more, sessions),
        )


def descriptions(found: Mapping[bytes, bytes], sessions: bytes) -> dict[int, str]:
    """Return the descriptions of sessions by id.

    Args:
        found: keys and values that were read.
        sessions: the prefix of their keys.
    """
    return {
        int(key[len(sessions) :], 16): Record.read(value).description
        for key, value in found.items()
        if key.startswith(sessions) and b"/" not in key[len(sessions) :]
    }


async def all_under(
    reader: Reader, prefix: bytes, revision: int, keys: Iterable[bytes] = ()
) -> dict[bytes, bytes]:
    """Read all keys with a prefix and their values, page by page.

    Args:
        reader: reads the pages.
        prefix: the prefix of the keys.
        revision: the revision at which all of them are read.
        keys: other keys, which are read along with the pages.
    """
    found: dict[bytes, bytes] = {}
    others = deque(keys)
    start: bytes | None = prefix
    end, limit = wire.after(prefix), _FIRST_PAGE
    while start is not None or others:
        some = [others.popleft() for _ in range(min(len(others), _MOST_KEYS))]
        reads = [wire.get(key, revision=revision) for key in some]
        if start is not None:
            reads.append(wire.get(start, end, limit=limit, revision=revision))
        parts = (await reader.read(*reads)).parts
        for part in parts:
            found.update((kv.key, kv.value) for kv in part.found)
        if start is not None:
            page = parts[-1]
            start = page.found[-1].key + b"\0" if page.more else None
            if sum(len(kv.value) for kv in page.found) < _SMALL_PAGE:
                limit = min(limit * 8, _MOST_IN_PAGE)
    return found


def described(
    queue: Queue,
    data: bytes,
    of_requests: dict[bytes, bytes],
    base: int,
    *,
    owners: bool,
    waiters: bool,
    descriptions: Mapping[int, str] | None = None,
) -> SemaphoreDescription:
    """Describe a semaphore that was read.

    Args:
        queue: its limit and its requests.
        data: its data.
        of_requests: the data of requests by the end of their keys.
        base: number that is added to a create revision to get the order id.
        owners: whether to describe the owners.
        waiters: whether to describe the waiters.
        descriptions: the sessions' descriptions, if they were read.
    """
    texts = descriptions or {}

    def requests(some: Sequence[Entry]) -> tuple[RequestDescription, ...]:
        return tuple(
            RequestDescription(
                session_id=each.session,
                order_id=base + each.created,
                count=each.count,
                data=of_requests.get(each.key[each.key.rindex(b"/") + 1 :], b""),
                session_description=texts.get(each.session),
            )
            for each in some
        )

    owning, waiting = queue.requests[: queue.owning], queue.requests[queue.owning :]
    return SemaphoreDescription(
        name=queue.name,
        data=data,
        limit=queue.limit.tokens,
        held=sum(each.count for each in owning),
        ephemeral=queue.limit_kv is None,
        owners=requests(owning) if owners else (),
        waiters=requests(waiting) if waiters else (),
        waiting=len(waiting),
    )


# Limits of a node


async def check_sessions(engine: EtcdCluster, path: str, keys: int) -> None:
    """Raise `InvalidArgument` if a node with so many keys under its sessions is full."""
    most = rules.SESSIONS_PER_NODE
    if keys < most:
        return
    prefix = engine.keys.sessions(path)
    there = await _count_those(
        engine.reader(path), prefix, lambda rest: rest if b"/" not in rest else None
    )
    if there >= most:
        raise refusals.node_full(path)


async def check_semaphores(engine: EtcdCluster, reader: Reader, name: Name) -> None:
    """Raise `InvalidArgument` if the semaphore does not exist and its node is full."""
    most, prefix = rules.SEMAPHORES_PER_NODE, engine.keys.queues(name.path)
    keys, *there = (
        await reader.read(wire.get_all(prefix, count_only=True), name.get_limit, name.first_request)
    ).parts
    if keys.count < most or any(part.found for part in there):
        return
    if await _count_those(reader, prefix, lambda rest: rest.partition(b"/")[0]) >= most:
        raise refusals.semaphores_full(name.path, name.name)


async def _count_those(
    reader: Reader, prefix: bytes, parse: Callable[[bytes], bytes | None]
) -> int:
    """Count the distinct objects to which the keys under a prefix belong."""
    start, end = prefix, wire.after(prefix)
    number, last = 0, None
    while True:
        page = wire.get(start, end, limit=_PAGE, keys_only=True)
        found = (await reader.read(page)).parts[0].found
        for kv in found:
            this = parse(kv.key[len(prefix) :])
            if this is not None and this != last:
                number, last = number + 1, this
        if len(found) < _PAGE:
            return number
        start = found[-1].key + b"\0"
