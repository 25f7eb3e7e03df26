"""Schedule of costly reads: lists, descriptions with owners and waiters, statistics.

The cost of such a read grows with the size of the store, and a request of a few bytes causes it. So
each read is carried out in *slices* of a few milliseconds, which are scheduled:

* **One at a time.** A client carries out one slice at a time, on all its connections, and a
  connection one list at a time (`Reader.lock`). A client is an identity, or a source if connections
  have none (`reader_of`).
* **Descriptions side by side.** Each description that fits in one slice allows its client one more
  slice at a time, up to eight; any other slice takes that back. Such a read costs little here, but
  a remote store takes milliseconds for it.
* **Round robin.** Clients take turns, and the connections of a client take turns: for slices, and
  for the places of sessions that are opened or looked up (`Places`).
* **Half of the time.** At most one slice begins in an iteration of the event loop, and the next one
  after a pause as long as that iteration. The rest of the time is for other work.
* **Brief descriptions.** A client whose latest read was a description of few requests does not wait
  for other work, up to eight reads in an iteration. `ydb` needs a description for each grant, and
  it costs as little as an operation. A client that alternates brief and long ones has every second
  slice without a wait.
* **Cancelled** reads leave the queue.

A slice may wait for the store; meanwhile slices of other clients run.

**Descriptions** omit the server process (`without_server`). In the store, the sessions of a
server's clients have the server's pid and host. These would mislead a reader, who might even kill
the server as an owner.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias, TypeVar
from weakref import WeakValueDictionary

from tenure.engines.contract import Engine, Pages
from tenure.errors import AuthenticationFailed, SessionExpired, TenureError
from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.admission import Source
from tenure.server.auth.identity import Identity

T = TypeVar("T")
U = TypeVar("U")
D = TypeVar("D", RequestDescription, SessionDescription)

SLICE = 200
"""Sessions, semaphores or requests in a slice: about two milliseconds on a slow machine."""

BRIEF = 16
"""Largest number of requests of a brief description."""

_SESSIONS = 32  # sessions that a connection attaches or opens before others take turns
_OPENINGS = 64  # sessions that a server opens at a time, on all connections
_LOOK_UPS = 64  # sessions that a server looks up at a time, on all connections
_GUESSING = object()  # the place of all connections of a client that were refused a session
_LONGEST_PAUSE = 0.05  # seconds; a loop that was stopped for long does not stop reads as long

_SIDE_BY_SIDE = 8  # slices of a client that reads small descriptions

_Turns: TypeAlias = "OrderedDict[object, deque[asyncio.Future[None]]]"
"""Waiting turns of one client, by its connections."""


def without_server(described: D) -> D:
    """Return a description without the pid and the host, if they are those of this process."""
    if described.pid != os.getpid():
        return described
    return replace(described, pid=None, host=None)


class ReadingClient:
    """State of a client that reads; its readers share it, and keep it alive.

    Attributes:
        slices: those that wait.
        running: number of slices in progress.
        most: largest number of slices in progress.
        brief: whether its latest read was a brief description; the next does not wait then.
        whole: held while an answer is made that is not counted before it is complete.
    """

    __slots__ = ("__weakref__", "brief", "most", "running", "slices", "whole")

    def __init__(self) -> None:
        self.slices: _Turns = OrderedDict()
        self.running = 0
        self.most = 1
        self.brief = False
        self.whole = asyncio.Lock()

    @property
    def has_room(self) -> bool:
        """True if another slice may begin."""
        return self.running < self.most


class Places:
    """A number of places, granted to clients in turn, and to the connections of a client in turn.

    Args:
        number: how many there are.
    """

    __slots__ = ("_clients", "_free")

    def __init__(self, number: int) -> None:
        self._free = number
        self._clients: OrderedDict[Hashable, _Turns] = OrderedDict()  # those that wait

    @asynccontextmanager
    async def taken(self, client: Hashable, connection: object) -> AsyncIterator[None]:
        """Take a place, when there is one for this connection."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(client, connection)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, client: Hashable, connection: object) -> None:
        turn = asyncio.get_running_loop().create_future()
        turns = self._clients.setdefault(client, OrderedDict())
        turns.setdefault(connection, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        """Pass a place to the next client that waits."""
        while self._clients:
            client, turns = self._clients.popitem(last=False)
            turn = _next(turns)
            if turns:
                self._clients[client] = turns  # behind the others
            if turn is not None:
                turn.set_result(None)
                return
        self._free += 1


class ReadSchedule:
    """Schedule of one server's costly reads.

    Attributes:
        openings: limits the sessions that are being opened (`Reader.opening_session`).
        look_ups: limits the sessions that are being looked up (`Reader.looking_up_session`).
    """

    def __init__(self) -> None:
        self.openings = Places(_OPENINGS)
        self.look_ups = Places(_LOOK_UPS)
        self._clients = WeakValueDictionary[Hashable, ReadingClient]()
        self._ready: OrderedDict[ReadingClient, None] = OrderedDict()  # those whose turn comes
        self._free_at = 0.0
        self._granting: asyncio.Handle | None = None

    def client(self, client: Hashable) -> ReadingClient:
        """Return the state of this client, for a reader."""
        return self._clients.setdefault(client, ReadingClient())

    @property
    def waiting(self) -> int:
        """Number of waiting slices."""
        turns = [
            turn
            for client in self._clients.values()
            for each in client.slices.values()
            for turn in each
        ]
        return sum(not turn.done() for turn in turns)

    async def begin_slice(self, client: ReadingClient, connection: object) -> None:
        """Return when a slice may begin; the caller then calls `end_slice`."""
        loop = asyncio.get_running_loop()
        free = client.brief or (not self._ready and loop.time() >= self._free_at)
        if free and client.has_room and not client.slices:
            self._begin(client, loop)
            return
        turn = loop.create_future()
        client.slices.setdefault(connection, deque()).append(turn)
        self._queue(client)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end_slice(client)
            raise

    def end_slice(self, client: ReadingClient, described: int = SLICE + 1) -> None:
        """End a slice of this client, and schedule its next one.

        Args:
            client: the client.
            described: number of requests that it described; many for a slice of another read.
        """
        client.most = min(client.most + 1, _SIDE_BY_SIDE) if described <= SLICE else 1
        client.brief = described <= BRIEF
        if client.brief:  # a store in memory answers at once: a few for each iteration of the loop
            asyncio.get_running_loop().call_soon(self._leave, client)
        else:
            self._leave(client)

    def _leave(self, client: ReadingClient) -> None:
        client.running -= 1
        self._queue(client)

    def _queue(self, client: ReadingClient) -> None:
        """Begin waiting slices of a client, or put it behind the others, unless it is there."""
        loop = asyncio.get_running_loop()
        while client.brief and client.slices and client.has_room:
            self._begin_waiting(client, loop)
        if client.slices and client.has_room:
            self._ready.setdefault(client)
            self._grant_soon(loop)

    def _begin(self, client: ReadingClient, loop: asyncio.AbstractEventLoop) -> None:
        client.running += 1
        if not client.brief:
            begun = loop.time()
            self._free_at = begun + _LONGEST_PAUSE  # until this iteration's duration is known
            loop.call_soon(self._measure, begun, loop)

    def _begin_waiting(self, client: ReadingClient, loop: asyncio.AbstractEventLoop) -> bool:
        """Begin the next slice of a client; false if all were cancelled."""
        turn = _next(client.slices)
        if turn is None:
            return False
        turn.set_result(None)
        self._begin(client, loop)
        return True

    def _measure(self, begun: float, loop: asyncio.AbstractEventLoop) -> None:
        """Measure the loop iteration in which a slice began, and pause for as long."""
        now = loop.time()
        self._free_at = now + min(now - begun, _LONGEST_PAUSE)
        if self._granting is not None:
            self._granting.cancel()
            self._granting = None
        self._grant_soon(loop)

    def _grant_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._granting is None and self._ready:
            self._granting = loop.call_at(max(self._free_at, loop.time()), self._grant, loop)

    def _grant(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the next slice."""
        self._granting = None
        while self._ready:
            client, _ = self._ready.popitem(last=False)
            # Without room, `end_slice` puts it back.
            if client.has_room and self._begin_waiting(client, loop):
                self._queue(client)
                return


def _next(waiting: _Turns) -> asyncio.Future[None] | None:
    """Take the next turn of a client; its connection moves behind the others."""
    while waiting:
        connection, turns = waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            waiting[connection] = turns
        if not turn.done():
            return turn
    return None


class Reader:
    """The costly reads of one connection, and how it opens and attaches sessions.

    A list holds `lock`, and takes a `turn` for each of its slices.

    Args:
        reads: the server's.
        client: the client of the connection (`reader_of`).

    Attributes:
        lock: held during a list, and while a long description is sent.
    """

    __slots__ = ("_attaching", "_client", "_key", "_openings", "_reads", "_rejected", "lock")

    def __init__(self, reads: ReadSchedule, client: Hashable) -> None:
        """Read in the turns of `client`."""
        self.lock = asyncio.Lock()
        self._reads = reads
        self._client = reads.client(client)
        self._key = client
        self._attaching = 0
        self._openings = asyncio.Semaphore(_SESSIONS)
        self._rejected = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Carry out one slice, when it is the connection's turn."""
        await self._reads.begin_slice(self._client, self)
        try:
            yield
        finally:
            self._reads.end_slice(self._client)

    async def describe(
        self, read: Callable[[], Awaitable[SemaphoreDescription]]
    ) -> SemaphoreDescription:
        """Read one semaphore with its owners and waiters, when it is the connection's turn."""
        await self._reads.begin_slice(self._client, self)
        described = SLICE + 1  # if it is cancelled
        try:
            found = await read()
            described = len(found.owners) + len(found.waiters)
        except TenureError:
            described = 0  # there is no such semaphore, for example
            raise
        finally:
            self._reads.end_slice(self._client, described)
        return found

    @asynccontextmanager
    async def whole_answer(self) -> AsyncIterator[None]:
        """Make an answer that is in memory as a whole: one at a time for each client."""
        async with self.lock, self._client.whole:
            yield

    @asynccontextmanager
    async def opening_session(self) -> AsyncIterator[None]:
        """Open a session: few at a time on each connection, and on all of them."""
        async with self._openings, self._reads.openings.taken(self._key, self):
            yield

    @asynccontextmanager
    async def attaching_session(self) -> AsyncIterator[None]:
        """Attach an existing session: at once if few are being attached and none was rejected.

        Otherwise it takes a turn, because a connection may guess ids and keys without end.
        """
        if self._rejected:
            async with self._guess():
                pass  # the rest of this step counts for this turn
        elif self._attaching >= _SESSIONS:
            async with self.turn():
                pass
        self._attaching += 1
        try:
            yield
        except (AuthenticationFailed, SessionExpired):
            self.note_rejected()
            raise
        finally:
            self._attaching -= 1

    @asynccontextmanager
    async def looking_up_session(self) -> AsyncIterator[None]:
        """Look up a session of the store, which may exist: few at a time on all connections.

        The store may process look-ups one after the other, ahead of the operations of other
        clients. A client whose attach was rejected looks up one session at a time, in its turns.
        """
        places = self._reads.look_ups
        async with self._guess() if self._rejected else places.taken(self._key, self):
            yield

    @asynccontextmanager
    async def _guess(self) -> AsyncIterator[None]:
        """Take a turn, shared by all connections of the client with a rejected attach."""
        await self._reads.begin_slice(self._client, _GUESSING)
        try:
            yield
        finally:
            self._reads.end_slice(self._client)

    def note_rejected(self) -> None:
        """Record that a session could not be attached."""
        self._rejected = True


def reader_of(reads: ReadSchedule, identity: Identity, source: Source) -> Reader:
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
        async with reader.turn():
            found = await engine.list_sessions(node)
        async for part in _parts(found, reader):
            yield part
        return
    while True:
        async with reader.turn():
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
        async with reader.turn():
            found = await engine.list_semaphores(node, owners=owners, waiters=waiters)
        async for part in _parts(found, reader):
            yield part
        return
    while True:
        async with reader.turn():
            page = await pages.semaphores(
                node, owners=owners, waiters=waiters, after=after, most=SLICE // 4
            )
        if not page:
            return
        yield page
        after = page[-1].name


async def sessions_page(
    pages: Pages, node: str, reader: Reader, after: int, most: int
) -> list[SessionDescription]:
    """Return a page of sessions, read in slices. Raises errors of the store."""
    page: list[SessionDescription] = []
    while len(page) < most:
        size = min(SLICE, most - len(page))
        async with reader.turn():
            part = await pages.sessions(node, after=after, most=size)
        page += part
        if len(part) < size:
            break
        after = part[-1].id
    return page


async def requests_page(
    pages: Pages, node: str, name: str, reader: Reader, *, waiters: bool, after: int, most: int
) -> list[RequestDescription]:
    """Return a page of a queue, read in slices. Raises errors of the store."""
    page: list[RequestDescription] = []
    while len(page) < most:
        size = min(SLICE, most - len(page))
        async with reader.turn():
            part = await pages.requests(node, name, waiters=waiters, after=after, most=size)
        page += part
        if len(part) < size:
            break
        after = part[-1].order_id
    return page


async def _parts(found: Sequence[T], reader: Reader) -> AsyncGenerator[Sequence[T], None]:
    """Yield a list in parts, with a turn before each but the first."""
    for start in range(0, len(found), SLICE):
        if start:
            async with reader.turn():
                pass  # the caller processes the part in this step
        yield found[start : start + SLICE]


async def converted(reader: Reader, found: Sequence[T], convert: Callable[[T], U]) -> list[U]:
    """Convert the items of a long sequence, in slices."""
    if len(found) <= SLICE:
        return list(map(convert, found))
    done: list[U] = []
    for start in range(0, len(found), SLICE):
        async with reader.turn():
            done += map(convert, found[start : start + SLICE])
    return done
