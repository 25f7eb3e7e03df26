"""One request of a session: its state, and its transactions.

In `requests`, `EtcdRequests` sets `created`, `gone` and the timer. `Waiting` sets `owns`, the watch
and the poll.
`count` and `data` change when etcd has confirmed the change. Transactions are only built here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tenure.core import refusals, rules
from tenure.engines.contract import Enqueued
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.keys import EPHEMERAL, Entry, Limit, Name, limit_of, request_value
from tenure.engines.etcd.watching import EtcdWatch
from tenure.model import EPHEMERAL_LIMIT

_LARGE = 64 * 1024
"""Bytes of data; larger data is sent only once, so the queue is always read first."""


class AttachedSession(Protocol):
    """The attachment of a request: its number, its key, the comparison with it, and its read."""

    id: int
    key: bytes
    mine: bytes
    get: bytes


class QueueReader(Protocol):
    """The waiting requests of a session."""

    def read_soon(self, request: EtcdRequest) -> None:
        """Read the queue of a request."""


@dataclass(slots=True, eq=False)
class EtcdRequest:
    """One request of a session.

    Attributes:
        waiting: the waiting requests of its session.
        key: its key in the queue.
        timeout: its timeout in seconds, as in its value.
        limit: the limit of its semaphore, as last read.
        created: its create revision; 0 until it has joined.
        sent: whether a transaction that adds it may have been sent.
        drop: answers `enqueue`, and ends its operation; ``None`` once it was sent.
        gone: whether it has left its queue, or is leaving.
        left: whether etcd has confirmed that it has left its queue.
        near: whether it joined so near to the head that its queue is read without delay.
        may_have_left: whether a transaction that deletes it was not answered.
        early: the reason why it was removed before the answer to its own transaction.
        followers: requests of this engine that wait for it to leave.
        late: timer that removes an overdue request of another program before it.
    """

    waiting: QueueReader
    request_id: int
    name: Name
    key: bytes
    count: int
    data: bytes
    ephemeral: bool
    timeout: float | None
    limit: Limit = EPHEMERAL
    created: int = 0
    owns: bool = False
    sent: bool = False
    drop: Callable[[Enqueued], None] | None = None
    gone: bool = False
    left: bool = False
    marked: bool = False
    reading: bool = False
    read_again: bool = False
    near: bool = True
    may_have_left: bool = False
    early: bytes | None = None
    followers: list[EtcdRequest] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    late: asyncio.TimerHandle | None = None
    poll: asyncio.TimerHandle | None = None
    watch: EtcdWatch | None = None
    watched: frozenset[bytes] = frozenset()

    @property
    def data_key(self) -> bytes:
        """Key of its data."""
        return self.name.data_of(self.key)

    @property
    def decided(self) -> bool:
        """True if it owns, or has left its queue."""
        return self.gone or self.owns

    @property
    def large(self) -> bool:
        """True if its data is sent only once."""
        return len(self.data) > _LARGE

    @property
    def whole(self) -> bool:
        """True if its count is the limit."""
        return self.count == self.limit.tokens

    def check_condition(self, limit: KeyValue | None, queue: Sequence[Entry]) -> bool:
        """Return true if the semaphore is that of the last attempt; raise if it does not match.

        Requests of other sessions may have learned of a change since that attempt.
        """
        name, known = self.name, self.limit
        name.lasting = None if limit is None else limit_of(limit)
        if self.ephemeral:
            rules.check_kind(True, limit is None, name.path, name.name)
            return True
        if name.lasting is None:
            if queue:
                rules.check_kind(False, True, name.path, name.name)
            raise refusals.semaphore_not_found(name.path, name.name)
        self.limit = name.lasting
        return name.lasting == known

    def joining(
        self, session: AttachedSession, condition: bytes, at_once: bool, newest: int
    ) -> bytes:
        """Build the transaction that joins the queue.

        Args:
            session: the attachment of the request.
            condition: the comparison of the semaphore.
            at_once: whether its timeout is 0.
            newest: put it only if no request has joined since this revision; 0: only if the queue
                is empty.
        """
        name = self.name
        put_waiting = self._puts(session, self.timeout)
        get = wire.get(self.key)
        queue = name.newest_two if self.whole else name.queue
        compares = (session.mine, condition, wire.created_at(self.key, wire.ABSENT))
        wrong = (name.get_limit, get, name.first_request)
        if self.large and not at_once:
            fresh = (wire.nested(wire.txn((name.empty,), (name.drop_data,))),)
            then = (*put_waiting, *(fresh if self.ephemeral else ()), queue)
            return wire.txn(compares, then, (session.get, *wrong))
        # Without `newest`, the queue must be empty; with it, the queue had room, and none has
        # joined since.
        room = wire.created_before(name.requests, newest) if newest else name.empty
        then = self._puts(session, None)
        if self.ephemeral and not newest:
            then = (*then, name.drop_data)
        if at_once:
            there = name.first_request if self.whole else name.queue
            return wire.txn(
                (session.mine, condition, room), then, (session.get, name.get_limit, get, there)
            )
        inner = wire.nested(wire.txn(compares, (*put_waiting, queue), wrong))
        return wire.txn((session.mine, condition, room), then, (session.get, inner))

    def _puts(self, session: AttachedSession, timeout: float | None) -> tuple[bytes, ...]:
        put = wire.put(self.key, request_value(self.count, timeout=timeout), session.id)
        return (put, wire.put(self.data_key, self.data, session.id)) if self.data else (put,)

    def reading_before(self, session: AttachedSession) -> bytes:
        """Build the read of the queue before it; of its predecessor if its count is the limit.

        A limit that may change is read, too.
        """
        name, whole = self.name, self.whole
        before = wire.get(
            *(name.requests, wire.after(name.requests)),
            limit=1 if whole else 0,
            created_until=self.created - whole,
            newest_first=whole,
            oldest_first=not whole,
        )
        note = wire.get(session.key + b"/h/%x" % self.request_id)
        there = wire.created_at(self.key, self.created)
        then = (before,) if self.ephemeral else (before, name.get_limit)
        return wire.txn((session.mine, there), then, (session.get, note))

    def changing(self, session: AttachedSession, count: int, data: bytes | None) -> bytes:
        """Build the transaction that changes a request; ``None`` does not change the data."""
        value = request_value(count, marked=self.marked, timeout=self.timeout)
        then = [wire.put(self.key, value, session.id)]
        if data:
            then.append(wire.put(self.data_key, data, session.id))
        elif data is not None:
            then.append(wire.delete(self.data_key))
        there = wire.created_at(self.key, self.created)
        return wire.txn((session.mine, there), tuple(then), (session.get,))

    def handing_over(self, session: AttachedSession) -> bytes:
        """Build the transaction that deletes a request, and reads the first one after it.

        The limit of the first one is read before it.
        """
        name = self.name
        then = (wire.delete(self.key), wire.delete(self.data_key), name.get_limit, name.head)
        return wire.txn((session.mine,), then, (session.get,))

    def leaving_too_large(self, session: AttachedSession) -> bytes:
        """Build the transaction that deletes a waiter which is too large for the limit."""
        there = wire.created_at(self.key, self.created)
        same = wire.modified_at(self.name.limit, self.limit.modified)
        then = (wire.delete(self.key), wire.delete(self.data_key))
        return wire.txn((session.mine, there, same), then, (session.get,))

    def may_relieve(self, leaving: EtcdRequest) -> bool:
        """Return true if a request may join in the transaction that removes another one."""
        return (
            leaving.owns
            and leaving.created > 0
            and leaving.ephemeral
            and self.ephemeral
            and leaving.count == self.count == EPHEMERAL_LIMIT
            and not self.large
        )

    def relieving(self, session: AttachedSession, leaving: EtcdRequest) -> bytes:
        """Build the transaction that joins behind an owner of the limit, and deletes that owner.

        Between these it reads the end of the queue, and afterwards the first request.
        """
        name = self.name
        absent = wire.created_at(self.key, wire.ABSENT)
        there = wire.created_at(leaving.key, leaving.created)
        deletes = (wire.delete(leaving.key), wire.delete(leaving.data_key))
        return wire.txn(
            (session.mine, name.absent, absent, there),
            (*self._puts(session, self.timeout), name.newest_two, *deletes, name.head),
            (session.get, wire.get(self.key)),
        )

    def deleting(self, session: AttachedSession) -> bytes:
        """Build the transaction that deletes the request."""
        data = (wire.delete(self.data_key),) if self.data else ()
        return wire.txn((session.mine,), (wire.delete(self.key), *data), (session.get,))
