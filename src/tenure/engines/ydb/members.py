"""Session that consists of one or more sessions on the server: its members.

On YDB a session has at most one request for a name. A further request uses a *sibling*, an
additional session. Rules:

* The end of one member ends all. The session's proof is the oldest proof of its members.
* A sibling without requests is reused. It is ended when it has been idle for a window.
* A request that is leaving its queue keeps its member until the server has confirmed that.

**A member** (`Member`) is one session on the server: its protocol, and its streams, one after
another. A member owns a reading task, which owns a writing task for each stream. Rules:

* After a loss the member opens another stream, with growing random pauses, until the session or the
  member ends. It does not do so while the program is inactive, because attaching would keep the
  session alive. Once the window has passed, it checks whether the session has expired.
* If a server does not answer an attachment or a proof for a sixth of the window, the connection is
  dropped with its streams. If the connection has received anything else, the server is only slow:
  the timeout is three times as long, and then only the stream is dropped, because new connections
  would make the server even slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from tenure.background import BackgroundTimer, Ending, Failures
from tenure.engines._kit.operations import OperationQueues
from tenure.engines._kit.reconnect import LONGEST_PAUSE, backoff
from tenure.engines._kit.session import PlainSession
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.database import Database, Stream
from tenure.engines.ydb.protocol import YdbOperation, YdbProtocol
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.wire.ydb import Message

_log = logging.getLogger("tenure")

LEAST_TIMEOUT, MOST_TIMEOUT = 0.5, 5.0
"""Bounds of the answer timeout in seconds, for any window."""

MOST_EXCUSED = 2
"""Number of further timeouts that a server gets while its connection is active."""

LINGER = 0.2
"""Delay after the recovery window before checking whether a silent session expired."""


class MemberEvents(Protocol):
    """Events of a member."""

    def member_started(self, member: Member) -> None:
        """Report that the session is attached, for the first time or again."""

    def member_detached(self) -> None:
        """Report that the stream of an attached session has ended; the session may live."""

    def member_proven(self) -> None:
        """Report that the session has a new proof."""

    def member_refused(self, member: Member, failure: Message) -> None:
        """Report that the server has ended the stream, for a transient reason."""

    def member_failed(self, member: Member, error: Exception) -> None:
        """Report that an attempt to reach the server has failed."""

    def member_ended(self, member: Member, failure: Message | None) -> None:
        """Report the end of the session: by `stop` (``None``), or by the store."""


class Member:
    """A session on the server.

    Args:
        session_id: the session to attach to; 0 for a new one.
        seq_no: the number of its last attachment, which the next one exceeds.

    Attributes:
        protocol: its state, and the messages to send.
        key: its protection key.
        names: the semaphores for which it has a request.
        detached: whether its contact was lost, and is not re-established.
        stopping: whether it is ending, and accepts no more requests.
        over: done when the session on the server has ended, or is abandoned.
        idle_since: time at which its last request left, on the clock.
    """

    def __init__(
        self,
        database: Database,
        path: str,
        window: float,
        description: str,
        key: bytes,
        now: Callable[[], float],
        events: MemberEvents,
        session_id: int = 0,
        seq_no: int = 0,
    ) -> None:
        self.protocol = YdbProtocol(
            path, window, description, key, now, self, session_id=session_id, seq_no=seq_no
        )
        self.key = key
        self.names: set[str] = set()
        self.detached = False
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.idle_since = now()
        self._database = database
        self._now = now
        self._events = events
        self._stream: Stream | None = None
        self._beginning: asyncio.Timeout | None = None
        self._writing: asyncio.Task[None] | None = None
        self._to_write = asyncio.Event()
        self._activity = asyncio.Event()
        self._was_attached = False  # through the current stream
        self._abandoned = False
        self._failures = Failures("keeping a session stream", _log)
        self._silence = BackgroundTimer(
            self._loop, self._loop.time, self._check_silence, self._failures
        )
        self._silence_due = 0.0
        self._excused = 0
        self._proven_then = 0.0
        self._silent = False
        self._task = self._begin()

    def _begin(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(), name="tenure-ydb-session")
        task.add_done_callback(self._ran)
        return task

    def _ran(self, _: asyncio.Task[None]) -> None:
        """Go on in another task if `asyncio.run` has cancelled this one during a stop."""
        if self.stopping and not self._abandoned and self._task.done():
            self._task = self._begin()

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self.protocol.id

    @property
    def known(self) -> bool:
        """True if the server may know of the session."""
        return bool(self.id) or self._stream is not None

    @property
    def answer_timeout(self) -> float:
        """Timeout of the server's answers in seconds."""
        return min(max(self.protocol.window / 6, LEAST_TIMEOUT), MOST_TIMEOUT)

    def drop(self, name: str) -> None:
        """Record that its request for that semaphore has left the queue."""
        self.names.discard(name)
        self.idle_since = self._now()

    def renew(self) -> None:
        """Record that the program is active, and request a proof."""
        self.protocol.renew()
        self._activity.set()

    # Ending

    def stop(self) -> None:
        """End the session on the server. Safe to call twice."""
        self.stopping = True
        self.protocol.stop()
        self._activity.set()
        if self._task.done():
            self._ran(self._task)

    def abandon(self) -> None:
        """Open no further stream; the current one may end normally."""
        self._end()
        if not self.over.done():
            self.over.set_result(None)

    async def finish(self) -> None:
        """Wait until the stream has ended normally, or cut it off after a time."""
        self._end()
        if self._stream is not None:
            await asyncio.wait([self._task], timeout=self.answer_timeout)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def leave(self) -> None:
        """Detach, so that the session survives for its window; return when all output is sent."""
        self.protocol.renew()  # so that its window begins now
        self._end()
        if self._writing is not None and self._stream is not None:
            await asyncio.wait([self._writing], timeout=self.answer_timeout)
            stream = self._stream
            if stream is not None and self._writing is not None and self._writing.done():
                with contextlib.suppress(EngineUnavailable, TimeoutError):
                    async with asyncio.timeout(self.answer_timeout):
                        await stream.half_close()
        await self.finish()

    def _end(self) -> None:
        self._abandoned = True
        self._activity.set()
        self._to_write.set()
        self._silence.cancel()

    # YdbProtocolEvents

    def outgoing(self) -> None:
        """Write the messages of the protocol."""
        self._to_write.set()
        self._watch_silence()

    def started(self) -> None:
        """Report that the session is attached."""
        self.detached = False
        self._events.member_started(self)

    def proven(self, at: float) -> None:  # noqa: ARG002  the protocol knows
        """Report a proof."""
        self._events.member_proven()

    def refused(self, failure: Message) -> None:
        """Report that the server refused to attach."""
        self._events.member_refused(self, failure)

    def ended(self, failure: Message | None) -> None:
        """Stop, and report the end of the session."""
        self.abandon()
        self._events.member_ended(self, failure)

    # The task

    async def _run(self) -> None:
        failures = 0
        while not self._abandoned:
            self._was_attached = self._silent = False
            try:
                await self._connected()
            except (EngineUnavailable, AuthenticationFailed, TimeoutError) as error:
                self._events.member_failed(self, error)
            except Exception as error:  # the next stream may succeed
                self._failures.report(error)
            finally:
                self.protocol.lost()
            if self._was_attached:
                failures = 0
                if not self._abandoned:
                    self.detached = True
                    self._events.member_detached()
            await self._rest(backoff(failures, min(self.protocol.window / 10, LONGEST_PAUSE)))
            failures += 1

    async def _rest(self, pause: float) -> None:
        """Wait before the next attempt, and for a call of the program if it is inactive."""
        protocol = self.protocol
        until = self._loop.time() + pause
        while not self._abandoned:
            left = until - self._loop.time()
            if left <= 0:
                if protocol.may_attach or protocol.silent_for >= protocol.window + LINGER:
                    return
                left = protocol.window + LINGER - protocol.silent_for
            self._activity.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._activity.wait()

    async def _connected(self) -> None:
        """Run one stream from its first message to its end."""
        protocol = self.protocol
        async with asyncio.timeout(2 * self.answer_timeout):
            stream = await self._database.stream(self.answer_timeout)
        if self._abandoned:
            stream.cut()
            return
        self._stream = stream
        self._watch_silence()
        ended = False
        try:
            # Cutting off a stream that has not begun does not wake its waiter.
            async with asyncio.timeout(None) as self._beginning:
                with contextlib.suppress(EngineUnavailable):  # the server's answer has the reason
                    await stream.write(protocol.begin())
                message = await stream.read()
            self._beginning = None
            self._writing = asyncio.create_task(self._write(stream), name="tenure-ydb-write")
            while message is not None:
                protocol.receive(message)
                self._was_attached = self._was_attached or protocol.attached
                self._watch_silence()
                message = await stream.read()
            ended = True
        except (EngineUnavailable, TimeoutError):
            if self._silent:
                stream.condemn(EngineUnavailable(f"no answer within {self.answer_timeout:g} s"))
            raise
        finally:
            self._stream = self._beginning = None
            self._watch_silence()
            if not ended:
                stream.cut()
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.wait([self._writing])
                self._writing = None

    async def _write(self, stream: Stream) -> None:
        """Write all messages, until the stream fails; its reader is notified of that."""
        protocol = self.protocol
        with contextlib.suppress(EngineUnavailable):
            while True:
                self._to_write.clear()
                outgoing, protocol.outgoing = protocol.outgoing, []
                for message in outgoing:
                    await stream.write(message)
                if protocol.outgoing:
                    continue
                if self._abandoned:
                    return
                await self._to_write.wait()

    # Silence

    @property
    def _waits(self) -> bool:
        """True if an answer of the server is due."""
        if self._stream is None or self._abandoned:
            return False
        return self.protocol.awaits_proof or not self._was_attached

    def _watch_silence(self) -> None:
        """Start or stop the timer that drops a server which does not answer."""
        if not self._waits:
            self._excused = 0
            self._silence.cancel()
        elif not self._silence.armed:
            self._proven_then = self.protocol.last_proof
            self._silence_due = self._loop.time() + self.answer_timeout
            self._silence.by(self._silence_due)

    def _check_silence(self) -> None:
        assert self._stream is not None  # otherwise the timer is stopped
        if self._loop.time() - self._silence_due > self.answer_timeout / 2:
            self._watch_silence()  # the loop was stuck, and not the server
            return
        if self.protocol.last_proof > self._proven_then:
            self._excused = 0
            self._watch_silence()  # only later answers are due
            return
        active = self._stream.connection_active_since(self._silence_due - self.answer_timeout)
        if active and self._excused < MOST_EXCUSED:
            self._excused += 1
            self._watch_silence()
            return
        self._silent = not active
        if self._beginning is not None:
            self._beginning.reschedule(self._loop.time())
        else:
            self._stream.cut()


