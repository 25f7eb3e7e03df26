"""gRPC's calls, each a stream of HTTP/2: one request and one answer, or messages both ways.

A stream *waits* while the peer allows no more of them, is *open*, and is *over* when the peer has
ended it, when either side has reset it, or with the connection. `Http2Connection.receive` calls it
with its headers, its data and its end, in this order; nothing is called after the end.

A call is over once: with an answer, or as `CallFailed`, by what the peer says, by the connection's
end, or by its caller (`give_up`, `cancel`). What comes after that is ignored. The code of a failed
call may say whether it was carried out; otherwise that is not known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from enum import IntEnum
from typing import Protocol
from urllib.parse import unquote

from tenure.engines.etcd.frames import ROOM, Fields, Trouble

__all__ = ["CallFailed", "Code", "GrpcCall", "StreamCall", "UnaryCall", "message"]

_PREFIX = 5  # whether it is compressed, and the size


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
    """A call did not succeed.

    Attributes:
        code: how it ended.
        again: it was surely not carried out, and another connection may do better.
    """

    def __init__(self, code: Code, reason: str, *, again: bool = False) -> None:
        """Keep the code and the reason; `again` is the attribute."""
        super().__init__(reason)
        self.code = code
        self.again = again


def message(data: bytes) -> bytes:
    """A message as it is sent."""
    return b"\0" + len(data).to_bytes(4, "big") + data


class _Owner(Protocol):
    """The connection of a call."""

    def push(self, stream: GrpcCall) -> None:
        """Send pending data."""

    def reset(self, stream: GrpcCall, code: Trouble) -> None:
        """End a stream."""


class GrpcCall:
    """A call and its stream, as a base for both kinds.

    Attributes:
        number: of the stream; 0 while it waits.
        pending: what is yet to be sent.
        ends: nothing follows what is pending.
        over: nothing is listened to any more.
    """

    __slots__ = (
        *("connection", "ends", "head", "number", "over", "pending", "room", "window"),
        *("_begun", "_partial", "_wanted"),
    )

    def __init__(self, head: bytes, pending: bytes = b"", *, ends: bool = False) -> None:
        """Start with nothing sent."""
        self.head = head
        self.pending = pending
        self.ends = ends
        self.number = 0
        self.window = 0
        self.room = ROOM
        self.connection: _Owner | None = None
        self.over = False
        self._begun = False
        self._partial = bytearray()
        self._wanted = _PREFIX

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Send more, or that nothing follows, as soon as the peer has room for it."""
        self.pending += data
        self.ends |= ends
        if self.connection is not None:
            self.connection.push(self)

    def reset(self, code: Trouble) -> None:
        """End the stream; nothing more of it is delivered. Safe to call twice."""
        if self.connection is not None:
            self.connection.reset(self, code)

    def cancel(self, why: str = "it is not wanted any more") -> None:
        """End the call; its waiters get `CallFailed`. Safe to call twice."""
        self._fail(Code.CANCELLED, why)

    def give_up(self) -> None:
        """It has taken too long."""
        self._fail(Code.DEADLINE_EXCEEDED, "no answer came in time")

    def _fail(self, code: Code, why: str, *, again: bool = False) -> None:
        if not self.over:
            self.over = True
            self.reset(Trouble.CANCEL)
            self._failed(CallFailed(code, why, again=again))

    # Events of the connection

    def lost(self, why: str, *, again: bool) -> None:
        """End without an answer. `again`: it was surely not acted upon."""
        self._fail(Code.UNAVAILABLE, why, again=again)

    def heard_headers(self, fields: Fields, ended: bool) -> None:
        """The headers, or, if it is ended, perhaps the trailers."""
        if self.over:
            return
        status = fields.get(b":status", b"200" if self._begun else b"")
        if ended and b"grpc-status" in fields:
            code = _CODES.get(fields[b"grpc-status"], Code.UNKNOWN)
            if code is Code.OK and not self._partial:
                self.over = True
                self._succeeded()
            else:
                words = fields.get(b"grpc-message", b"").decode("utf-8", "replace")
                self._fail(code or Code.INTERNAL, unquote(words) or code.name)
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

    def heard_data(self, data: bytes, ended: bool) -> None:
        """A part of the body."""
        if self.over:
            return
        if ended or not self._begun:
            self._fail(Code.INTERNAL, "the answer ended without a status")
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, end = 0, len(data)
        while not self.over:
            self._wanted = _PREFIX
            if end - at < _PREFIX:
                break
            self._wanted += int.from_bytes(data[at + 1 : at + _PREFIX], "big")
            if end - at < self._wanted:
                break
            if data[at]:
                self._fail(Code.INTERNAL, "the answer is compressed, which was not asked for")
                return
            start, at = at + _PREFIX, at + self._wanted
            self._heard(data[start:at])
        if at < end:
            self._partial += data[at:]

    def _heard(self, data: bytes) -> None:
        """A message."""
        raise NotImplementedError

    def _succeeded(self) -> None:
        raise NotImplementedError

    def _failed(self, failure: CallFailed) -> None:
        raise NotImplementedError


class UnaryCall(GrpcCall):
    """One request and one answer.

    Attributes:
        answer: a message, or `CallFailed`.
    """

    __slots__ = ("_message", "answer")

    def __init__(self, head: bytes, request: bytes, answer: asyncio.Future[bytes]) -> None:
        """Start with the request to send; `answer` receives the answer."""
        super().__init__(head, message(request), ends=True)
        self.answer = answer
        self._message: bytes | None = None

    def cancel(self, why: str = "it is not wanted any more") -> None:
        """End it without an answer or an error: its caller has left. Safe to call twice."""
        self.answer.cancel()  # an exception that no task retrieves would be logged
        super().cancel(why)

    def _heard(self, data: bytes) -> None:
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
    """Messages both ways; one task reads."""

    __slots__ = ("_come", "_failure", "_reader")

    def __init__(self, head: bytes) -> None:
        """Start without messages."""
        super().__init__(head)
        self._come: deque[bytes] = deque()
        self._failure: CallFailed | None = None
        self._reader: asyncio.Future[None] | None = None

    def write(self, data: bytes) -> None:
        """Say something; ignored if it is over."""
        if not self.over:
            self.send(message(data))

    def done_writing(self) -> None:
        """Nothing more will be said."""
        if not self.over:
            self.send(b"", ends=True)

    async def read(self) -> bytes | None:
        """The next message; ``None`` at the end.

        What has come is passed on before a failure is. A reader that is cancelled has taken
        nothing.

        Raises:
            CallFailed
        """
        while not self._come:
            if self._failure is not None:
                raise self._failure
            if self.over:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._come.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _heard(self, data: bytes) -> None:
        self._come.append(data)
        self._wake()

    def _succeeded(self) -> None:
        self._wake()

    def _failed(self, failure: CallFailed) -> None:
        self._failure = failure
        self._wake()
