"""Session of the native engine: the operations of the contract as messages.

Arguments that cannot be encoded are rejected here, with the same errors as on other engines; the
server checks everything else. A message has plain values, because subclasses cannot be encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from msgspec import Struct

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, Withdrawn
from tenure.engines.native.attachment import NativeAttachment
from tenure.engines.native.calls import NativeCall
from tenure.engines.native.reconcile import OWNED
from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound, Unsupported
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire import messages as wire

_SMALLEST = -(2**63)


def plain_name(name: str, node: str) -> str:
    """Return the name of a semaphore, as a plain string."""
    rules.check_name(name, node)
    return name if type(name) is str else str.__str__(name)


def plain_path(path: str) -> str:
    """Return the path of a node, as a plain string."""
    rules.check_path(path)
    return path if type(path) is str else str.__str__(path)


def plain_data(data: bytes, node: str, name: str | None = None) -> bytes:
    """Return data as plain bytes."""
    if type(data) is bytes and len(data) <= rules.DATA_BYTES:
        return data
    rules.check_data(data, node, name)
    return bytes(data)


def plain_timeout(timeout: float | None, node: str, name: str | None = None) -> float | None:
    """Return a timeout as a float."""
    if timeout is None:
        return None
    rules.check_timeout(timeout, node, name)
    return float(timeout)


def plain_count(count: int, what: str, node: str, name: str | None = None) -> int:
    """Return a count or a limit as a plain integer; the server checks its range."""
    if type(count) is int and 0 <= count <= EPHEMERAL_LIMIT:
        return count
    if not isinstance(count, int) or not _SMALLEST <= count <= EPHEMERAL_LIMIT:
        raise InvalidArgument(
            f"a {what} is a whole number from 1 to 2^64-1, not {count!r}", node=node, name=name
        )
    return int(count)


class NativeSession(NativeAttachment):
    """The `EngineSession` of a tenure server."""

    def _call(self, kind: Callable[..., Struct], *fields: object) -> NativeCall:
        rid = self._reconnector.next_rid()
        return self._operations.call(rid, kind(rid, self.channel, *fields))

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        name = plain_name(name, self.path)
        limit = plain_count(limit, "limit", self.path, name)
        data = plain_data(data, self.path, name)
        call = self._call(wire.CreateSemaphore, name, limit, data, bool(exist_ok))
        try:
            await call.future
        except SemaphoreExists:
            if not call.may_have_run:
                raise
            found = await self.describe_semaphore(name, owners=False, waiters=False)
            if (found.limit, found.data, found.ephemeral) != (limit, data, False):
                raise

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        name = plain_name(name, self.path)
        data = plain_data(data, self.path, name)
        await self._call(wire.UpdateSemaphore, name, data).future

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a semaphore."""
        self.check()
        name = plain_name(name, self.path)
        rules.check_new_limit(limit, self.path, name)
        if self._connection is not None and wire.RESIZE not in self._connection.welcome.features:
            raise Unsupported(
                f"the limit of semaphore {name!r} on {self.path} cannot be changed: the server is "
                "of an earlier version. Upgrade it",
                node=self.path,
                name=name,
            )
        await self._call(wire.ResizeSemaphore, name, int(limit)).future

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        name = plain_name(name, self.path)
        call = self._call(wire.DeleteSemaphore, name, bool(force))
        try:
            await call.future
        except SemaphoreNotFound:
            if not call.may_have_run:
                raise

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check()
        name = plain_name(name, self.path)
        call = self._call(wire.DescribeSemaphore, name, bool(owners), bool(waiters))
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
        if self.over or self.closing:
            self.check()
        node = self.path
        timeout = plain_timeout(timeout, node, name)
        name = plain_name(name, node)
        data = plain_data(data, node, name)
        count = plain_count(count, "count", node, name)
        rid = self._reconnector.next_rid()
        self._operations.requests[request_id] = inf  # until the answer
        call = self._operations.call(
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
        self.check()
        node = self.path
        if data is not None:
            data = plain_data(data, node)
        if count is not None:
            count = plain_count(count, "count", node)
        if isinstance(timeout, Unchanged):
            return self._call(wire.Alter, request_id, count, data).future
        timeout = plain_timeout(timeout, node)
        if self._operations.requests.get(request_id, OWNED) != OWNED:
            until = inf if timeout is None else self._now() + timeout
            self._operations.requests[request_id] = until
        return self._call(wire.Alter, request_id, count, data, True, timeout).future

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over or self.closing:
            self.check()
        if self._operations.withdraw_unsent(request_id):
            return Withdrawn.LEFT
        self._operations.requests.pop(request_id, None)
        rid = self._reconnector.next_rid()
        return self._operations.call(rid, wire.Withdraw(rid, self.channel, request_id)).future

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
        self.check()
        name = plain_name(name, self.path)
        watches = self._watches
        number = watches.add(self._connection, name, changed, data=bool(data), owners=bool(owners))
        return lambda: watches.remove(self._connection, number)
