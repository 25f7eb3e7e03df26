"""State shared by the listeners of one server.

These are the store, the limits and the counts against them, authentication, and the log. Rules:

* One `Context` belongs to one server and to the event loop on which its engine was opened. All of
  it is used on that loop alone.
* What is taken from a count is given back once, on every way out.
* What a client sends is never logged, and no token either; its address and what was wrong are.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import NodeNotFound
from tenure.server.admission import Admission
from tenure.server.audit import Audit
from tenure.server.auth.accounts import Account
from tenure.server.auth.authenticator import Anybody
from tenure.server.auth.guard import Guard
from tenure.server.auth.identity import Identity
from tenure.server.auth.peer import UNKNOWN_PEER, Peer
from tenure.server.budget import LoopBudget
from tenure.server.limits import Count, LimitReached, Limits
from tenure.server.log import tell
from tenure.server.reads import Reader, Reads, pages_of_semaphores
from tenure.server.session_keys import SessionKeys

if TYPE_CHECKING:
    from tenure.server.hosting import Hosting

__all__ = ["Anybody", "Authenticator", "Context", "Counts", "Semaphores"]

_RECOUNT_AFTER = 10.0  # seconds between two countings of the store's semaphores, at the least


class Authenticator(Protocol):
    """Decision about the identity of a connection; see `tenure.server.auth`."""

    @property
    def required(self) -> bool:
        """True if a client has to show a token."""
        ...

    def authenticate(self, token: str, peer: Peer = UNKNOWN_PEER) -> Identity:
        """Return the identity of a client.

        Args:
            token: what the client shows; empty if it shows none.
            peer: what its transport shows.

        Raises:
            AuthenticationFailed: a token is required, and this is not a valid one.
        """
        ...


class _Queue:
    __slots__ = ("account", "ephemeral", "length")

    def __init__(self, ephemeral: bool, account: Account | None) -> None:
        self.ephemeral = ephemeral
        self.account = account  # that the semaphore counts for, if it is ephemeral
        self.length = 0


class Semaphores:
    """The semaphores that this server knows of, and how many requests its sessions have for each.

    An ephemeral semaphore counts while a session of this server has a request for it; a lasting
    one since it was created here or counted in the store. Before one is refused the store is
    counted anew, at most every ten seconds, for others may have deleted some.

    A semaphore counts for the account whose client created it or had the first request for it. An
    identity beside others gets its reserved share (`tenure.server.auth.accounts`) also when there
    are as many as may be.

    The first counting, before a client is let in, also tells the guard which nodes and which data
    were there before.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        reads: Reads | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._reader = Reader(reads or Reads(), "this server")
        self._changes: dict[tuple[str, str], bool] = {}  # since a counting began
        self._most = limits.semaphores
        self._queue_length = limits.queue_length
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._ephemeral = 0
        self._lasting: dict[tuple[str, str], Account | None] = {}
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
        """Count the lasting semaphores in the store. What the engine raises passes through."""
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
            for each in set(self._lasting) - found:
                self._forget(each)
            self._lasting.update((each, None) for each in found - set(self._lasting))

    async def _lasting_on(self, node: str, first: bool) -> AsyncIterator[str]:
        """Yield the names of a node's lasting semaphores.

        Args:
            first: the guard counts the node and the data.
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

    async def create(self, node: str, name: str, account: Account | None = None) -> None:
        """Check that a lasting semaphore may be created.

        Nothing is counted yet: `created` does that.

        Raises:
            LimitReached: there are as many as may be, and this is not one of them.
        """
        if (node, name) in self._lasting:
            return
        try:
            self._check(node, name, account)
        except LimitReached:
            counted_at = self._counted_at
            if counted_at is None or self._engine.clock.now() >= counted_at + _RECOUNT_AFTER:
                await self.count()
            if (node, name) not in self._lasting:
                self._check(node, name, account)

    def created(self, node: str, name: str, account: Account | None = None) -> None:
        """Count a lasting semaphore that has been created, or existed."""
        if (node, name) not in self._lasting:
            self._lasting[node, name] = account
            if account is not None:
                account.semaphores.take_anyway()
        if self._reader.lock.locked():
            self._changes[node, name] = True

    def deleted(self, node: str, name: str) -> None:
        """Stop counting a lasting semaphore that has been deleted."""
        self._forget((node, name))
        if self._reader.lock.locked():
            self._changes[node, name] = False

    def join(
        self, node: str, name: str, *, ephemeral: bool, account: Account | None = None
    ) -> None:
        """Count a request that a session is about to make for this semaphore.

        Raises:
            LimitReached: the queue is as long as may be, or the semaphore would be one too many.
        """
        queue = self._queues.get((node, name))
        if queue is None:
            if ephemeral:
                self._check(node, name, account)
            self.rejoin(node, name, ephemeral=ephemeral, account=account)
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

    def rejoin(
        self, node: str, name: str, *, ephemeral: bool, account: Account | None = None
    ) -> None:
        """Count a request for this semaphore that a session has already."""
        queue = self._queues.get((node, name))
        if queue is None:
            self._queues[node, name] = queue = _Queue(ephemeral, account)
            self._ephemeral += ephemeral
            if ephemeral and account is not None:
                account.semaphores.take_anyway()
        queue.length += 1

    def leave(self, node: str, name: str) -> None:
        """Stop counting a request that was counted by `join` or `rejoin`."""
        queue = self._queues[node, name]
        queue.length -= 1
        if not queue.length:
            del self._queues[node, name]
            self._ephemeral -= queue.ephemeral
            if queue.ephemeral and queue.account is not None:
                queue.account.semaphores.give_back()

    def of(self, account: Account) -> AccountSemaphores:
        """Return the object that counts the requests of one account's sessions."""
        return AccountSemaphores(self, account)

    def _check(self, node: str, name: str, account: Account | None) -> None:
        """Raises `LimitReached` if there must not be another one for this account."""
        if (account is None or account.semaphores.alone) and self.taken >= self._most:
            raise self._reached(node, name)
        if account is not None:
            account.semaphores.check(node=node, name=name)

    def _forget(self, key: tuple[str, str]) -> None:
        account = self._lasting.pop(key, None)
        if account is not None:
            account.semaphores.give_back()

    def _reached(self, node: str, name: str) -> LimitReached:
        return Count("semaphores", self._most).reached(node=node, name=name)


