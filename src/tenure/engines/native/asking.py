"""Operations of a session as messages, and the checks of their arguments.

What could not be put into a message is refused here, with the error that every engine has for it;
everything else is the server's to judge. A message has plain values, whatever they derive from.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from msgspec import Struct

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Withdrawn
from tenure.engines.native.calls import Call
from tenure.engines.native.connection import Connection
from tenure.engines.native.link import Link
from tenure.engines.native.operations import Operations
from tenure.engines.native.reconcile import OWNED
from tenure.engines.native.watches import Watches
from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound, SessionExpired
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire import messages as wire

__all__ = ["Asking", "plain_name", "plain_path"]

_SMALLEST = -(2**63)


def plain_name(name: str, node: str) -> str:
    """A semaphore's name."""
    rules.check_name(name, node)
    return name if type(name) is str else str.__str__(name)


def plain_path(path: str) -> str:
    """A node's path."""
    rules.check_path(path)
    return path if type(path) is str else str.__str__(path)


def plain_data(data: bytes, node: str, name: str | None = None) -> bytes:
    """A semaphore's data, or a request's."""
    if type(data) is bytes and len(data) <= rules.DATA_BYTES:
        return data
    rules.check_data(data, node, name)
    return bytes(data)


def plain_timeout(timeout: float | None, node: str, name: str | None = None) -> float | None:
    """Return the seconds to wait."""
    if timeout is None:
        return None
    rules.check_timeout(timeout, node, name)
    return float(timeout)


def plain_count(count: int, what: str, node: str, name: str | None = None) -> int:
    """A count or a limit; whether it is too much or too little the server knows."""
    if type(count) is int and 0 <= count <= EPHEMERAL_LIMIT:
        return count
    if not isinstance(count, int) or not _SMALLEST <= count <= EPHEMERAL_LIMIT:
        raise InvalidArgument(
            f"a {what} is a whole number from 1 to 2^64-1, not {count!r}", node=node, name=name
        )
    return int(count)


class Asking(ABC):
    """The operations of the contract, for the session that derives from it and owns all this.

    Attributes:
        node: the path of its node.
        channel: where it is on every connection.
    """

    node: str
    channel: int
    _over: bool
    _leaving: asyncio.Future[object] | None
    _link: Link
    _now: Callable[[], float]
    _connection: Connection | None
    _operations: Operations
    _watches: Watches

    @abstractmethod
    def _expired(self) -> SessionExpired:
        """Return the error of a session that is over."""

    def _check(self) -> None:
        if self._over or self._leaving is not None:
            raise self._expired()

    def _ask(self, kind: Callable[..., Struct], *facts: object) -> Call:
        rid = self._link.next_rid()
        return self._operations.ask(rid, kind(rid, self.channel, *facts))

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self._check()
        name = plain_name(name, self.node)
        limit = plain_count(limit, "limit", self.node, name)
        data = plain_data(data, self.node, name)
        call = self._ask(wire.CreateSemaphore, name, limit, data, bool(exist_ok))
        try:
            await call.future
        except SemaphoreExists:
            if not call.perhaps_done:
                raise
            found = await self.describe_semaphore(name, owners=False, waiters=False)
            if (found.limit, found.data, found.ephemeral) != (limit, data, False):
                raise

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self._check()
        name = plain_name(name, self.node)
        data = plain_data(data, self.node, name)
        await self._ask(wire.UpdateSemaphore, name, data).future

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self._check()
        name = plain_name(name, self.node)
        call = self._ask(wire.DeleteSemaphore, name, bool(force))
        try:
            await call.future
        except SemaphoreNotFound:
            if not call.perhaps_done:
                raise

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self._check()
        name = plain_name(name, self.node)
        call = self._ask(wire.DescribeSemaphore, name, bool(owners), bool(waiters))
        found: SemaphoreDescription = await call.future
        return found

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue; its answer comes through the connection."""
        if self._over or self._leaving is not None:
            raise self._expired()
        node = self.node
        timeout = plain_timeout(timeout, node, name)
        name = plain_name(name, node)
        data = plain_data(data, node, name)
        count = plain_count(count, "count", node, name)
        rid = self._link.next_rid()
        self._operations.holds[request_id] = inf  # it may be in the queue before the answer is here
        call = self._operations.ask(
            rid,
            wire.Enqueue(
                rid, self.channel, request_id, name, count, data, timeout, bool(ephemeral)
            ),
        )
        if timeout:
            call.until = self._now() + timeout
        return call.future

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self._check()
        node = self.node
        if data is not None:
            data = plain_data(data, node)
        if count is not None:
            count = plain_count(count, "count", node)
        if isinstance(timeout, Unchanged):
            return self._ask(wire.Alter, request_id, count, data).future
        timeout = plain_timeout(timeout, node)
        if self._operations.holds.get(request_id, OWNED) != OWNED:
            self._operations.holds[request_id] = inf if timeout is None else self._now() + timeout
        return self._ask(wire.Alter, request_id, count, data, True, timeout).future

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self._over or self._leaving is not None:
            raise self._expired()
        self._operations.holds.pop(request_id, None)
        rid = self._link.next_rid()
        return self._operations.ask(rid, wire.Withdraw(rid, self.channel, request_id)).future

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; returns the function that ends the watch."""
        self._check()
        name = plain_name(name, self.node)
        watches = self._watches
        number = watches.add(self._connection, name, changed, data=bool(data), owners=bool(owners))
        return lambda: watches.remove(self._connection, number)
