"""The listener's sessions, each with its stream and its sequence number.

A session without a stream is kept until its window has passed: until then it counts against the
limit of sessions. The registry is in memory, and not shared with other servers on the same store;
durable state (sessions, requests) is in the store.

**Returning clients** (`ReturningClients`) reconnect for their sessions while the limit of
connections is reached. YDB's clients have no name before they attach a session, so a client is an
identity at a source. It is admitted while one of its sessions is detached here. It gets at most one
connection for each of its sessions, and a few more, because its former connections may be half
open.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tenure.engines.contract import EngineSession
from tenure.errors import TenureError
from tenure.server.admission import Source
from tenure.server.auth.identity import Identity
from tenure.server.reads import Reader, session_by_id
from tenure.server.ydb.long_replies import LongReplies

if TYPE_CHECKING:
    from tenure.server.context import Context


Client: TypeAlias = tuple[Identity, Source]

_HALF_OPEN = 3  # connections of a client that may be half open


class ReturningClients:
    """Sessions of each client of one listener, and its additionally admitted connections."""

    def __init__(self) -> None:
        self._sessions: Counter[Client] = Counter()
        self._detached: Counter[Client] = Counter()
        self._connections: Counter[Client] = Counter()

    def __len__(self) -> int:
        """Return the number of known clients."""
        return len(self._sessions.keys() | self._detached.keys() | self._connections.keys())

    def count_session(self, client: Client, more: int, *, detached: bool) -> None:
        """Count a session of a client, or with -1 uncount it."""
        _count(self._sessions, client, more)
        if detached:
            self.count_detached(client, more)

    def count_detached(self, client: Client, more: int) -> None:
        """Count a detached session of a client, or with -1 uncount it."""
        _count(self._detached, client, more)

    def let_in(self, client: Client) -> bool:
        """Count a connection of a returning client; false if it is another, or has enough."""
        most = self._sessions[client] + _HALF_OPEN
        if not self._detached[client] or self._connections[client] >= most:
            return False
        _count(self._connections, client, 1)
        return True

    def lost(self, client: Client) -> None:
        """Uncount a connection."""
        _count(self._connections, client, -1)


def _count(counter: Counter[Client], client: Client, more: int) -> None:
    counter[client] += more
    if not counter[client]:
        del counter[client]


Key = tuple[str, int]

_MANY = 64  # number of ends that are not worth searching


class RegisteredSession:
    """A session.

    Attributes:
        timeout_millis: its recovery window.
        seq_no: the highest sequence number with which it was attached here.
        stream: its stream; ``None`` while it is detached.
        until: its end, unless a stream attaches it.
        client: the client of its latest stream.
    """

    __slots__ = ("client", "seq_no", "stream", "timeout_millis", "until")

    def __init__(self, timeout_millis: int, seq_no: int, stream: object, client: Client) -> None:
        self.timeout_millis = timeout_millis
        self.seq_no = seq_no
        self.stream: object | None = stream
        self.until = 0.0
        self.client = client


class YdbSessionRegistry:
    """The sessions of one listener.

    Attributes:
        timeouts: timeouts of waiters, in milliseconds, by session and name; only of sessions with a
            stream here.
        long_replies: the long descriptions that are being sent.
        returning: the clients of the sessions.
    """

    def __init__(self, context: Context) -> None:
        self.timeouts: dict[tuple[int, str], int] = {}
        self.long_replies = LongReplies()
        self.returning = ReturningClients()
        self._context = context
        self._sessions: dict[Key, RegisteredSession] = {}
        self._turns: dict[Key, tuple[asyncio.Lock, int]] = {}
        self._ends: list[tuple[float, Key]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._listings: dict[str, asyncio.Future[dict[int, int]]] = {}

    def __len__(self) -> int:
        """Return the number of entries: sessions, and their end times."""
        return len(self._sessions) + len(self._ends)

    def find(self, node: str, number: int) -> RegisteredSession | None:
        """Return the session, if it is known."""
        return self._sessions.get((node, number))

    @contextlib.asynccontextmanager
    async def turn(self, node: str, number: int) -> AsyncIterator[None]:
        """Lock under which existing sessions are attached, one at a time."""
        key = (node, number)
        lock, waiting = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = (lock, waiting + 1)
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._turns.pop(key)
            if waiting > 1:
                self._turns[key] = (lock, waiting - 1)

    def join(
        self,
        node: str,
        number: int,
        timeout_millis: int,
        seq_no: int,
        stream: object,
        client: Client,
    ) -> None:
        """Record that the session is attached to a client's stream, and to no former one.

        The caller has counted a session that is not known here.
        """
        member = self._sessions.get((node, number))
        if member is None:
            self._sessions[node, number] = RegisteredSession(timeout_millis, seq_no, stream, client)
            self.returning.count_session(client, 1, detached=False)
            return
        self.returning.count_session(member.client, -1, detached=member.stream is None)
        member.stream, member.client = stream, client
        member.timeout_millis, member.seq_no = timeout_millis, seq_no
        self.returning.count_session(client, 1, detached=False)

    def leave(self, node: str, number: int, stream: object) -> bool:
        """Record that `stream` has ended; return false if the session has another one."""
        member = self._sessions.get((node, number))
        if member is None or member.stream is not stream:
            return False
        member.stream = None
        self.returning.count_detached(member.client, 1)
        member.until = self._context.clock.now() + max(1.0, member.timeout_millis / 1000)
        if len(self._ends) > _MANY + 2 * len(self._sessions):
            self._forget_attached()
        heapq.heappush(self._ends, (member.until, (node, number)))
        self._set_timer()
        return True

    def _forget_attached(self) -> None:
        """Drop the end times of sessions that were reattached since."""
        self._ends = [
            (each.until, key) for key, each in self._sessions.items() if each.stream is None
        ]
        heapq.heapify(self._ends)

    def over(self, node: str, number: int) -> None:
        """Forget a session that has ended."""
        member = self._sessions.pop((node, number), None)
        if member is not None:
            self.returning.count_session(member.client, -1, detached=member.stream is None)
            self._context.counts.sessions.release()

    def _set_timer(self) -> None:
        if self._timer is None and self._ends:
            delay = max(0.0, self._ends[0][0] - self._context.clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._context.clock.now()
        try:
            while self._ends and self._ends[0][0] <= now:
                until, key = heapq.heappop(self._ends)
                member = self._sessions.get(key)
                if member is not None and member.stream is None and member.until <= until:
                    self.over(*key)
        finally:
            self._set_timer()

    # Tasks that outlive a stream

    def detach(
        self, session: EngineSession, node: str, under_way: set[asyncio.Future[Any]]
    ) -> asyncio.Task[None]:
        """Detach a session in its store; `aclose` waits for the task.

        Args:
            session: the store's session.
            node: its node.
            under_way: pending operations without a reader, which end first.
        """
        return self._spawn(self._part(session, node, under_way, session.detach))

    def end(
        self, session: EngineSession, node: str, under_way: set[asyncio.Future[Any]]
    ) -> asyncio.Task[None]:
        """Close a session in its store; like `detach`."""
        return self._spawn(self._part(session, node, under_way, session.close))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _part(
        self,
        session: EngineSession,
        node: str,
        under_way: set[asyncio.Future[Any]],
        part: Callable[[], Awaitable[None]],
    ) -> None:
        if under_way:
            await asyncio.wait(under_way)
        try:
            await part()
        except TenureError as error:  # then its window ends it
            self._context.log(
                logging.WARNING,
                "session not detached",
                node=node,
                session=session.id,
                error=str(error),
            )

    async def timeout_of(self, node: str, number: int, reader: Reader) -> int | None:
        """Return the timeout of a session of the store, in milliseconds; ``None`` if there is none.

        A store that lists in pages reads only this session. Otherwise one list of the store serves
        all concurrent callers, as after a restart. A session that is missing in a list that started
        before the call may exist by now.

        Args:
            node: the path of the session's node.
            number: the session's id.
            reader: the schedule of the calling client's reads.
        """
        engine = self._context.engine
        if engine.pages() is not None:
            async with reader.turn():
                session = await session_by_id(engine, node, number)
            return None if session is None else round(session.recovery_window * 1000)
        for last in (False, True):
            listing = self._listings.get(node)
            enough = last or listing is None
            if listing is None:
                listing = asyncio.ensure_future(self._list(node, reader))
                self._listings[node] = listing
                listing.add_done_callback(partial(self._listed, node))
            found = (await asyncio.shield(listing)).get(number)
            if found is not None or enough:
                return found
        raise AssertionError("the second look is enough")

    def _listed(self, node: str, listing: asyncio.Future[dict[int, int]]) -> None:
        del self._listings[node]
        if not listing.cancelled():
            listing.exception()  # the waiting tasks get it; there may be none

    async def _list(self, node: str, reader: Reader) -> dict[int, int]:
        async with reader.turn():
            sessions = await self._context.engine.list_sessions(node)
        return {each.id: round(each.recovery_window * 1000) for each in sessions}

    async def settled(self) -> None:
        """Return when the store has detached all sessions that were left."""
        while tasks := self._under_way():
            await asyncio.wait(tasks)

    def forget(self) -> None:
        """Drop everything, and cancel pending work. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._under_way():
            task.cancel()
        for node, number in list(self._sessions):
            self.over(node, number)

    def _under_way(self) -> set[asyncio.Future[Any]]:
        return {*self._leaving, *self._listings.values()}
