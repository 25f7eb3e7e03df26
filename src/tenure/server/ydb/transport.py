"""gRPC's connections, over HTTP/2, and their limits.

`grpclib.protocol` implements HTTP/2, including its flow control. grpclib's layer above it does not
bound a client's input and unread output, so it is replaced here and in `tenure.server.ydb.calls`.
Rules:

* Input is handled within `data_received`, within the connection's share of the loop's iteration
  (`tenure.server.ydb.http2`). One task for each call does the waiting.
* **Input of a client that does not read is not read.** While the connection's transport is full,
  reading is paused. While a call has much to send, or its connection too many unanswered
  operations, that call's messages stay unread and HTTP/2's flow control stops the client. Output
  that is unread for `output_time`, or exceeds `output_bytes`, ends the connection.
* A connection without an authenticated call within `greeting_time` is closed, and one whose first
  calls are all refused, too.
* HTTP/2 pings are always answered, unless there are too many.

**Departures** (`Departures`) are sessions that the client of a connection has left, until the store
has detached them. A client that cancels or half-closes a session's stream and then makes another
call, for example to drop the session's node, expects the session to be detached by then. HTTP/2
keeps the order of the two, but each call has its own task: the later call waits here for the
earlier streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import AbstractHandler, Stream
from grpclib.utils import Wrapper
from h2.errors import ErrorCodes
from h2.exceptions import H2Error

from tenure.server.auth import ANONYMOUS, REFUSAL_DELAY, Identity, Verdict, peer_of
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.context import explain, foreign
from tenure.server.limits import LimitReached
from tenure.server.reads import Reader, reader_of
from tenure.server.ydb.calls import GrpcCall, GrpcError
from tenure.server.ydb.http2 import Http2Protocol
from tenure.server.ydb.registry import Client, ReturningClients

if TYPE_CHECKING:
    from tenure.server.context import Context
    from tenure.server.listener import Greeting


class Departures:
    """Session streams of one connection, and those that are being detached."""

    def __init__(self) -> None:
        self._streams: dict[GrpcCall, asyncio.Future[None]] = {}
        self._leaving: set[asyncio.Future[None]] = set()

    def begin(self, call: GrpcCall) -> None:
        """Record that `call` is about to attach a session."""
        self._streams[call] = asyncio.get_running_loop().create_future()

    def over(self, call: GrpcCall, detaching: asyncio.Task[None] | None = None) -> None:
        """Record the end of a stream. Safe to call twice; the first call counts.

        Args:
            call: the stream.
            detaching: the task that detaches or ends its session in the store, if there is one.
        """
        future = self._streams.pop(call, None)
        if future is None:
            return
        if detaching is None:
            future.set_result(None)
            return
        self._leaving.add(future)

        def done(_: asyncio.Task[None]) -> None:
            self._leaving.discard(future)
            future.set_result(None)

        detaching.add_done_callback(done)

    async def settled(self, before: GrpcCall | None = None) -> None:
        """Wait until the store has detached every session that the client has left.

        Args:
            before: consider only streams that began before this one.
        """
        waiting = set(self._leaving)
        for call, future in self._streams.items():
            if call is before:
                break
            if call.left:
                waiting.add(future)
        if waiting:
            await asyncio.wait(waiting)

    async def expected(self, seconds: float) -> bool:
        """Wait for the ends of all streams, but only so long; return false if there are none.

        Some clients cancel a stream and make a call at the same time, and the call arrives first.
        """
        waiting = {*self._leaving, *self._streams.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        return bool(waiting)


_REFUSALS = 8  # calls of a stranger that are refused before its connection is closed
_REFUSAL = 0.0005  # seconds that the report of a refusal takes
_SHARE_HELD = 4  # a connection's messages without an answer: this part of an identity's input
_LINGER = 0.5  # seconds between the end of a connection's last call and its own
_CONTENT_TYPES = frozenset({"application/grpc", "application/grpc+proto"})


class _Lost(AbstractHandler):
    """Handler of a lost connection."""

    def accept(
        self, stream: Stream, headers: list[Any], release_stream: Callable[[], None]
    ) -> None:
        """Do nothing: nothing arrives any more."""

    def cancel(self, stream: Stream) -> None:
        """Do nothing: its tasks are cancelled."""

    def close(self) -> None:
        """Do nothing: it is closed."""


_LOST = _Lost()


Method: TypeAlias = "Callable[[GrpcCall, GrpcConnection], Awaitable[None]]"
"""Serves a call until its end; a `GrpcError` sets its status."""


class GrpcConnection(Http2Protocol, AbstractHandler):
    """One client's connection.

    Args:
        context: the state shared by the server's listeners.
        greeting: ends with the first call of an authenticated client.
        methods: handlers of calls, by path.
        returning: the clients that are admitted although the limit of connections is reached.
        connections: the set that contains it while it is open.
        tasks: the set of the running tasks of its calls.

    Attributes:
        identity: the identity of its client's latest authenticated call; each call has its own.
        shown: the client, as known to the transport.
        sessions: number of sessions attached through it.
        departures: sessions that its client has left.
        choked: calls whose messages are not read for now.
        lost: set when the transport is lost.
    """

    def __init__(
        self,
        context: Context,
        greeting: Greeting,
        methods: dict[str, Method],
        returning: ReturningClients,
        connections: set[GrpcConnection],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(self, greeting)
        self.context = context
        self.identity = ANONYMOUS
        self.shown = UNKNOWN_PEER
        self.sessions = 0
        self.departures = Departures()
        self.choked: set[GrpcCall] = set()
        self.lost = asyncio.Event()
        self._methods = methods
        self._returning = returning
        self._returned: Client | None = None
        self._connections = connections
        self._tasks = tasks
        self._operations = 0
        self._undecided: set[GrpcCall] = set()  # a stranger's, neither admitted nor refused
        self._refusals = 0
        self._partial = 0  # bytes of incomplete messages
        self._queued = 0  # bytes that calls have not read
        self._held = 0  # bytes of messages whose operations are not answered
        self._unread_size = 0  # bytes that HTTP/2 has not handled
        self._output = 0
        self._calls: set[GrpcCall] = set()
        self._made = False
        self._readers: dict[Identity, Reader] = {}
        self._greeting_timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._draining = self._cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin HTTP/2, and limit the time of the greeting."""
        self._transport = cast(asyncio.Transport, transport)
        self.shown = peer_of(transport)
        limits = self.context.limits
        self._made = True
        self._greeting.displaced = self._yield_slot
        self._connections.add(self)
        self._greeting_timer = asyncio.get_running_loop().call_later(
            self._greeting.deadline - self.context.clock.now(), self._has_not_greeted
        )
        self.start_http2(
            self._transport,
            streams=limits.sessions_per_connection + 100,
            window=limits.message_bytes,
        )

    def pause_writing(self) -> None:
        """Limit the time for which the client may not read."""
        super().pause_writing()
        self._stalled = asyncio.get_running_loop().call_later(
            self.context.limits.output_time, self.end_slow, "output_time"
        )

    def resume_writing(self) -> None:
        """End the time limit of a client that did not read."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release everything that the connection had."""
        if not self._made:
            return
        self._made = False
        self.lost.set()
        self._connections.discard(self)
        self._greeting.over()
        if self._returned is not None:
            self._returning.lost(self._returned)
        self._stop_greeting_timer()
        for timer in (self._stalled, self._lingering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # No reference cycles are left: collecting thousands of connections would block the loop.
        self.handler = self.processor.handler = _LOST

    def bad_input(self, reason: str, data: bytes) -> None:
        """Log the input of a client that does not use HTTP/2."""
        found = foreign(data)
        if found is not None and found != "HTTP":
            self.log(logging.WARNING, explain(found))
        else:
            self.log(logging.WARNING, "not HTTP/2 as it should be", reason=reason)

    def failed(self, error: Exception) -> None:
        """Log an unexpected error."""
        self.context.logger.error(
            "a connection failed",
            extra={"facts": {"listener": "ydb", "peer": self.peer, "error": repr(error)}},
            exc_info=None if isinstance(error, MemoryError) else error,
        )

    def accept(
        self, stream: Stream, headers: list[Any], release_stream: Callable[[], None]
    ) -> None:
        """Start a task for a new call."""
        call = GrpcCall(self, stream, headers)
        stream.buffer = call  # type: ignore[assignment]  # it needs no more of one
        stream.wrapper = Wrapper()
        self._calls.add(call)
        if self._is_stranger:
            self._undecided.add(call)
        task = asyncio.get_running_loop().create_task(
            self._serve(call, stream.wrapper, release_stream)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, stream: Stream) -> None:
        """Record that a stream was reset: its wrapper has cancelled its task."""
        cast(GrpcCall, stream.buffer).cancelled()

    def close(self) -> None:
        """End the streams of a closed connection; each wrapper cancels its task."""
        self.is_open = False

    async def _serve(self, call: GrpcCall, wrapper: Wrapper, release: Callable[[], None]) -> None:
        try:
            with wrapper:
                status, text = await self._answer(call)
                await call.finish(status, text)
        except (StreamTerminatedError, H2Error):
            pass  # the client has disconnected, or does not need this call any more
        finally:
            with contextlib.suppress(H2Error):
                release()  # which acknowledges unread data
            call.closed()
            self._calls.discard(call)
            self.decide(call)
            self._close_if_drained()

    async def _answer(self, call: GrpcCall) -> tuple[Status, str]:
        try:
            headers = call.metadata
            if headers.get(":method") != "POST":
                raise GrpcError(Status.UNKNOWN, "the method is not POST")
            if headers.get("content-type") not in _CONTENT_TYPES:
                raise GrpcError(Status.UNKNOWN, "the content type is not application/grpc")
            method = self._methods.get(call.path)
            if method is None:
                raise GrpcError(Status.UNIMPLEMENTED, f"there is no method {call.path} here")
            if self._draining:
                raise GrpcError(Status.UNAVAILABLE, "this server is shutting down; try another")
            await method(call, self)
        except GrpcError as error:
            self.log(logging.WARNING, "call refused", status=error.status.name, reason=error.text)
            self.refused()
            return error.status, error.text
        except (StreamTerminatedError, H2Error):
            raise
        except Exception:
            self.context.logger.exception("a call failed: operation=%s", call.path)
            return Status.INTERNAL, "an error of this server; its log has more"
        return Status.OK, ""

    def greeted(self, identity: Identity) -> None:
        """Serve the client, which has made a call with this identity, from now on.

        Raises:
            GrpcError: the limit of connections is reached.
        """
        client, waits = self.client(identity), self._is_stranger
        if waits and self._returned is None and self._returning.let_in(client):
            self._returned = client
        try:
            self._greeting.let_in(identity, returning=self._returned is not None)
        except LimitReached as error:
            self.log_limit("connection refused", error.limit)
            self.drain()
            raise GrpcError(Status.UNAVAILABLE, str(error)) from error
        if waits or self.identity != identity:
            self.identity = identity
            self.log(logging.DEBUG, "connection greeted", identity=identity)
        if waits:
            self._stop_greeting_timer()
            self._undecided.clear()
            self.admitted()

    def refused(self) -> None:
        """Count a refused call; end the connection of a stranger that has had several."""
        self._refusals += 1
        if self._is_stranger and self._refusals == _REFUSALS:
            self.stop_reading()
            self.drain()

    async def delay_refusal(self) -> None:
        """Return when a rejected token may be reported."""
        await asyncio.sleep(REFUSAL_DELAY)
        await self._greeting.turn(_REFUSAL)

    @property
    def _is_stranger(self) -> bool:
        return self._greeting_timer is not None

    @property
    def undecided(self) -> bool:
        """True if input waits until a stranger's call is admitted or refused."""
        return bool(self._undecided)

    def decide(self, call: GrpcCall) -> None:
        """Read on: a stranger's call has been admitted or refused, or needs its message."""
        if call in self._undecided:
            self._undecided.discard(call)
            self.decided()

    def _stop_greeting_timer(self) -> None:
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()
            self._greeting_timer = None

    def _has_not_greeted(self) -> None:
        self.log_limit("connection closed: no call in time", "greeting_time")
        self._go_away()

    def _yield_slot(self, error: LimitReached) -> None:
        """Close the connection, because its slot or its memory is needed."""
        if self.is_open:
            self.h2.close_connection(
                ErrorCodes.ENHANCE_YOUR_CALM, additional_data=str(error).encode()
            )
            self.http2.flush()
            self.processor.close(str(error))

    # Limits

    def client(self, identity: Identity) -> Client:
        """Return the client that calls with this identity."""
        return identity, self._greeting.source

    @property
    def overloaded(self) -> bool:
        """True if it has reached its limit of unanswered operations, or their messages are long."""
        limits = self.context.limits
        if self._held > limits.identity_input_bytes // _SHARE_HELD:
            return True
        return self._operations >= limits.operations_in_flight

    def reader(self, identity: Identity) -> Reader:
        """Return the schedule of the connection's costly reads for this identity."""
        reader = self._readers.get(identity)
        if reader is None:
            reader = reader_of(self.context.reads, identity, self._greeting.source)
            self._readers[identity] = reader
        return reader

    def operations(self, more: int, size: int) -> None:
        """Change the number of unanswered operations, and of the bytes of their messages."""
        was_overloaded = self.overloaded
        self._operations += more
        self._held += size
        if size:
            self._count_input()
        if was_overloaded and not self.overloaded:
            choked, self.choked = self.choked, set()
            self.postpone(choked)

    def count_unread(self, size: int) -> None:
        """Count the bytes that HTTP/2 has not handled."""
        self._unread_size = size
        self._count_input()

    def count_queued(self, size: int) -> None:
        """Change the number of bytes that calls have not read."""
        self._queued += size
        self._count_input()

    def _count_input(self) -> None:
        if not self.is_open:
            return  # `Greeting.over` forgets it
        try:
            received = self._unread_size + self._queued + self._partial
            self._greeting.unread.set(received + self._held)
        except LimitReached as error:
            self.log_limit("connection closed", error.limit)
            self._yield_slot(error)

    def account(self, size: int) -> None:
        """Change the number of bytes of incomplete messages.

        Raises:
            GrpcError: the limit is exceeded.
        """
        self._partial += size
        self._count_input()
        most = 4 * self.context.limits.message_bytes
        if size > 0 and self._partial > most:
            raise GrpcError(
                Status.RESOURCE_EXHAUSTED,
                f"more than {most} bytes of unfinished messages (4 x the limit message_bytes)",
            )

    def output(self, more: int) -> None:
        """Change the number of bytes that wait for the client to read them."""
        self._output += more
        if more > 0 and self._output > self.context.limits.output_bytes:
            self.end_slow("output_bytes")

    def takes(self, stream_id: int, size: int) -> bool:
        """Return true if so many bytes can be sent on a stream at once."""
        ready = self.http2.write_ready.is_set()
        return ready and self.h2.local_flow_control_window(stream_id) >= size

    def end_slow(self, limit: str) -> None:
        """End the connection of a client that does not read."""
        if self._made and not self._cut_off:
            self._cut_off = True
            self.log_limit("connection cut off: the client does not read", limit)
            self._transport.abort()

    # Shutdown

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End calls of identities that may not continue, and the connection if it is theirs."""
        if not self.is_open:
            return False
        why = verdict(None if self._is_stranger else self.identity, self.shown)
        for call in list(self._calls):
            reason = why
            if reason is None and call.authenticated:
                reason = verdict(call.identity, self.shown)
            if reason is not None:
                self.log(logging.WARNING, "call ended", identity=call.identity, why=reason)
                text = f"the server has ended this call: {reason}"
                call.refuse(GrpcError(Status.UNAUTHENTICATED, text))
        if why is None:
            return False
        self.log(logging.WARNING, "connection ended", identity=self.identity, why=why)
        self.context.audit.record("connection ended", self.identity, self.peer, why=why)
        self.drain()
        return True

    def drain(self) -> None:
        """Serve no new calls, and close when the running ones have ended."""
        self._draining = True
        self._close_if_drained()

    def cut_off(self) -> None:
        """Close at once."""
        self._transport.abort()

    def _close_if_drained(self) -> None:
        if self._draining and not self._calls and self.is_open and self._lingering is None:
            # Some clients drop unread messages when they receive GOAWAY.
            self._lingering = asyncio.get_running_loop().call_later(_LINGER, self._go_away)

    def _go_away(self) -> None:
        if self.is_open:
            self.h2.close_connection()
            self.http2.flush()
            self.processor.close("the server has closed the connection")

    @property
    def peer(self) -> str:
        """The client's address."""
        return self._greeting.peer

    def log(self, level: int, event: str, **facts: object) -> None:
        """Log an event, with the client's address."""
        self.context.log(level, event, listener="ydb", peer=self._greeting.peer, **facts)

    def log_limit(self, event: str, limit: str) -> None:
        """Log and count that a limit was enforced: its name in `Limits`."""
        self.context.refused(event, limit, listener="ydb", peer=self._greeting.peer)
