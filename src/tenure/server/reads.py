"""Schedule of costly reads: lists, descriptions with owners and waiters, statistics.

The cost of such a read grows with the size of the store, and a request of a few bytes causes it. So
each read is carried out in *slices* of a few milliseconds, which are scheduled:

* **One at a time.** A connection carries out one costly read at a time (`Reader.lock`), and a
  client one slice at a time, on all its connections. A client is an identity, or a source if
  connections have none (`reader_of`).
* **Round robin.** Clients take turns, and the connections of a client take turns.
* **Half of the time.** At most one slice begins in an iteration of the event loop, and the next one
  after a pause as long as that iteration. The rest of the time is for other work.
* **Cancelled** reads leave the queue.

A slice may wait for the store; meanwhile slices of other clients run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import TypeAlias, TypeVar

from tenure.engines.contract import Engine
from tenure.errors import AuthenticationFailed, NodeNotFound, SessionExpired
from tenure.model import SemaphoreDescription, SessionDescription
from tenure.server.admission import Source
from tenure.server.auth.accounts import Account
from tenure.server.auth.guard import REFUSALS, Guard
from tenure.server.auth.identity import Identity
from tenure.server.limits import Count, LimitReached, Limits

_RECOUNT_AFTER = 10.0  # minimum seconds between two counts of the store's semaphores


class _Queue:
    __slots__ = ("account", "ephemeral", "length")

    def __init__(self, ephemeral: bool, account: Account | None) -> None:
        self.ephemeral = ephemeral
        self.account = account  # the account of an ephemeral semaphore
        self.length = 0


class Semaphores:
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
        reads: Reads | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._reader = Reader(reads or Reads(), "this server")
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

    def join(
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
        """Count a request for this semaphore that a session already has."""
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


T = TypeVar("T")
U = TypeVar("U")

SLICE = 200
"""Sessions, semaphores or requests in a slice: about two milliseconds on a slow machine."""

PRICE = 16
"""Number of pending operations that a costly read counts for."""

_ATTACHING = 32  # sessions that a connection attaches before others take turns
_BEGINNING = 16  # sessions that a server begins at a time, on all connections
_LOOKING_UP = 8  # sessions that a server looks up at a time, on all connections
_GUESSING = object()  # the place of all connections of a client that were refused a session
_LONGEST_PAUSE = 0.05  # seconds; a loop that was stopped for long does not stop reads as long

_Waiting: TypeAlias = "OrderedDict[object, deque[asyncio.Future[None]]]"  # by their connections


class Reads:
    """Schedule of one server's costly reads.

    Attributes:
        beginning: limits the sessions that are being opened (`Reader.beginning`).
        looking_up: limits the sessions that are being looked up (`Reader.looking_up`).
    """

    def __init__(self) -> None:
        self.beginning = asyncio.Semaphore(_BEGINNING)
        self.looking_up = asyncio.Semaphore(_LOOKING_UP)
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._busy: dict[Hashable, _Waiting] = {}  # clients with a slice in progress
        self._free_at = 0.0
        self._granting: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting slices."""
        lines = [*self._waiting.values(), *self._busy.values()]
        turns = [turn for line in lines for each in line.values() for turn in each]
        return sum(not turn.done() for turn in turns)

    async def begin(self, client: Hashable, connection: object) -> None:
        """Return when a slice may begin; the caller then calls `end`."""
        loop = asyncio.get_running_loop()
        if not self._waiting and client not in self._busy and loop.time() >= self._free_at:
            self._take(client, OrderedDict(), loop)
            return
        turn = loop.create_future()
        line = self._busy.get(client)
        if line is None:
            line = self._waiting.setdefault(client, OrderedDict())
        line.setdefault(connection, deque()).append(turn)
        self._grant_soon(loop)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(client)
            raise

    def end(self, client: Hashable) -> None:
        """End a slice of this client, and schedule its next one."""
        line = self._busy.pop(client)
        if line:
            self._waiting[client] = line
            self._grant_soon(asyncio.get_running_loop())

    def _take(self, client: Hashable, line: _Waiting, loop: asyncio.AbstractEventLoop) -> None:
        self._busy[client] = line
        begun = loop.time()
        self._free_at = begun + _LONGEST_PAUSE  # until the duration of this iteration is known
        loop.call_soon(self._measure, begun, loop)

    def _measure(self, begun: float, loop: asyncio.AbstractEventLoop) -> None:
        """Measure the loop iteration in which a slice began, and pause for as long."""
        now = loop.time()
        self._free_at = now + min(now - begun, _LONGEST_PAUSE)
        if self._granting is not None:
            self._granting.cancel()
            self._granting = None
        self._grant_soon(loop)

    def _grant_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._granting is None and self._waiting:
            self._granting = loop.call_at(max(self._free_at, loop.time()), self._grant, loop)

    def _grant(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the next slice."""
        self._granting = None
        while self._waiting:
            client, line = self._waiting.popitem(last=False)
            turn = _next(line)
            if turn is None:
                continue  # all were cancelled
            turn.set_result(None)
            self._take(client, line, loop)
            return


def _next(line: _Waiting) -> asyncio.Future[None] | None:
    """Take the next slice of a client; its connection moves behind the others."""
    while line:
        connection, turns = line.popitem(last=False)
        turn = turns.popleft()
        if turns:
            line[connection] = turns
        if not turn.done():
            return turn
    return None


class Reader:
    """The costly reads of one connection: ``async with reader.lock``, then ``async with reader``.

    The lock is for a whole read, and the reader for each of its slices.

    Args:
        reads: the server's.
        client: the client of the connection (`reader_of`).

    Attributes:
        lock: held during a read.
    """

    __slots__ = ("_attaching", "_beginning", "_client", "_reads", "_refused", "lock")

    def __init__(self, reads: Reads, client: Hashable) -> None:
        """Read in the turns of `client`."""
        self.lock = asyncio.Lock()
        self._reads = reads
        self._client = client
        self._attaching = 0
        self._beginning = asyncio.Semaphore(_ATTACHING)
        self._refused = False

    @asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """Open a session: few at a time on each connection, and on all of them."""
        async with self._beginning, self._reads.beginning:
            yield

    @asynccontextmanager
    async def attaching(self) -> AsyncIterator[None]:
        """Attach an existing session: at once if few are being attached and none was rejected.

        Otherwise it takes a turn, because a connection may guess ids and keys without end.
        """
        if self._refused:
            async with self._guess():
                pass  # the rest of this step counts for this turn
        elif self._attaching >= _ATTACHING:
            async with self:
                pass
        self._attaching += 1
        try:
            yield
        except (AuthenticationFailed, SessionExpired):
            self.refused()
            raise
        finally:
            self._attaching -= 1

    @asynccontextmanager
    async def looking_up(self) -> AsyncIterator[None]:
        """Look up a session of the store, which may exist: few at a time on all connections.

        The store may process look-ups one after the other, ahead of the operations of other
        clients. A client whose attach was rejected looks up one session at a time, in its turns.
        """
        async with self._guess() if self._refused else self._reads.looking_up:
            yield

    @asynccontextmanager
    async def _guess(self) -> AsyncIterator[None]:
        """Take a turn, shared by all connections of the client with a rejected attach."""
        await self._reads.begin(self._client, _GUESSING)
        try:
            yield
        finally:
            self._reads.end(self._client)

    def refused(self) -> None:
        """Record that a session could not be attached."""
        self._refused = True

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        await self._reads.begin(self._client, self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the turn."""
        self._reads.end(self._client)


def reader_of(reads: Reads, identity: Identity, source: Source) -> Reader:
    """Return the reader of a connection with this identity and this source."""
    anonymous = identity.kind in {"anonymous", "uid"}
    return Reader(reads, source if anonymous else identity)


async def session_by_id(engine: Engine, node: str, number: int) -> SessionDescription | None:
    """Return a session of the store, without listing all sessions if possible.

    Raises errors of the store.
    """
    if not 0 < number < 1 << 63:
        return None  # no store has such an id
    pages = engine.pages()
    if pages is None:
        found = await engine.list_sessions(node)
    else:
        found = await pages.sessions(node, after=number - 1, most=1)
    return next((each for each in found if each.id == number), None)


async def pages_of_sessions(
    engine: Engine, node: str, reader: Reader
) -> AsyncGenerator[Sequence[SessionDescription], None]:
    """Yield a node's sessions, each page read in a slice.

    Raises errors of the store.
    """
    pages, after = engine.pages(), 0
    if pages is None:
        async with reader:
            found = await engine.list_sessions(node)
        async for part in _parts(found, reader):
            yield part
        return
    while True:
        async with reader:
            page = await pages.sessions(node, after=after, most=SLICE)
        yield page
        if len(page) < SLICE:
            return
        after = page[-1].id


async def pages_of_semaphores(
    engine: Engine, node: str, reader: Reader, *, owners: bool = False, waiters: bool = False
) -> AsyncGenerator[Sequence[SemaphoreDescription], None]:
    """Yield a node's semaphores, each page read in a slice.

    A page has fewer semaphores than sessions, because a store with tables needs several queries for
    each. Raises errors of the store.
    """
    pages, after = engine.pages(), ""
    if pages is None:
        async with reader:
            found = await engine.list_semaphores(node, owners=owners, waiters=waiters)
        async for part in _parts(found, reader):
            yield part
        return
    while True:
        async with reader:
            page = await pages.semaphores(
                node, owners=owners, waiters=waiters, after=after, most=SLICE // 4
            )
        if not page:
            return
        yield page
        after = page[-1].name


async def _parts(found: Sequence[T], reader: Reader) -> AsyncGenerator[Sequence[T], None]:
    """Yield a list in parts, with a turn before each but the first."""
    for start in range(0, len(found), SLICE):
        if start:
            async with reader:
                pass  # the caller processes the part in this step
        yield found[start : start + SLICE]


async def converted(reader: Reader, found: Sequence[T], convert: Callable[[T], U]) -> list[U]:
    """Convert the items of a long sequence, in slices."""
    if len(found) <= SLICE:
        return list(map(convert, found))
    done: list[U] = []
    for start in range(0, len(found), SLICE):
        async with reader:
            done += map(convert, found[start : start + SLICE])
    return done
