"""Stream of one session: attaches the session to the store, and drives its conversation.

A session is renewed in the store when its client answers a ping, sends one, or reads a long reply.
When the stream ends without a SessionStop, the session is detached and survives for its window.

**Pings** (`Pings`). The server pings at least every two seconds, because a pong renews the session
in the store. As in YDB, the timeout of a ping is a third of the session's timeout, and at most 5 s.

**Attaching** (`attach`) opens a session, or takes an existing one over. An existing session is
taken over regardless of its former stream: a client that has its key is the same program. Of two
streams, the one with the higher sequence number gets the session, else the later one.

As in YDB, a client without a key attaches its session by the id alone. Because ids are listed, this
is limited to one identity: the session is stored with a key of that identity
(`tenure.server.sessions.keys`), which no other listener accepts.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.core import rules
from tenure.engines.contract import Attach, EngineSession, Removal
from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired, TenureError
from tenure.identity import seen_from
from tenure.model import Recovered
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.limits import LimitReached
from tenure.server.listener import peer_host
from tenure.server.sessions.keys import check_new_key
from tenure.server.ydb.calls import GrpcCall, GrpcError, decoded, frame
from tenure.server.ydb.calls import Status as GrpcStatus
from tenure.server.ydb.core import Conversation, Job
from tenure.server.ydb.long_replies import LongReply
from tenure.server.ydb.messages import Refused, Request, Status, failure, normalized, status_of
from tenure.server.ydb.operations import CreateOperation, DeleteOperation, DescribeOperation

if TYPE_CHECKING:
    from tenure.server.context import Context
    from tenure.server.ydb.registry import YdbSessionRegistry
    from tenure.server.ydb.transport import GrpcConnection


_EVERY = 2.0  # longest time between two pings, in seconds
_TIMEOUT = 5.0  # seconds without an answer, at the most


class Pings:
    """Drives the pings of a conversation.

    Args:
        conversation: the conversation to ping.
        may_miss_pong: whether a pong may have come unread, or the ping may not have been read.
        pump: sends the conversation's messages.
    """

    def __init__(
        self,
        conversation: Conversation,
        may_miss_pong: Callable[[], bool],
        pump: Callable[[], None],
    ) -> None:
        self._conversation = conversation
        self._may_miss_pong = may_miss_pong
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._every, self._timeout = _EVERY, _TIMEOUT
        self._sent = 0.0

    def start(self, timeout_millis: int) -> None:
        """Start, after the first ping was sent.

        Args:
            timeout_millis: the session's timeout.
        """
        third = max(1.0, timeout_millis / 1000) / 3
        self._every, self._timeout = min(_EVERY, third), min(_TIMEOUT, third)
        self._sent = self._loop.time()
        self._set_timer()

    def stop(self) -> None:
        """Stop pinging. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        now = self._loop.time()
        due, deadline = now + self._every, self._sent + self._timeout
        if self._conversation.waits_for_pong and deadline > now:
            due = min(due, deadline)
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        late = now - due > self._every / 2
        try:
            if not self._conversation.waits_for_pong:
                self._sent = now
            elif late or now < self._sent + self._timeout:
                return  # it has time left, or may have answered in time
            elif self._may_miss_pong():
                self._sent = now  # it has time again after an answer
                return
            self._conversation.tick(new_opaque())
            self._pump()
        finally:
            if not self._conversation.over:
                self._set_timer()


def new_opaque() -> int:
    """Return a number for a ping, which its pong repeats: never zero."""
    return random.randrange(1, 2**64)


_MUCH = 256 * 1024  # bytes of output above which the client's messages are not read


