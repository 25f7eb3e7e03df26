"""Counts of the semaphores that a server's clients use, and of the requests for each."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from tenure.engines.contract import Engine
from tenure.errors import NodeNotFound
from tenure.server.auth.accounts import Account
from tenure.server.auth.guard import REFUSALS, Guard
from tenure.server.limits import Count, LimitReached, Limits
from tenure.server.reads import Reader, ReadSchedule, pages_of_semaphores

_RECOUNT_AFTER = 10.0  # minimum seconds between two counts of the store's semaphores


class _Queue:
    __slots__ = ("account", "ephemeral", "length")

    def __init__(self, ephemeral: bool, account: Account | None) -> None:
        self.ephemeral = ephemeral
        self.account = account  # the account of an ephemeral semaphore
        self.length = 0


class SemaphoreCounts:
    """Semaphores known to this server, and the number of its sessions' requests for each.

    An ephemeral semaphore counts while a session of this server has a request for it; a lasting one
    since it was created here or counted in the store. Before a semaphore is rejected the store is
    counted again, at most every ten seconds, because other programs may have deleted some.

    A semaphore counts for the account whose client created it or sent the first request for it.
    Each of several identities gets its reserved share (`tenure.server.auth.accounts`), even when
    the limit is reached.

    The first count, before a client is admitted, also reports the existing nodes and data to the
    guard.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        reads: ReadSchedule | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._reader = Reader(reads or ReadSchedule(), "this server")
        self._changes: dict[tuple[str, str], bool] = {}  # created since a count began
        self._most = limits.semaphores
        self._queue_length = limits.queue_length
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._ephemeral = 0
        self._lasting: dict[tuple[str, str], Account | None] = {}
        self._creating: Counter[tuple[str, str]] = Counter()  # attempts in progress
        self._unproven: set[tuple[str, str]] = set()  # of these: counted, and may not exist
        self._counted_at: float | None = None

    @property
    def taken(self) -> int:
        """Number of semaphores, as far as this server knows."""
        return self._ephemeral + len(self._lasting)

    async def count_once(self) -> None:
        """Count the lasting semaphores in the store, if they have not been counted yet."""
        if self._counted_at is None:
            await self.count()

    async def count(self) -> None:
        """Count the lasting semaphores in the store. Errors of the engine propagate."""
        first = self._counted_at is None and self._guard is not None
        self._counted_at = self._engine.clock.now()
        async with self._reader.lock:
            self._changes.clear()
            found: set[tuple[str, str]] = set()
            for node in await self._engine.list_nodes():
                with contextlib.suppress(NodeNotFound):  # dropped meanwhile
                    found.update([(node, name) async for name in self._lasting_on(node, first)])
            for each, created in self._changes.items():
                if created:
                    found.add(each)
                else:
                    found.discard(each)
            for each in set(self._lasting) - found - set(self._creating):
                self._forget(each)
            self._lasting.update((each, None) for each in found - set(self._lasting))

    async def _lasting_on(self, node: str, first: bool) -> AsyncIterator[str]:
        """Yield the names of a node's lasting semaphores.

        Args:
            node: the path of the node.
            first: whether the guard counts the node and the data.
        """
        guard = self._guard if first else None
        if guard is not None:
            guard.found_node(node)
        async with aclosing(pages_of_semaphores(self._engine, node, self._reader)) as pages:
            async for page in pages:
                for each in page:
                    if not each.ephemeral:
                        if guard is not None:
                            guard.found(node, each)
                        yield each.name

    @asynccontextmanager
    async def creating(
        self, node: str, name: str, account: Account | None = None
    ) -> AsyncIterator[None]:
        """Count a lasting semaphore that the body creates.

        It counts before the operation is sent, until the store rejects it. If the body is
        cancelled, or its error leaves the outcome open, the semaphore may exist: it counts until
        the store is counted again.

        Raises:
            LimitReached: the limit is reached, and this semaphore does not exist.
        """
        key = node, name
        if key not in self._lasting:
            await self._make_room(node, name, account)
        if key not in self._lasting:
            self._count(key, account)
            self._unproven.add(key)
        self._creating[key] += 1
        try:
            yield
        except REFUSALS:
            raise
        except BaseException:
            self._prove(key, account)
            raise
        else:
            self._prove(key, account)
        finally:
            self._creating[key] -= 1
            if not self._creating[key]:
                del self._creating[key]
                if key in self._unproven:
                    self._unproven.remove(key)
                    self._forget(key)

    async def _make_room(self, node: str, name: str, account: Account | None) -> None:
        """Check that another one is allowed; before it is rejected, count the store again."""
        try:
            self._check(node, name, account)
        except LimitReached:
            counted_at = self._counted_at
            if counted_at is None or self._engine.clock.now() >= counted_at + _RECOUNT_AFTER:
                await self.count()
            if (node, name) not in self._lasting:
                self._check(node, name, account)

    def _prove(self, key: tuple[str, str], account: Account | None) -> None:
        """Count a lasting semaphore that exists, or may exist."""
        self._unproven.discard(key)
        self._count(key, account)
        if self._reader.lock.locked():
            self._changes[key] = True

    def _count(self, key: tuple[str, str], account: Account | None) -> None:
        if key not in self._lasting:
            self._lasting[key] = account
            if account is not None:
                account.semaphores.take_anyway()

    def deleted(self, node: str, name: str) -> None:
        """Stop counting a lasting semaphore that has been deleted."""
        self._forget((node, name))
        if self._reader.lock.locked():
            self._changes[node, name] = False

    def add_request(
        self, node: str, name: str, *, ephemeral: bool, account: Account | None = None
    ) -> None:
        """Count a request that a session is about to send for this semaphore.

        Raises:
            LimitReached: the limit of the queue or of semaphores is reached.
        """
        queue = self._queues.get((node, name))
        if queue is None:
            if ephemeral:
                self._check(node, name, account)
            self.add_existing_request(node, name, ephemeral=ephemeral, account=account)
            return
        if queue.length >= self._queue_length:
            raise LimitReached(
                f"{name!r} on {node} has as many requests through this server as its limit "
                f"queue_length = {self._queue_length} allows; try again later",
                "queue_length",
                node=node,
                name=name,
            )
        queue.length += 1

    def add_existing_request(
        self, node: str, name: str, *, ephemeral: bool, account: Account | None = None
    ) -> None:
        """Count a request for this semaphore that a session already has."""
        queue = self._queues.get((node, name))
        if queue is None:
            self._queues[node, name] = queue = _Queue(ephemeral, account)
            self._ephemeral += ephemeral
            if ephemeral and account is not None:
                account.semaphores.take_anyway()
        queue.length += 1

    def remove_request(self, node: str, name: str) -> None:
        """Stop counting a request that was counted by `add_request` or `add_existing_request`."""
        queue = self._queues[node, name]
        queue.length -= 1
        if not queue.length:
            del self._queues[node, name]
            self._ephemeral -= queue.ephemeral
            if queue.ephemeral and queue.account is not None:
                queue.account.semaphores.release()

    def _check(self, node: str, name: str, account: Account | None) -> None:
        """Raise `LimitReached` if this account may not have another one."""
        if (account is None or account.semaphores.alone) and self.taken >= self._most:
            raise self._reached(node, name)
        if account is not None:
            account.semaphores.check(node=node, name=name)

    def _forget(self, key: tuple[str, str]) -> None:
        account = self._lasting.pop(key, None)
        if account is not None:
            account.semaphores.release()

    def _reached(self, node: str, name: str) -> LimitReached:
        return Count("semaphores", self._most).reached(node=node, name=name)