class GroupSession(PlainSession, ABC):
    """Life cycle of a session and of its members.

    Attributes:
        database: shared by all sessions of the engine.
        fencing: whether the order id of a grant is required.
        main: the session on the server with the id of this session.
        siblings: the other sessions on the server.
        queues: the operation queues of the names.
    """

    def __init__(self, database: Database, how: Attach, events: SessionEvents) -> None:
        super().__init__(how, events, 0, how.recovery_window)
        self.database = database
        self.now = database.clock.now
        self.fencing = database.address.fencing
        self.queues = OperationQueues()
        self._loop = asyncio.get_running_loop()
        self._step = 0
        self._proven = float("-inf")
        self._broken = False
        self._finishing: Ending | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._first: asyncio.Future[None] | None = self._loop.create_future()
        self._failure = "it did not answer"
        self.main = self._new_member(how.description, how.key or secrets.token_bytes(16))
        self.siblings: list[Member] = []

    @property
    def all(self) -> list[Member]:
        """The main member and its siblings."""
        return [self.main, *self.siblings]

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self.main.protocol.seq_no

    @property
    def credential(self) -> str:
        """Id and protection key of each member that is known to the server."""
        return ",".join(f"{each.id}:{each.key.hex()}" for each in self.all if each.id)

    @property
    def failure(self) -> EngineUnavailable | None:
        """Cause of a lost contact; ``None`` while there is contact."""
        return EngineUnavailable(self._failure) if self._broken else None

    # Attaching

    async def attach(self) -> None:
        """Wait until the main member is attached. Raises as `Engine.attach`."""
        assert self._first is not None
        limit = self.database.address.connect_timeout
        try:
            async with asyncio.timeout(limit):
                await self._first
        except BaseException as error:
            self.stop(self._expired("it was never attached"))
            self.database.complete(self._end_members(2 * self.main.answer_timeout))
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"no session on {self.path} at {self.database.address.url} within "
                    f"{limit:g} s: {self._failure}",
                    node=self.path,
                ) from None
            raise
        finally:
            self._first = None

    def new_sibling(self) -> Member:
        """Add a member. Its operations are sent when it is attached.

        Raises:
            Unsupported: the maximum is reached.
        """
        most = self.database.address.siblings
        if len(self.siblings) >= most:
            raise Unsupported(
                f"the session on {self.path} has a request in each of {most + 1} sessions on the "
                f"server, and YDB allows one for a name in each. Raise siblings={most} in the URL, "
                "use several sessions, or tenure:// which has no such bound.",
                node=self.path,
            )
        member = self._new_member(f"sibling of session {self.main.id}", secrets.token_bytes(16))
        self.siblings.append(member)
        return member

    def _new_member(self, description: str, key: bytes) -> Member:
        path = self.database.path_of(self.path)
        return Member(self.database, path, self.window, description, key, self.now, self)

    # MemberEvents

    def member_started(self, member: Member) -> None:
        """Record that a member is attached, and report contact once all are."""
        if member is self.main:
            self.id = member.id
        else:
            self.database.siblings[member.id] = self.main.id
            if not self._broken and not self.over:
                self.events.attached()  # with another credential
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._report_contact()

    def member_detached(self) -> None:
        """Report the loss of contact."""
        self._report_contact()

    def _report_contact(self) -> None:
        broken = any(member.detached for member in self.all)
        if broken != self._broken and not self.over:
            self._broken = broken
            if broken:
                self.events.detached(self.failure)
            else:
                self.events.attached()

    def member_proven(self) -> None:
        """Report a proof once it covers every member."""
        at = min(each.protocol.last_proof for each in self.all if each.id)
        if at > self._proven and not self.over:
            self._proven = at
            self.events.proven(at)

    def member_refused(self, member: Member, failure: Message) -> None:
        """Abandon a member that can never attach; otherwise record the reason."""
        self._failure = messages.reason(failure)
        if member.id:
            return
        error = errors.attach_error(self.path, failure)
        if error is None:
            return
        member.abandon()
        if member is self.main:
            self._fail_attach(error)
        else:
            self.sibling_failed(member, error)
            self._forget_sibling(member)

    def member_failed(self, member: Member, error: Exception) -> None:
        """Record why a member could not attach."""
        self._failure = str(error) or type(error).__name__
        if isinstance(error, AuthenticationFailed) and self._first is not None:
            member.abandon()
            self._fail_attach(error)

    def member_ended(self, member: Member, failure: Message | None) -> None:
        """End the session, because the server has ended a member."""
        if failure is None:
            self.database.siblings.pop(member.id, None)
            if member is not self.main:
                self._forget_sibling(member)
        elif self._end(errors.expired(self.path, failure)):
            self.database.complete(self._end_members(self.main.answer_timeout))

    def _fail_attach(self, error: TenureError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    @abstractmethod
    def sibling_failed(self, member: Member, error: TenureError) -> None:
        """Fail the requests of a sibling that cannot be attached."""

    def _forget_sibling(self, sibling: Member) -> None:
        if sibling in self.siblings:
            self.siblings.remove(sibling)
            self.queues.forget(sibling)
            self._report_contact()
            self.database.complete(sibling.finish())

    # Life

    def renew_members(self) -> None:
        """Request a proof of each member, and end siblings that have been idle for a window."""
        idle = self.now() - self.window
        for member in self.all:
            if member is not self.main and not member.names and member.idle_since < idle:
                member.stop()
            else:
                member.renew()

    async def close(self) -> None:
        """End the session."""
        await self.close_within(self.window)

    async def close_within(self, seconds: float) -> None:
        """Close like `close`, within a time; sessions that the server is not notified of expire."""
        await self._finish(partial(self._end_members, seconds))

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._finish(self._detach)

    async def _finish(self, step: Callable[[], Awaitable[None]]) -> None:
        if self._finishing is None:
            self.stop(self._expired("it was closed"))
            self._finishing = Ending(step, self.database.complete)
        await self._finishing.wait()

    async def _detach(self) -> None:
        await asyncio.gather(*(member.leave() for member in self.all))

    async def _end_members(self, seconds: float) -> None:
        """End all sessions on the server that have not ended yet."""
        members = self.all
        for member in members:
            if member.known:
                member.stop()
            else:
                member.abandon()
        await asyncio.wait([member.over for member in members], timeout=seconds)
        await asyncio.gather(*(member.finish() for member in members))
        for member in members:
            self.database.siblings.pop(member.id, None)

    def _expired(self, how: str) -> SessionExpired:
        return SessionExpired(f"the session on {self.path} has ended: {how}", node=self.path)

    def _forget(self) -> None:
        super()._forget()
        self.queues.clear()
        for future in list(self._pending):
            if not future.done():
                future.set_exception(self.reason)

    # Operations

    def future(self) -> asyncio.Future[Any]:
        """Return a future that is settled at the latest when the session ends."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # a cancelled caller does not retrieve it

    async def perform(self, kind: str, name: str, **fields: object) -> tuple[Message, bool]:
        """Perform an operation on a semaphore through the main member, in its order.

        Args:
            kind: the kind of the request message.
            name: the name of the semaphore.
            fields: further fields of the message.

        Returns:
            The answer, and true if the operation was sent more than once, after a broken
            connection.
        """
        self.check()
        answer = self.future()
        main = self.main
        sent: list[YdbOperation] = []

        def make(req_id: int) -> Message:
            return messages.request(kind, req_id=req_id, name=name, **fields)

        def begin() -> bool:
            if not self.queues.of(name).try_begin(main):
                return False
            sent.append(main.protocol.send(make, answered))
            return True

        def answered(_: str, body: Message) -> bool:
            if not answer.done():
                answer.set_result((body, sent[0].repeated))
            self.queues.of(name).end(main)
            return True

        self.queues.of(name).add(begin)
        body, repeated = await answer
        return body, repeated

    def step(self) -> int:
        """Return a number that rises with every call, to order events."""
        self._step += 1
        return self._step