class Output:
    """Queue of a stream's replies.

    Args:
        call: the stream.
        count: called with the change of the number of waiting bytes.
        progressed: called when the client has read a chunk of a long reply.

    Attributes:
        is_long: whether a long reply is being sent; messages that the client must answer wait
            behind it.
    """

    def __init__(
        self, call: GrpcCall, count: Callable[[int], None], progressed: Callable[[], None]
    ) -> None:
        self.is_long = False
        self._call = call
        self._count = count
        self._progressed = progressed
        self._waiting: deque[bytes | LongReply] = deque()
        self._bytes = 0

    @property
    def is_much(self) -> bool:
        """True if so much waits that the client's messages are not read."""
        return self._bytes > _MUCH

    def add(self, replies: list[Any]) -> None:
        """Append replies to the queue."""
        for reply in replies:
            if isinstance(reply, LongReply):
                self._waiting.append(reply)
                continue
            encoded = frame(reply.SerializeToString())
            self._waiting.append(encoded)
            self._bytes += len(encoded)
            self._count(len(encoded))

    async def flush(self) -> None:
        """Send the queue, as fast as the client reads."""
        while self._waiting:
            if isinstance(self._waiting[0], LongReply):
                await self._send_long()
            else:
                await self._send_short()
            self._call.resume()

    async def _send_short(self) -> None:
        short = []
        while self._waiting and isinstance(encoded := self._waiting[0], bytes):
            short.append(encoded)
            self._waiting.popleft()
        frames = b"".join(short)
        try:
            await self._call.send(frames)
        finally:
            self._bytes -= len(frames)
            self._count(-len(frames))

    async def _send_long(self) -> None:
        reply = self._waiting.popleft()
        assert isinstance(reply, LongReply)
        self.is_long = True
        try:
            for piece in reply.pieces():
                self._count(len(piece))
                try:
                    await self._call.send(piece)
                finally:
                    self._count(-len(piece))
                self._progressed()
                await asyncio.sleep(0)  # other clients are served between two chunks
        finally:
            self.is_long = False

    def close(self) -> None:
        """Stop sending."""
        self._count(-self._bytes)
        self._bytes = 0
        self._waiting.clear()


class YdbAttachedSession(NamedTuple):
    """A session, and its timeout."""

    session: EngineSession
    timeout_millis: int


def check_number(sessions: int, most: int) -> None:
    """Raise `Refused` if the connection has reached its limit of sessions."""
    if sessions > most:
        raise Refused(
            Status.PRECONDITION_FAILED,
            f"this connection has as many sessions as the server's limit sessions_per_connection "
            f"= {most} allows; open another one",
        )


def node_at(path: str, node_of: Callable[[str], str | None]) -> str:
    """Find the node at a path that a client has sent.

    Args:
        path: the path as YDB reads it: slashes at the ends and repeated slashes are ignored.
        node_of: finds the node of a path; ``None`` if it is outside the database.

    Raises:
        Refused: there is no such node.
    """
    path = normalized(path)
    if path == "/":
        raise Refused(Status.BAD_REQUEST, "the path of a node is missing")
    node = node_of(path)
    if node is None:
        raise Refused(Status.NOT_FOUND, f"there is no node {path} in this database")
    try:
        rules.check_path(node)
    except InvalidArgument as error:
        raise Refused(Status.NOT_FOUND, str(error)) from error
    return node


async def attach(
    context: Context, registry: YdbSessionRegistry, node: str, start: Any, stream: SessionStream
) -> YdbAttachedSession:
    """Attach the session named by `start` to `stream`.

    Raises:
        Refused: it cannot be attached.
    """
    window = max(rules.MIN_WINDOW, start.timeout_millis / 1000)  # the model has no shorter ones
    try:
        rules.check_window(window, node)
        rules.check_description(start.description, node)
        rules.check_key(start.protection_key, node)
        check_new_key(start.protection_key, node)
    except InvalidArgument as error:
        raise Refused(Status.BAD_REQUEST, str(error)) from error
    description = seen_from(start.description, stream.client_host)
    own_key = context.session_keys.of_identity(stream.identity)
    how = Attach(node, window, description, "window", start.protection_key or own_key)
    try:
        if start.session_id:
            return await _again(context, registry, how, start, stream)
        async with stream.reader.opening_session():
            return await _new(context, registry, how, start, stream)
    except (LimitReached, InvalidArgument) as error:  # too many, in this server or on the node
        raise Refused(Status.PRECONDITION_FAILED, str(error)) from error
    except TenureError as error:
        raise Refused(status_of(error), str(error)) from error


async def _new(
    context: Context, registry: YdbSessionRegistry, how: Attach, start: Any, stream: SessionStream
) -> YdbAttachedSession:
    session = await stream.engine.attach(how, stream)
    context.counts.sessions.take_anyway()
    registry.join(how.node, session.id, start.timeout_millis, start.seq_no, stream, stream.client)
    return YdbAttachedSession(session, start.timeout_millis)


