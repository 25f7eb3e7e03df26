"""gRPC over one HTTP/2 connection: calls, and the transport that carries them.

Rules:

* A call ends once: with an answer, or with `CallFailed`, because of the peer, the connection's end,
  or its caller (`time_out`, `cancel`). Later events are ignored. The code of a failed call may show
  whether it was carried out; otherwise that is unknown.
* Only the connection uses the transport. The output of one iteration of the loop is one write,
  except for single messages.
* Output waits in the transport if the member does not read. Its size is bounded, because every
  caller waits for its answer.
* A member that was silent for `_SILENCE` while calls are open gets a ping; if it does not answer,
  the connection is dropped. etcd allows a ping every five seconds.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from enum import IntEnum
from typing import cast
from urllib.parse import unquote

from tenure.background import BackgroundTimer, Failures
from tenure.engines.etcd.http2 import Fields, Http2Connection, Http2Stream, Trouble

_failures = Failures("checking a connection to etcd", logging.getLogger("tenure"))

_SILENCE, _SIGN_OF_LIFE = 10.0, 3.0
"""Seconds of silence before a ping, and seconds for its answer."""
_PONG = 0.05
"""Seconds of delay before a ping is answered. While one is unanswered, a server of gRPC in Go does
not send further pings, to measure the bandwidth, with each request."""
_FEW = 3
_CLOSING = 1.0
_PREFIX = 5  # of a message: whether it is compressed, and its size


class Code(IntEnum):
    """Status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_CODES = {b"%d" % code: code for code in Code}


class CallFailed(Exception):
    """Error: a call did not succeed.

    Attributes:
        code: the status.
        again: whether it was certainly not carried out, and may succeed on another connection.
    """

    def __init__(self, code: Code, reason: str, *, again: bool = False) -> None:
        """Keep the code and the reason; `again` is the attribute."""
        super().__init__(reason)
        self.code = code
        self.again = again


