"""The sessions that a server keeps for remote holders, and how they come, move and go.

A session comes here in one of four ways (`Attach.kind`):

* ``new``: the store begins it. If the answer was lost with its connection, the same request, sent
  again, finds it.
* ``again``, and it is here: it moves from its former connection, which may be half open, to the new
  one. The store is not asked; nothing is lost; no limit is looked at.
* ``again``, and it is not here (this server was started anew, or it was at another one): it is
  taken over from the store at once, because its own program comes back. It is counted, and no
  limit refuses it.
* ``resume``: another program takes it over. First the store does so, which checks the key and
  refuses what the former attachment still sends; then it is kept alive until no other program can
  believe that it has the session.

Who owns what: `Hosting` owns the registry, the tasks of attaching and of what hosted sessions have
begun, and one timer. Listeners of the native protocol share one `Hosting`: the first to open makes
it, and the last to close ends it (`share`, `unshare`).

* **Disconnect** while attaching: the attaching is cancelled. A new session is not left behind, and
  one that was to be resumed is detached.
* **Close**: everything under way is cancelled, and every session is detached in the store, where it
  lives on for its window. A caller that cannot wait for a store that hangs cancels it; then the
  store must not be closed in order (that would end the sessions), only left.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from tenure.background import Failures
from tenure.core import rules
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    SessionClosed,
    SessionExpired,
    TenureError,
)
from tenure.server.context import Context
from tenure.server.sessions.connection import Switchboard
from tenure.server.sessions.handoff import Arrival, Arriving
from tenure.server.sessions.renewals import Renewals
from tenure.server.sessions.session import Hosted, State
from tenure.wire.errors import to_wire
from tenure.wire.messages import Attach, Attached, Done, Ended, Failed

__all__ = ["Hosting"]

_TICK = 1.0  # seconds between two looks at renewals that wait
_CONNECTIONS = 4  # of one program, in spite of the limit: old ones, the new one, one aside
_DETACHING = 64  # sessions that are detached in the store at a time


class Hosting:
    """The registry of hosted sessions of one server.

    Attributes:
        sessions: by their ids.
        unproven: the sessions' renewals, where the store has not answered some.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.limits = context.limits
        self.semaphores = context.counts.semaphores
        self.sessions: dict[int, Hosted] = {}
        self.unproven: set[Renewals] = set()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._users = 0
        self._begun: dict[tuple[bytes, int], Arrival | Hosted] = {}
        self._programs: dict[bytes, int] = {}  # how many sessions each has here
        self._connections: dict[bytes, int] = {}  # and how many connections
        self._arriving = Arriving(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Failures("looking after sessions without proof", self.context.logger)

    # Its own life

    @classmethod
    def share(cls, context: Context) -> Hosting:
        """Return the server's `Hosting`, for one more listener."""
        hosting = context.hosting
        if hosting is None:
            context.hosting = hosting = cls(context)
            hosting._tick()
        hosting._users += 1
        return hosting

    def unshare(self) -> bool:
        """End the share of one listener. The last one cancels all tasks, and must call `aclose`.

        Returns:
            true if it was the last.
        """
        self._users -= 1
        if self._users:
            return False
        self.context.hosting = None
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        return True

    async def aclose(self) -> None:
        """Detach every session in the store.

        Raises:
            EngineError: some could not be detached.
        """
        if self._tasks:
            await asyncio.wait(self._tasks)
        gate = asyncio.Semaphore(_DETACHING)
        failed = await asyncio.gather(
            *(self._detach(each, gate) for each in list(self.sessions.values()))
        )
        if any(failed):
            raise EngineError(
                f"{sum(failed)} sessions could not be detached in the store, which must not be "
                "closed in order now, since that would end them; the log says why"
            )

    async def _detach(self, hosted: Hosted, gate: asyncio.Semaphore) -> bool:
        """Detach a session in the store; return true if that has failed."""
        async with gate:
            try:
                await hosted.store.detach()
            except TenureError as error:
                self.context.log(
                    logging.ERROR, "a session could not be detached", node=hosted.node, why=error
                )
                return True
            finally:
                hosted.end(None)
        return False

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have something done in the background."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_TICK, self._tick)
        if self.unproven:
            now = self.context.clock.now()
            for each in list(self.unproven):
                with self._failures.contained():
                    each.give_up_old(now)

    # What hosted sessions say

    def register(self, hosted: Hosted) -> None:
        """Register the session's attachment here, unless a later one is registered already."""
        there = self.sessions.get(hosted.store.id)
        if there is None or there.store.attach_number < hosted.store.attach_number:
            self.sessions[hosted.store.id] = hosted

    def forget(self, hosted: Hosted) -> None:
        """Forget a session that is over here, or has another attachment."""
        key = hosted.program, hosted.born
        if self._begun.get(key) is hosted:
            del self._begun[key]
        number = _id_of(hosted)
        if number:
            self._arriving.predecessors.remember(hosted)
            if self.sessions.get(number) is hosted:
                del self.sessions[number]
        self.context.counts.sessions.give_back()
        self._programs[hosted.program] -= 1
        if not self._programs[hosted.program]:
            del self._programs[hosted.program]

    def look(self) -> None:
        """Let the arrivals that wait for former programs check again."""
        self._arriving.look()

    # What connections say

    def connected(self, program: bytes) -> None:
        """Count a connection of a program."""
        self._connections[program] = self._connections.get(program, 0) + 1

    def disconnected(self, program: bytes) -> None:
        """Stop counting a connection of a program."""
        self._connections[program] -= 1
        if not self._connections[program]:
            del self._connections[program]

    def lets_in_anyway(self, program: bytes) -> bool:
        """Return true if a connection is let in though there are as many as may be.

        That is so where a program has sessions here and comes back for them, also when its former
        connections are half open and count still.
        """
        return program in self._programs and self._connections.get(program, 0) < _CONNECTIONS

    def of_program(self, program: bytes, node: str, number: int, key: bytes) -> Hosted | None:
        """Return a program's own session, if it is here."""
        hosted = self.sessions.get(number)
        if hosted is None or hosted.state not in {State.ATTACHED, State.LINKLESS}:
            return None
        mine = hosted.program == program and hosted.node == node
        return hosted if mine and hmac.compare_digest(hosted.key, key) else None

    # Attaching

    def attach(self, link: Switchboard, message: Attach) -> Arrival | None:
        """Attach a session to a channel of a connection, as it asks.

        Returns:
            the attaching that is under way; ``None`` when it has been answered.
        """
        if message.kind == "again":
            hosted = self.sessions.get(message.session_id)
            if hosted is not None and hosted.node == message.node:
                self._again(link, message, hosted)
                return None
        elif message.kind == "new":
            begun = self._begun.get((link.program, message.rid))
            if isinstance(begun, Hosted):
                self._again(link, message, begun)
                return None
            if begun is not None:
                self.cancel(begun)
        arrival = Arrival(link, message, self.context.clock.now())
        if message.kind == "new":
            self._begun[link.program, message.rid] = arrival
        arrival.task = self.start(self._arrive(arrival))
        return arrival

    def cancel(self, arrival: Arrival) -> None:
        """Cancel an arrival that is not wanted any more, because its connection is lost, say."""
        self._unbegin(arrival)
        arrival.wanted = False
        if not arrival.hurries:
            arrival.task.cancel()

    def _unbegin(self, arrival: Arrival) -> None:
        key = arrival.link.program, arrival.message.rid
        if self._begun.get(key) is arrival:
            del self._begun[key]

    def leave(self, arrival: Arrival, rid: int, *, closing: bool) -> None:
        """Process a `Close` or `Detach` that comes before the attaching is answered."""
        arrival.leaving, arrival.closing = rid, closing
        if arrival.message.kind != "again":
            self.cancel(arrival)
            arrival.link.over(arrival.message.channel)
            self._say_it_is_not_wanted(arrival)

    def _say_it_is_not_wanted(self, arrival: Arrival) -> None:
        node = arrival.message.node
        error = SessionClosed(f"the session on {node} was left while it was attached", node=node)
        arrival.link.send(Failed(arrival.message.rid, to_wire(error)))
        arrival.link.send(Done(arrival.leaving))

    def _again(self, link: Switchboard, message: Attach, hosted: Hosted) -> None:
        """Move a session that is here to this connection, if it is this program's."""
        error: TenureError | None = None
        if not hmac.compare_digest(hosted.key, message.key):
            error = AuthenticationFailed(
                f"session {message.session_id} on {hosted.node} has another key", node=hosted.node
            )
        elif hosted.account is not link.engine.account:
            error = link.engine.of_another_identity(hosted.node, message.session_id)
        elif hosted.program != link.program:
            error = rules.taken_over(hosted.node)
            self._let_hear(link, message.channel, hosted)
        elif hosted.state is State.LEAVING:
            error = SessionExpired(
                f"the session on {hosted.node} was closed or detached by its program",
                node=hosted.node,
            )
        if error is not None:
            link.send(Failed(message.rid, to_wire(error)))
            return
        hosted.answers.acknowledge(message.acknowledged)
        now = self.context.clock.now()
        self._tell_attached(link, message, hosted, now, kept=True)

    def _let_hear(self, link: Switchboard, channel: int, hosted: Hosted) -> None:
        """Send a former program that asks for its session the end, which it acknowledges."""
        for former in hosted.former:
            if former.program == link.program and former.link is None:
                former.link, former.channel = link, channel
                link.connect(channel, former)
                assert former.error is not None
                link.send(Ended(channel, to_wire(former.error)))

    def _tell_attached(
        self, link: Switchboard, message: Attach, hosted: Hosted, asked: float, *, kept: bool
    ) -> None:
        hosted.attach(link, message.channel)
        link.connect(message.channel, hosted)
        comes_back = message.kind != "new"
        link.send(
            Attached(
                message.rid,
                hosted.store.id,
                hosted.store.attach_number,
                hosted.renewals.age(asked),
                kept,
                hosted.places.found() if comes_back else [],
                hosted.places.gone() if comes_back else [],
            )
        )
        hosted.tell_of_store()

    async def _arrive_again(self, arrival: Arrival) -> Hosted:
        link, message = arrival.link, arrival.message
        async with AsyncExitStack() as stack:
            link.begun()
            try:
                await stack.enter_async_context(link.reader.attaching())
            finally:
                link.finished()
            if message.kind == "again":
                return await self._arriving.fetch(link, message)
            return await self._arriving.resume(arrival)

    async def _arrive(self, arrival: Arrival) -> None:
        link, message = arrival.link, arrival.message
        try:
            if message.kind == "new":
                async with link.reader.beginning():
                    hosted = await self._arriving.begin(link, message)
                self._begun[link.program, message.rid] = hosted
            else:
                hosted = await self._arrive_again(arrival)
        except Exception as error:
            if not arrival.wanted:
                return  # no client waits, and the channel may be another session's
            if not isinstance(error, TenureError):
                self.context.log(
                    logging.ERROR, "the store failed", node=message.node, error=repr(error)
                )
            self._unbegin(arrival)
            link.over(message.channel)
            link.send(Failed(message.rid, to_wire(error)))
            if arrival.leaving:
                link.send(Done(arrival.leaving))
            return
        self._tell_attached(link, message, hosted, arrival.came_at, kept=False)
        if arrival.leaving:
            hosted.leave(arrival.leaving, closing=arrival.closing)

    def make(self, link: Switchboard, message: Attach, window: float) -> Hosted:
        """Make a server session. It is counted already, and gives its count back at its end."""
        self._programs[link.program] = self._programs.get(link.program, 0) + 1
        return Hosted(
            self,
            link.program,
            link.engine.account,
            born=message.rid if message.kind == "new" else 0,
            node=message.node,
            window=window,
            key=message.key,
            resumable=message.resumable or message.kind == "resume",
            drawn=message.drawn,
        )


def _id_of(hosted: Hosted) -> int:
    """The session's id; 0 while the store has not given one."""
    store = getattr(hosted, "store", None)
    return 0 if store is None else int(store.id)
