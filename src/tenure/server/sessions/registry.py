"""Registry of the sessions that a server keeps for remote holders, and their attaching.

A session is attached in one of four ways (`Attach.kind`):

* ``new``: the store opens it. If the answer was lost with its connection, the repeated request
  finds it.
* ``again``, and it is here: it moves from its former connection, which may be half open, to the new
  one. Nothing is sent to the store, and no limit is checked.
* ``again``, and it is not here (this server was restarted, or it was on another one): it is taken
  over from the store at once, because its own program has reconnected. It is counted, regardless of
  the limits.
* ``resume``: another program takes it over. First it is taken over in the store, which checks the
  key and rejects further operations of the former attachment; then it is kept alive until no other
  program can consider it its own.

Ownership: the registry owns the sessions, the tasks of attaching and of sessions, and one timer.
Listeners of the native protocol share one `SessionRegistry`: the first to open makes it, and the
last to close ends it (`share`, `unshare`).

* **Disconnect** while attaching: the attach is cancelled. A new session is closed, and a resumed
  one is detached.
* **Close**: all tasks are cancelled, and every session is detached in the store, where it survives
  for its window. A caller may cancel this while the store hangs; then the store must not be closed,
  which would end the sessions, but only abandoned.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections import Counter
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
from tenure.server.auth.identity import Access
from tenure.server.context import Context
from tenure.server.sessions.handoff import PendingAttach, SessionHandoff
from tenure.server.sessions.session import (
    HolderConnection,
    Renewals,
    ServerSession,
    ServerSessionState,
)
from tenure.wire.errors import to_wire
from tenure.wire.messages import Attach, Attached, Done, Ended, Failed

_TICK = 1.0  # seconds between two checks of waiting renewals
_CONNECTIONS = 4  # of one program, in spite of the limit: old ones, the new one, one aside
_DETACHING = 64  # sessions that are detached in the store at a time
_ALIVE = frozenset({ServerSessionState.ATTACHED, ServerSessionState.DISCONNECTED})


class SessionRegistry:
    """The sessions of one server.

    Attributes:
        sessions: the sessions by id.
        unproven: renewals of sessions that wait for the store's answer.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.sessions: dict[int, ServerSession] = {}
        self.unproven: set[Renewals] = set()
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._users = 0
        self._begun: dict[tuple[bytes, int], PendingAttach | ServerSession] = {}
        self._programs: Counter[bytes] = Counter()  # number of sessions that each program has here
        self._connections: Counter[bytes] = Counter()
        self._handoff = SessionHandoff(context, self.sessions, self._make, self.register)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Failures("looking after sessions without proof", self.context.logger)

    # Opening and closing

    @classmethod
    def share(cls, context: Context) -> SessionRegistry:
        """Return the server's registry, shared by one more listener."""
        registry: SessionRegistry = context.shared.get(cls) or cls(context)
        registry.use()
        return registry

    def use(self) -> None:
        """Begin the share of one listener."""
        if not self._users:
            self.context.shared[SessionRegistry] = self
            self._tick()
        self._users += 1

    def unshare(self) -> bool:
        """End the share of one listener. The last one cancels all tasks, and must call `aclose`.

        Returns:
            true if it was the last.
        """
        self._users -= 1
        if self._users:
            return False
        del self.context.shared[SessionRegistry]
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

    async def _detach(self, session: ServerSession, gate: asyncio.Semaphore) -> bool:
        """Detach a session in the store; return true if that failed."""
        async with gate:
            try:
                await session.store.detach()
            except TenureError as error:
                self.context.log(
                    logging.ERROR, "a session could not be detached", node=session.node, why=error
                )
                return True
            finally:
                session.end(None)
        return False

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background."""
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
                    each.drop_old(now)

    # Reports of sessions

    def register(self, session: ServerSession) -> None:
        """Register the session's attachment here, unless a later one is registered."""
        there = self.sessions.get(session.store.id)
        if there is None or there.store.attach_number < session.store.attach_number:
            self.sessions[session.store.id] = session

    def forget(self, session: ServerSession) -> None:
        """Forget a session that has ended here, or has another attachment."""
        key = session.program, session.born
        if self._begun.get(key) is session:
            del self._begun[key]
        self._handoff.over(session)
        if hasattr(session, "store") and self.sessions.get(session.store.id) is session:
            del self.sessions[session.store.id]
        self.context.counts.sessions.release()
        _count_down(self._programs, session.program)

    def recheck_former(self) -> None:
        """Let the takeovers that wait for former programs check again."""
        self._handoff.recheck_former()

    # Calls of connections

    def connected(self, program: bytes) -> None:
        """Count a connection of a program."""
        self._connections[program] += 1

    def disconnected(self, program: bytes) -> None:
        """Stop counting a connection of a program."""
        _count_down(self._connections, program)

    def admits_returning(self, program: bytes) -> bool:
        """Return true if a connection is admitted although the limit is reached.

        This applies to a program that reconnects for its sessions here, even while its former
        connections are half open and still count.
        """
        return program in self._programs and self._connections[program] < _CONNECTIONS

    def of_program(
        self, connection: HolderConnection, node: str, number: int, key: bytes
    ) -> ServerSession | None:
        """Return a session of the connection's program and identity, if it is here."""
        session = self.sessions.get(number)
        if session is None or session.state not in _ALIVE:
            return None
        mine = session.program == connection.program and session.node == node
        mine = mine and session.account is connection.engine.account
        mine = mine and connection.engine.allows(node, Access.READ)
        return session if mine and hmac.compare_digest(session.key, key) else None

    # Attaching

    def attach(self, connection: HolderConnection, message: Attach) -> PendingAttach | None:
        """Attach a session to a channel of a connection.

        Returns:
            The attach in progress; ``None`` when it has been answered.
        """
        # Without access, a session here is answered like one that does not exist.
        visible = connection.engine.allows(message.node, Access.READ)
        if message.kind == "again":
            session = self.sessions.get(message.session_id)
            if visible and session is not None and session.node == message.node:
                self._again(connection, message, session)
                return None
        elif message.kind == "new":
            begun = self._begun.get((connection.program, message.rid))
            if visible and isinstance(begun, ServerSession):
                self._again(connection, message, begun)
                return None
            if isinstance(begun, PendingAttach):
                self.cancel(begun)
        pending = PendingAttach(connection, message, self.context.clock.now())
        if message.kind == "new":
            self._begun[connection.program, message.rid] = pending
        pending.task = self.start(self._attach(pending))
        return pending

    def cancel(self, pending: PendingAttach) -> None:
        """Cancel an attach that is not needed any more, for example after a lost connection."""
        self._unbegin(pending)
        pending.active = False
        if not pending.uninterruptible:
            pending.task.cancel()

    def _unbegin(self, pending: PendingAttach) -> None:
        key = pending.connection.program, pending.message.rid
        if self._begun.get(key) is pending:
            del self._begun[key]

    def leave(self, pending: PendingAttach, rid: int, *, closing: bool) -> None:
        """Process a `Close` or `Detach` that arrives before the attach is answered."""
        pending.leaving, pending.closing = rid, closing
        if pending.message.kind != "again":
            self.cancel(pending)
            pending.connection.forget_channel(pending.message.channel)
            self._answer_cancelled(pending)

    def _answer_cancelled(self, pending: PendingAttach) -> None:
        node = pending.message.node
        error = SessionClosed(f"the session on {node} was left while it was attached", node=node)
        pending.connection.send(Failed(pending.message.rid, to_wire(error)))
        pending.connection.send(Done(pending.leaving))

    def _again(self, connection: HolderConnection, message: Attach, session: ServerSession) -> None:
        """Move a session that is here to this connection, if it belongs to this program."""
        try:
            self._check_again(connection, message, session)
        except TenureError as error:
            connection.send(Failed(message.rid, to_wire(error)))
            return
        session.answers.acknowledge(message.acknowledged)
        now = self.context.clock.now()
        self._answer_attached(connection, message, session, now, kept=True)

    def _check_again(
        self, connection: HolderConnection, message: Attach, session: ServerSession
    ) -> None:
        node = session.node
        connection.engine.check_session(node, session.store.id)
        if not hmac.compare_digest(session.key, message.key):
            raise AuthenticationFailed(
                f"session {message.session_id} on {node} has another key", node=node
            )
        if session.program != connection.program:
            self._deliver_end(connection, message.channel, session)
            raise rules.taken_over(node)
        if session.state is ServerSessionState.LEAVING:
            raise SessionExpired(
                f"the session on {node} was closed or detached by its program", node=node
            )

    def _deliver_end(
        self, connection: HolderConnection, channel: int, session: ServerSession
    ) -> None:
        """Send the end to a former program that returns for its session, and acknowledges it."""
        for former in session.former:
            if former.program == connection.program and former.connection is None:
                former.connection, former.channel = connection, channel
                connection.connect_channel(channel, former)
                assert former.error is not None
                connection.send(Ended(channel, to_wire(former.error)))

    def _answer_attached(
        self,
        connection: HolderConnection,
        message: Attach,
        session: ServerSession,
        requested_at: float,
        *,
        kept: bool,
    ) -> None:
        session.attach(connection, message.channel)
        connection.connect_channel(message.channel, session)
        comes_back = message.kind != "new"
        connection.send(
            Attached(
                message.rid,
                session.store.id,
                session.store.attach_number,
                session.renewals.age(requested_at),
                kept,
                session.requests.found() if comes_back else [],
                session.requests.gone() if comes_back else [],
                session.requests.resized() if comes_back else [],
            )
        )
        session.report_contact()

    async def _attach_existing(self, pending: PendingAttach) -> ServerSession:
        connection, message = pending.connection, pending.message
        async with AsyncExitStack() as stack:
            connection.count_pending()
            try:
                await stack.enter_async_context(connection.reader.attaching_session())
            finally:
                connection.uncount_pending()
            if message.kind == "again":
                return await self._handoff.fetch(pending)
            return await self._handoff.resume(pending)

    async def _attach(self, pending: PendingAttach) -> None:
        connection, message = pending.connection, pending.message
        try:
            if message.kind == "new":
                async with connection.reader.opening_session():
                    session = await self._handoff.begin(pending)
                self._begun[connection.program, message.rid] = session
            else:
                session = await self._attach_existing(pending)
        except Exception as error:
            if not pending.active:
                return  # no client waits, and the channel may belong to another session
            if not isinstance(error, TenureError):
                self.context.log(
                    logging.ERROR, "the store failed", node=message.node, error=repr(error)
                )
            self._unbegin(pending)
            connection.forget_channel(message.channel)
            connection.send(Failed(message.rid, to_wire(error)))
            if pending.leaving:
                connection.send(Done(pending.leaving))
            return
        self._answer_attached(connection, message, session, pending.came_at, kept=False)
        if pending.leaving:
            session.leave(pending.leaving, closing=pending.closing)

    def _make(self, connection: HolderConnection, message: Attach, window: float) -> ServerSession:
        """Make a session, and count it until its end."""
        self.context.counts.sessions.take_anyway()
        program = connection.program
        self._programs[program] += 1
        return ServerSession(self, program, connection.engine.account, message, window)


def _count_down(counter: Counter[bytes], program: bytes) -> None:
    counter[program] -= 1
    if not counter[program]:
        del counter[program]
