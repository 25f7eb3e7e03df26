"""Stream of one session: attaches the session to the store, and drives its conversation.

A session is renewed in the store when its client answers a ping, sends one, or reads a long reply.
When the stream ends without a SessionStop, the session is detached and survives for its window.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tenure.engines.contract import EngineSession, Removal
from tenure.errors import SessionExpired, TenureError
from tenure.model import Recovered
from tenure.server.accept import peer_host
from tenure.server.limits import LimitReached
from tenure.server.ydb.attaching import attach, check_number, node_at
from tenure.server.ydb.calls import GrpcCall, GrpcError, decoded, frame
from tenure.server.ydb.calls import Status as GrpcStatus
from tenure.server.ydb.core import Conversation, Job
from tenure.server.ydb.messages import Refused, Request, Status, failure, status_of
from tenure.server.ydb.operations import CreateOperation, DeleteOperation, DescribeOperation
from tenure.server.ydb.output import Output
from tenure.server.ydb.pings import Pings, new_opaque

if TYPE_CHECKING:
    from tenure.server.ydb.registry import YdbSessionRegistry
    from tenure.server.ydb.transport import GrpcConnection

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
        self.engine = context.guard.engine(call.identity)
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
        self._counted = 0
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
        self._connection.operations(-self._counted)
        self._counted = 0
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
        counted = 0 if conversation.over else conversation.unanswered
        if counted != self._counted:
            more, self._counted = counted - self._counted, counted
            self._connection.operations(more)
        if conversation.over:
            self._wake.set()

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
                answer = self._describe(operation, session)
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

    async def _describe(self, operation: DescribeOperation, session: EngineSession) -> Any:
        async with self.reader.lock, self.reader:
            return await operation.start(session)

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
            self._connection.log(logging.WARNING, "refused", limit=error.limit)
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