async def _again(
    context: Context, registry: YdbSessionRegistry, how: Attach, start: Any, stream: SessionStream
) -> YdbAttachedSession:
    number, node = start.session_id, how.node
    try:
        stream.engine.check_session(node, number)
    except AuthenticationFailed as error:
        stream.reader.note_rejected()
        raise Refused(Status.BAD_SESSION, str(error)) from error
    async with stream.reader.attaching_session(), registry.turn(node, number):
        member = registry.find(node, number)
        if member is not None and start.seq_no < member.seq_no:
            raise Refused(Status.BAD_SESSION, f"session {number}: a lower sequence number")
        can = context.engine.capabilities
        millis: int | None = start.timeout_millis
        if not can.adopt or how.recovery_window > can.longest_window:
            if member is None:
                millis = await registry.timeout_of(node, number, stream.reader)
            else:
                millis = member.timeout_millis
            how = replace(how, recovery_window=max(rules.MIN_WINDOW, (millis or 0) / 1000))
        if millis is None:
            raise rules.not_there_to_resume(node, number)
        try:
            session = await _take_over(context, how, number, stream)
        except SessionExpired:
            registry.over(node, number)
            raise
        except (AuthenticationFailed, InvalidArgument) as error:
            stream.reader.note_rejected()
            raise Refused(Status.BAD_SESSION, str(error)) from error
        if registry.find(node, number) is None:
            context.counts.sessions.take_anyway()
        registry.join(node, number, millis, start.seq_no, stream, stream.client)
        return YdbAttachedSession(session, millis)


async def _take_over(
    context: Context, how: Attach, number: int, stream: SessionStream
) -> EngineSession:
    """Attach a session of the store, by any key if its client sent none.

    Servers before 0.2 stored such a session without a key.
    """
    own_key = context.session_keys.of_identity(stream.identity)
    keys = dict.fromkeys((how.key, own_key, b""))
    for key in keys:
        again = replace(how, key=key, session_id=number, assume_dead=True, adopt=True)
        try:
            async with stream.reader.looking_up_session():
                return await stream.engine.attach(again, stream)
        except AuthenticationFailed:
            if not key:
                raise
    raise AssertionError("one of the keys is tried last")


_HOLDS_PER_ATTACHMENT = 2**32
_RENEW_EVERY = 0.3  # seconds between two renewals while a long reply is read


async def serve_session(
    registry: YdbSessionRegistry,
    call: GrpcCall,
    connection: GrpcConnection,
    node_of: Callable[[str], str | None],
    streams: set[SessionStream],
) -> None:
    """Serve a call of the method Session until it ends; see `SessionStream`.

    `node_of` finds the node of a path, or ``None``. The stream is in `streams` until it ends.

    Raises:
        GrpcError: the stream must end with it.
    """
    message = await call.message()
    if message is None:
        return
    request = decoded(Request, message)
    del message
    if request.WhichOneof("request") != "session_start":
        raise GrpcError(GrpcStatus.INVALID_ARGUMENT, "First message must be a SessionStart")
    start = request.session_start
    connection.sessions += 1
    connection.departures.begin(call)
    try:
        await connection.departures.settled(before=call)
        if not start.session_id:
            check_number(connection.sessions, connection.context.limits.sessions_per_connection)
        stream = SessionStream(registry, call, connection, node_at(start.path, node_of))
        streams.add(stream)
        try:
            await stream.run(start)
        finally:
            streams.discard(stream)
    except Refused as refused:
        status = Status.StatusCode.Name(refused.status)
        connection.log(logging.INFO, "session refused", status=status, reason=refused.text)
        await call.send(frame(failure(refused.status, refused.text).SerializeToString()))
    finally:
        connection.sessions -= 1
        connection.departures.over(call)