def message(data: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(data).to_bytes(4, "big") + data


class GrpcCall(Http2Stream):
    """A call, as the base of both kinds.

    Attributes:
        over: whether further events are ignored.
    """

    __slots__ = ("_begun", "_partial", "_size", "over")

    def __init__(self, head: bytes, pending: bytes = b"", *, ends: bool = False) -> None:
        super().__init__(head, pending, ends=ends)
        self.over = False
        self._begun = False
        self._partial = bytearray()
        self._size = _PREFIX  # size of the message that begins there, as far as known

    def cancel(self, why: str = "it was cancelled") -> None:
        """End the call; its waiters get `CallFailed`. Safe to call twice."""
        self._fail(Code.CANCELLED, why)

    def time_out(self) -> None:
        """End the call at its deadline."""
        self._fail(Code.DEADLINE_EXCEEDED, "no answer came in time")

    def _fail(self, code: Code, why: str, *, again: bool = False) -> None:
        if not self.over:
            self.over = True
            self.reset(Trouble.CANCEL)
            self._failed(CallFailed(code, why, again=again))

    def lost(self, why: str, *, again: bool) -> None:
        """End the call without an answer."""
        self._fail(Code.UNAVAILABLE, why, again=again)

    def received_headers(self, fields: Fields, ended: bool) -> None:
        """Process headers, or trailers at the end."""
        if self.over:
            return
        status = fields.get(b":status", b"200" if self._begun else b"")
        if ended and b"grpc-status" in fields:
            code = _CODES.get(fields[b"grpc-status"], Code.UNKNOWN)
            if code is Code.OK and not self._partial:
                self.over = True
                self._succeeded()
            else:
                reason = fields.get(b"grpc-message", b"").decode("utf-8", "replace")
                self._fail(code or Code.INTERNAL, unquote(reason) or code.name)
        elif status[:1] == b"1" and not ended:
            pass  # more headers follow
        elif status != b"200":
            self._fail(Code.UNAVAILABLE, f"HTTP status {status.decode('ascii', 'replace')}")
        elif ended or self._begun:
            self._fail(Code.INTERNAL, "the answer ended without a status")
        elif not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            self._fail(Code.INTERNAL, "the answer is not gRPC's")
        else:
            self._begun = True

    def received_data(self, data: bytes, ended: bool) -> None:
        """Process a part of the body."""
        if self.over:
            return
        if ended or not self._begun:
            self._fail(Code.INTERNAL, "the answer ended without a status")
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._size:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, end = 0, len(data)
        while not self.over:
            self._size = _PREFIX
            if end - at < _PREFIX:
                break
            self._size += int.from_bytes(data[at + 1 : at + _PREFIX], "big")
            if end - at < self._size:
                break
            if data[at]:
                self._fail(Code.INTERNAL, "the answer is compressed, which was not requested")
                return
            start, at = at + _PREFIX, at + self._size
            self._received(data[start:at])
        if at < end:
            self._partial += data[at:]

    def _received(self, data: bytes) -> None:
        """Process a message."""
        raise NotImplementedError

    def _succeeded(self) -> None:
        raise NotImplementedError

    def _failed(self, failure: CallFailed) -> None:
        raise NotImplementedError


class UnaryCall(GrpcCall):
    """A call with one request and one answer.

    Attributes:
        answer: a message, or `CallFailed`.
    """

    __slots__ = ("_message", "answer")

    def __init__(self, head: bytes, request: bytes, answer: asyncio.Future[bytes]) -> None:
        """Start with the request to send; `answer` receives the answer."""
        super().__init__(head, message(request), ends=True)
        self.answer = answer
        self._message: bytes | None = None

    def cancel(self, why: str = "it was cancelled") -> None:
        """End it without an answer or an error: its caller has left. Safe to call twice."""
        self.answer.cancel()  # an exception that no task retrieves would be logged
        super().cancel(why)

    def _received(self, data: bytes) -> None:
        if self._message is None:
            self._message = data
        else:
            self._fail(Code.INTERNAL, "there is more than one answer")

    def _succeeded(self) -> None:
        if self._message is None:
            self._failed(CallFailed(Code.INTERNAL, "there is no answer"))
        elif not self.answer.done():
            self.answer.set_result(self._message)

    def _failed(self, failure: CallFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure)


class StreamCall(GrpcCall):
    """A call with messages both ways; one task reads."""

    __slots__ = ("_failure", "_messages", "_reader")

    def __init__(self, head: bytes) -> None:
        super().__init__(head)
        self._messages: deque[bytes] = deque()
        self._failure: CallFailed | None = None
        self._reader: asyncio.Future[None] | None = None

    def write(self, data: bytes) -> None:
        """Send a message; ignored if the call has ended."""
        if not self.over:
            self.send(message(data))

    def done_writing(self) -> None:
        """End our side of the call."""
        if not self.over:
            self.send(b"", ends=True)

    async def read(self) -> bytes | None:
        """Return the next message; ``None`` at the end.

        Messages that arrived before a failure are returned first. A cancelled reader consumes
        nothing.

        Raises:
            CallFailed
        """
        while not self._messages:
            if self._failure is not None:
                raise self._failure
            if self.over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    _succeeded = _wake

    def _received(self, data: bytes) -> None:
        self._messages.append(data)
        self._wake()

    def _failed(self, failure: CallFailed) -> None:
        self._failure = failure
        self._wake()


class GrpcConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        protocol: its HTTP/2 state.
        ready: done when the member has sent its settings; fails with the connection.
        gone: done when the transport is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._received_at = 0.0
        self._pinged_after = 0.0  # `_received_at` when the latest ping was sent
        self._timer = BackgroundTimer(loop, loop.time, self._check, _failures)
        self._pong: asyncio.TimerHandle | None = None
        self._why = ""
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.protocol = Http2Connection(self._schedule)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit it
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            self.end("it does not support HTTP/2")
            return
        self._received_at = self._loop.time()
        self._timer.by(self._received_at + _SILENCE)
        self._write()

    def begin(self, call: GrpcCall) -> None:
        """Begin a call; it is written immediately if little else is pending."""
        protocol = self.protocol
        at_once = not protocol.scheduled and len(protocol.streams) < _FEW
        protocol.scheduled |= at_once
        protocol.begin(call)
        if at_once:
            self._write()

    def _schedule(self) -> None:
        self._loop.call_soon(self._write)

    def _write(self) -> None:
        protocol = self.protocol
        if protocol.out and self._transport is not None:
            self._transport.write(protocol.take())
        protocol.scheduled = False

    def data_received(self, data: bytes) -> None:
        """Process received data."""
        self._received_at = self._loop.time()
        protocol = self.protocol
        is_scheduled, protocol.scheduled = protocol.scheduled, True
        protocol.receive(data)
        if protocol.pongs and self._pong is None:
            self._pong = self._loop.call_later(_PONG, self._answer_pings)
        if not is_scheduled:
            self._schedule()  # after the callers that were waiting for this
        if protocol.ready and not self.ready.done():
            self.ready.set_result(None)
        if protocol.draining and not protocol.streams:
            self.end(protocol.over or "the member is leaving")

    def _answer_pings(self) -> None:
        self._pong = None
        self.protocol.pong()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all calls."""
        self._transport = None
        self._timer.cancel()
        if self._pong is not None:
            self._pong.cancel()
        self.protocol.fail(self._why or str(error or "the member closed the connection"))
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self.protocol.over))
            self.ready.exception()  # there may be no waiter
        self.gone.set_result(None)

    def _check(self) -> None:
        """Ping a silent member, and drop the connection without an answer."""
        now, protocol = self._loop.time(), self.protocol
        if not protocol.streams and protocol.draining:
            self.end("its last call has ended")
        elif not protocol.streams:
            self._timer.by(now + _SILENCE)
        elif now - self._received_at < _SILENCE:
            self._timer.by(self._received_at + _SILENCE)
        elif self._pinged_after != self._received_at:
            self._pinged_after = self._received_at
            protocol.ping()
            self._timer.by(now + _SIGN_OF_LIFE)
        else:
            self.end("the member gives no sign of life")
            if self._transport is not None:
                self._transport.abort()  # `close` would wait until everything is written

    def end(self, why: str) -> None:
        """Close the connection; its calls fail. Safe to call twice."""
        self._why = self._why or why
        self.protocol.close(self._why)
        if self._transport is not None:
            self._write()
            self._transport.close()

    async def aclose(self, why: str) -> None:
        """Close the connection, and wait for its end. Safe to call twice."""
        self.end(why)
        if self._transport is not None:
            await asyncio.wait([self.gone], timeout=_CLOSING)
        if self._transport is not None:
            self._transport.abort()
            await asyncio.wait([self.gone])
