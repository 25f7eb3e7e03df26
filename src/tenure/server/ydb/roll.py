"""The sessions that this listener knows: who speaks for each, and with which sequence number.

A session that nobody speaks for stays here until its window has passed: until then it counts
against the limit of sessions. All of this is forgotten with the server, and another server on the
same store does not know it; what must not be forgotten (sessions, requests) is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from tenure.engines.contract import EngineSession
from tenure.errors import TenureError

if TYPE_CHECKING:
    from tenure.server.context import Context
    from tenure.server.ydb.session import SessionStream

__all__ = ["Member", "Roll"]

Key = tuple[str, int]


class Member:
    """One session.

    Attributes:
        timeout_millis: how long it survives without contact.
        seq_no: the highest with which it was attached here.
        stream: who speaks for it; ``None`` when it is detached.
        until: when it is over, if nobody speaks for it.
    """

    __slots__ = ("seq_no", "stream", "timeout_millis", "until")

    def __init__(self, timeout_millis: int, seq_no: int, stream: SessionStream) -> None:
        self.timeout_millis = timeout_millis
        self.seq_no = seq_no
        self.stream: SessionStream | None = stream
        self.until = 0.0


class Roll:
    """The sessions of one listener."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._members: dict[Key, Member] = {}
        self._turns: dict[Key, tuple[asyncio.Lock, int]] = {}
        self._ends: list[tuple[float, Key]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._listings: dict[str, asyncio.Future[dict[int, int]]] = {}

    @property
    def streams(self) -> list[SessionStream]:
        """Who speaks for sessions now."""
        return [each.stream for each in self._members.values() if each.stream is not None]

    def find(self, node: str, number: int) -> Member | None:
        """What is known of a session."""
        return self._members.get((node, number))

    @contextlib.asynccontextmanager
    async def turn(self, node: str, number: int) -> AsyncIterator[None]:
        """One at a time attaches a session that exists already."""
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
        self, node: str, number: int, timeout_millis: int, seq_no: int, stream: SessionStream
    ) -> SessionStream | None:
        """`stream` speaks for the session; returns who did so before.

        A session that is not known here has been counted by who calls this.
        """
        member = self._members.get((node, number))
        if member is None:
            self._members[node, number] = Member(timeout_millis, seq_no, stream)
            return None
        former, member.stream, member.seq_no = member.stream, stream, seq_no
        return former

    def leave(self, node: str, number: int, stream: SessionStream) -> bool:
        """`stream` speaks for the session no more; false if another one does by now."""
        member = self._members.get((node, number))
        if member is None or member.stream is not stream:
            return False
        member.stream = None
        member.until = self._context.clock.now() + max(1.0, member.timeout_millis / 1000)
        heapq.heappush(self._ends, (member.until, (node, number)))
        self._set_timer()
        return True

    def over(self, node: str, number: int) -> None:
        """The session is over."""
        if self._members.pop((node, number), None) is not None:
            self._context.counts.sessions.give_back()

    def _set_timer(self) -> None:
        if self._timer is None and self._ends:
            delay = max(0.0, self._ends[0][0] - self._context.clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._context.clock.now()
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            member = self._members.get(key)
            if member is not None and member.stream is None and member.until <= until:
                self.over(*key)
        self._set_timer()

    # What outlives a stream

    def detach(self, session: EngineSession, node: str) -> None:
        """Have a session detached at its store, which nobody waits for but `aclose`."""
        self._spawn(self._quietly(session.detach(), session, node))

    def end(self, session: EngineSession, node: str) -> None:
        """Have a session closed at its store."""
        self._spawn(self._quietly(session.close(), session, node))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _quietly(
        self, leaving: Coroutine[Any, Any, None], session: EngineSession, node: str
    ) -> None:
        try:
            await leaving
        except TenureError as error:  # then its window ends it
            self._context.log(
                logging.WARNING,
                "session not detached",
                node=node,
                session=session.id,
                error=str(error),
            )

    async def timeout_of(self, node: str, number: int) -> int | None:
        """How long a session of the store survives, in milliseconds; ``None`` if there is none.

        Many that ask at a time, as after a restart, are answered from one look at the store.
        """
        listing = self._listings.get(node)
        if listing is None:
            listing = asyncio.ensure_future(self._list(node))
            self._listings[node] = listing
            listing.add_done_callback(lambda _: self._listings.pop(node))
        return (await asyncio.shield(listing)).get(number)

    async def _list(self, node: str) -> dict[int, int]:
        sessions = await self._context.engine.list_sessions(node)
        return {each.id: round(each.recovery_window * 1000) for each in sessions}

    async def aclose(self) -> None:
        """Wait until the store knows of everybody who has left. Cancelled, nothing goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks: set[asyncio.Future[Any]] = {*self._leaving, *self._listings.values()}
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            for node, number in list(self._members):
                self.over(node, number)