class SessionStream:
    """A stream: the session's `SessionEvents`, and the call's `Receiver`.

    Args:
        registry: the listener's sessions.
        call: the stream.
        connection: the stream's connection.
        node: the path of the session's node.

    Attributes:
        client: the client, for recognising it when it returns.
        client_host: the address that the client connects from, where known.
        identity: the client's identity.
        engine: the store as the client's identity may use it.
        reader: the schedule of its costly reads.
    """

    def __init__(
        self, registry: YdbSessionRegistry, call: GrpcCall, connection: GrpcConnection, node: str
    ) -> None:
        context = self._context = connection.context
        self._registry = registry
        self._call = call
        self._connection = connection
        self._node = node
        self.identity = call.identity
        self.client = connection.client(call.identity)
        self.engine = GuardedEngine(context.guard, call.identity)
        self.reader = connection.reader(call.identity)
        self.client_host = peer_host(self._connection.peer)
        self._conversation = Conversation(
            node,
            context.limits,
            context.counts.semaphores,
            self._start_watch,
            self._schedule_report,
            registry.timeouts,
            registry.long_replies,
            self.engine.account,
        )
        self._session: EngineSession | None = None
        self._keep = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._output = Output(call, connection.output, self._progressed)
        self._renewed = 0.0
        self._tasks: set[asyncio.Future[Any]] = set()
        self._sizes: deque[int] = deque()  # of the unanswered requests' messages, oldest first
        self._size = 0  # their sum
        self._counted = self._counted_size = 0  # of the requests and bytes that are counted
        self._pumping = self._report_scheduled = self._half_closed = False
        self._error: GrpcError | None = None
        self._pings = Pings(self._conversation, self._may_miss_pong, self._pump)

    async def run(self, start: Any) -> None:
        """Attach the session of `start`, and serve it until the stream has ended.

        Raises:
            Refused: it cannot be attached.
            GrpcError: the stream must end with it.
        """
        try:
            session, timeout_millis = await attach(
                self._context, self._registry, self._node, start, self
            )
            self._session = session
            self._keep = timeout_millis > 0
            self._conversation.started(
                session.id,
                timeout_millis,
                session.attach_number * _HOLDS_PER_ATTACHMENT,
                new_opaque(),
            )
            self._pings.start(timeout_millis)
            self._pump()
            self._call.listen(self)
            await self._serve(session)
        finally:
            self._leave()
            self._output.close()

    async def _serve(self, session: EngineSession) -> None:
        conversation = self._conversation
        while True:
            await self._wake.wait()
            self._wake.clear()
            if conversation.over or self._half_closed or self._error:
                break
            await self._output.flush()
        if conversation.stopped:
            await self._stop(session)
        self._leave()
        await self._output.flush()
        if self._error is not None:
            raise self._error

    async def _stop(self, session: EngineSession) -> None:
        try:
            await session.close()
        except TenureError as error:  # it then survives for its window
            self._conversation.replies.append(failure(status_of(error), str(error)))
        else:
            self._registry.over(self._node, session.id)
            self._session = None
            self._conversation.closed()
        self._encode()

    def _leave(self) -> None:
        """Detach the ended stream from the session. Safe to call twice."""
        self._pings.stop()
        self._conversation.leave()
        self._count_unanswered(0)
        under_way, self._tasks = self._tasks, set()
        for each in under_way:
            each.cancel()  # the answers have no reader; the store carries the operations out
        session, self._session = self._session, None
        if session is None:
            return
        if self._registry.leave(self._node, session.id, self) and not self._keep:
            self._registry.over(self._node, session.id)
            leaving = self._registry.end(session, self._node, under_way)
        else:
            leaving = self._registry.detach(session, self._node, under_way)
        self._connection.departures.over(self._call, leaving)

    def redirect(self) -> None:
        """Make the client attach its session to another server."""
        self._keep = True
        self._fail(Status.UNAVAILABLE, "this server is going away; attach at another one")

    def _fail(self, status: int, text: str) -> None:
        self._conversation.fail(status, text)
        self._pump()

    @property
    def choked(self) -> bool:
        """True while too many replies wait for the client."""
        return self._output.is_much

    def _may_miss_pong(self) -> bool:
        """Return true if a pong may be unread here, or the ping unread at the client."""
        return self.choked or self._connection.overloaded or self._output.is_long

    def received(self, message: bytes) -> None:
        """Handle a message of the client."""
        request = decoded(Request, message)
        if request.WhichOneof("request") not in {"ping", "pong"}:
            self._sizes.append(len(message))
            self._size += len(message)
        del message  # the data is in `request`
        self._conversation.received(request, self._context.clock.now())
        self._pump()

    def half_closed(self) -> None:
        """Record that the client sends no more messages."""
        self._half_closed = True
        self._wake.set()

    def broken(self, error: GrpcError) -> None:
        """End the stream with an error of the call."""
        if error.status is GrpcStatus.UNAUTHENTICATED:
            self._keep = True  # the server ends the stream; the client does not end the session
        self._error = error
        self._wake.set()

    def ended(self, error: SessionExpired) -> None:
        """End the stream, because the session has ended."""
        session = self._session
        if error.taken_over:
            status = Status.BAD_SESSION
        else:
            status = Status.SESSION_EXPIRED
            if session is not None:
                self._registry.over(self._node, session.id)
        self._fail(status, str(error))

    def proven(self, at: float) -> None:
        """Pass a proof to the loop."""
        if threading.get_ident() == self._thread:
            self._proven(at)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._proven, at)

    def _proven(self, at: float) -> None:
        self._conversation.proven(at)
        self._pump()

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Keep the recovered requests."""
        self._conversation.resumed(requests)

    def granted(self, request_id: int, order_id: int | None) -> None:  # noqa: ARG002  (the contract's)
        """Report a grant to the client."""
        self._conversation.granted(request_id)
        self._pump()

    def removed(self, request_id: int, why: Removal) -> None:
        """Report a removal to the client."""
        self._conversation.removed(request_id, why)
        self._pump()

    def detached(self, cause: BaseException | None = None) -> None:
        """Send no proof to the client while the store is out of reach."""

    def attached(self) -> None:
        """Continue after an outage."""

    def _pump(self) -> None:
        """Carry out the operations of the conversation, and send its replies."""
        conversation, session = self._conversation, self._session
        if self._pumping or session is None:
            return
        self._pumping = True
        try:
            while conversation.operations:
                self._carry_out(conversation.operations.popleft(), session)
            if conversation.renew:
                conversation.renew = False
                session.renew()
        finally:
            self._pumping = False
        self._encode()
        self._count_unanswered(0 if conversation.over else conversation.unanswered)
        if conversation.over:
            self._wake.set()

    def _count_unanswered(self, number: int) -> None:
        """Count the unanswered requests and their messages; requests are answered in order."""
        while len(self._sizes) > number:
            self._size -= self._sizes.popleft()
        more, size = number - self._counted, self._size - self._counted_size
        if more or size:
            self._counted, self._counted_size = number, self._size
            self._connection.operations(more, size)

    def _encode(self) -> None:
        replies = self._conversation.replies
        if replies:
            self._output.add(replies)
            replies.clear()
            self._wake.set()

    def _progressed(self) -> None:
        """Count a client as alive that reads a long reply, and sees no ping before its end."""
        if self._session is not None and self._loop.time() - self._renewed > _RENEW_EVERY:
            self._renewed = self._loop.time()
            self._session.renew()

    def _carry_out(self, job: Job, session: EngineSession) -> None:
        operation = job.operation
        try:
            if isinstance(operation, CreateOperation):
                answer: Any = self._create(operation, session)
            elif isinstance(operation, DeleteOperation):
                answer = self._delete(operation, session)
            elif isinstance(operation, DescribeOperation) and operation.is_costly:
                answer = self.reader.describe(partial(operation.start, session))
            else:
                answer = operation.start(session)
        except TenureError as error:
            self._refused(job, error)
            return
        if asyncio.iscoroutine(answer):
            answer = self._loop.create_task(answer)
        if isinstance(answer, asyncio.Future):
            self._tasks.add(answer)
            answer.add_done_callback(partial(self._done, job))
        else:
            self._conversation.answered(job, answer)

    async def _create(self, operation: CreateOperation, session: EngineSession) -> None:
        semaphores = self._context.counts.semaphores
        async with semaphores.creating(self._node, operation.name, self.engine.account):
            await operation.start(session)

    async def _delete(self, operation: DeleteOperation, session: EngineSession) -> None:
        if operation.force:
            facts = {"node": self._node, "name": operation.name, "session": session.id}
            with self._context.audit.action(
                "semaphore deleted by force", self._call.identity, self._connection.peer, **facts
            ):
                await operation.start(session)
        else:
            await operation.start(session)
        self._context.counts.semaphores.deleted(self._node, operation.name)

    def _done(self, job: Job, future: asyncio.Future[Any]) -> None:
        self._tasks.discard(future)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._conversation.answered(job, future.result())
        elif isinstance(error, TenureError):
            self._refused(job, error)
        else:
            self._context.logger.error("an operation failed", exc_info=error)
            self._conversation.fail(Status.INTERNAL_ERROR, "an error of this server")
        self._pump()

    def _refused(self, job: Job, error: TenureError) -> None:
        if isinstance(error, SessionExpired):
            self.ended(error)
            return
        if isinstance(error, LimitReached):
            self._connection.log_limit("refused", error.limit)
        self._conversation.refused(job, error)

    def _start_watch(
        self, name: str, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        assert self._session is not None
        return self._session.watch(name, data=data, owners=owners, changed=changed)

    def _schedule_report(self) -> None:
        if not self._report_scheduled:
            self._report_scheduled = True
            self._loop.call_soon(self._report_changes)

    def _report_changes(self) -> None:
        self._report_scheduled = False
        self._conversation.report_changes()
        self._pump()