class AccountSemaphores:
    """`Semaphores.join`, `rejoin` and `leave` for one account."""

    def __init__(self, semaphores: Semaphores, account: Account) -> None:
        self._semaphores = semaphores
        self._account = account

    def join(self, node: str, name: str, *, ephemeral: bool) -> None:
        self._semaphores.join(node, name, ephemeral=ephemeral, account=self._account)

    def rejoin(self, node: str, name: str, *, ephemeral: bool) -> None:
        self._semaphores.rejoin(node, name, ephemeral=ephemeral, account=self._account)

    def leave(self, node: str, name: str) -> None:
        self._semaphores.leave(node, name)


class Counts:
    """Current counts over all listeners of a server."""

    def __init__(self, engine: Engine, limits: Limits, reads: Reads, guard: Guard) -> None:
        self.connections = Count("connections", limits.connections)
        self.greetings = Count("greetings", limits.greetings)
        self.sessions = Count("sessions", limits.sessions)
        self.semaphores = Semaphores(engine, limits, reads, guard)


class Context:
    """State that every listener gets.

    Args:
        engine: the store, opened; the server that opened it closes it, after the listeners.
        limits: what clients may make the server hold.
        authenticator: decides which clients may connect.
        logger: the logger of the server.
        arrived: called whenever something has arrived from a client.
        audit: the audit log; by default it is part of the log.

    Attributes:
        counts: what there is at the moment.
        admission: the connections by source.
        budget: shares the event loop among the connections.
        session_keys: keys of the sessions whose clients show none.
        reads: turns of costly reads.
        engine: the store, for what no client asks for.
        guard: the store as each identity may use it, for what clients ask for.
        hosting: the native protocol's sessions, while one of its listeners is open.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        authenticator: Authenticator,
        logger: logging.Logger,
        arrived: Callable[[], None] = lambda: None,
        audit: Audit | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.authenticator = authenticator
        self.logger = logger
        self.arrived = arrived
        self.audit = audit or Audit(logger)
        self.reads = Reads()
        self.guard = Guard(engine, limits)
        self.counts = Counts(engine, limits, self.reads, self.guard)
        self.admission = Admission(
            limits, self.counts.connections, self.counts.greetings, engine.clock
        )
        self.session_keys = SessionKeys(engine.url)
        now = engine.clock.now if engine.clock.virtual else time.perf_counter
        self.budget = LoopBudget(now, logger)
        self.hosting: Hosting | None = None

    @property
    def clock(self) -> Clock:
        """The engine's."""
        return self.engine.clock

    def log(self, level: int, event: str, **facts: object) -> None:
        """A line in the log; see `tenure.server.log.tell`."""
        tell(self.logger, level, event, **facts)
