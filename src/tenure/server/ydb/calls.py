"""One gRPC call on the server: messages in, frames out, a status at the end.

Messages are passed to the call's `Receiver` within the connection's share of the loop's iteration,
and each one counts, even if a frame contains several. If the share is used up, or the receiver or
the connection has no room, messages stay unread and unacknowledged, so that HTTP/2's flow control
stops the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError
from grpclib.metadata import encode_grpc_message
from grpclib.protocol import Stream

from tenure.server.auth.identity import ANONYMOUS

if TYPE_CHECKING:
    from tenure.server.budget import Share
    from tenure.server.context import Context

__all__ = ["CallConnection", "GrpcCall", "GrpcError", "Receiver", "Status", "decoded", "frame"]

_HEADER = 5  # bytes before each message: whether it is compressed, and its length
_PIECE = 4 * 1024  # unread bytes that count as an unfinished message at a time
_CHUNK = 256 * 1024  # bytes that are sent before it is looked whether the client has read them
_INITIAL = [(":status", "200"), ("content-type", "application/grpc+proto")]


class GrpcError(Exception):
    """Error that ends a call with this status."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Receiver(Protocol):
    """Receiver of a call's messages. Only `received` raises, a `GrpcError`."""

    @property
    def choked(self) -> bool:
        """True if it should get no more for now; `GrpcCall.resume` continues."""
        ...

    def received(self, message: bytes) -> None:
        """Handle a message."""
        ...

    def half_closed(self) -> None:
        """Record that the client sends no more."""

    def broken(self, error: GrpcError) -> None:
        """End the call with this error, because its messages cannot be decoded."""


class CallConnection(Protocol):
    """A call's connection, as seen by the call.

    Attributes:
        context: the server's context.
        share: its share of the loop's iteration.
        choked: calls whose messages are not read for now.
        is_open: false once either end has closed it.
    """

    context: Context
    share: Share
    choked: set[GrpcCall]
    is_open: bool

    @property
    def overloaded(self) -> bool:
        """True if it has reached its limit of unanswered operations."""
        ...

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Let the client send so many more bytes on a stream."""

    def postpone(self, calls: Iterable[GrpcCall]) -> None:
        """Let calls continue in a later iteration."""

    def account(self, size: int) -> None:
        """Count bytes of incomplete messages. Raises `GrpcError`."""

    def count_queued(self, size: int) -> None:
        """Count bytes that were received and are not read."""

    def decide(self, call: GrpcCall) -> None:
        """Read on: a call has been decided on, or needs its message."""

    def takes(self, stream_id: int, size: int) -> bool:
        """Return true if so many bytes can be sent on a stream at once."""
        ...

    def end_slow(self, limit: str) -> None:
        """End the connection, because its client does not read."""


def frame(message: bytes) -> bytes:
    """Return a message in wire format."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def decoded(kind: Any, message: bytes) -> Any:
    """Decode a message of a generated class.

    Raises:
        GrpcError: it is invalid, or there is no memory for it.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        text = f"not a {kind.DESCRIPTOR.name}: {error}"
        raise GrpcError(Status.INVALID_ARGUMENT, text) from error
    except MemoryError as error:
        text = f"there is no memory for a {kind.DESCRIPTOR.name} of {len(message)} bytes"
        raise GrpcError(Status.RESOURCE_EXHAUSTED, text) from error


class GrpcCall:
    """One call. For grpclib it is the buffer of its stream: `add`, `eof`, `unacked_size`.

    Attributes:
        metadata: the call's metadata, by lower-case names.
        path: the method, ``/package.Service/Method``.
        authority: the client's name of this server, ``host:port``.
        connection: its connection.
        identity: the client's identity, once it is `authenticated`.
    """

    def __init__(self, connection: CallConnection, stream: Stream, headers: list[Any]) -> None:
        """Start with the headers; the receiver is set later."""
        self.connection = connection
        self.identity = ANONYMOUS
        self.authenticated = False
        self.metadata: dict[str, str] = dict(headers)
        self.path = self.metadata.get(":path", "")
        self.authority = self.metadata.get(":authority", "")
        self._stream = stream
        self._receiver: Receiver | None = None
        self._refusal: GrpcError | None = None
        self._unread = bytearray()  # one buffer: frames of a byte cost no more than their bytes
        self._unacknowledged = 0  # bytes of flow control for it, with the padding
        self._partial = bytearray()
        self._ended = self._cancelled = False
        self._over = False
        self._decoding = False
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None  # of a message that has not come whole

    # Called by grpclib

    def add(self, data: bytes, ack_size: int) -> None:
        """Queue bytes of the client's message, and handle them as soon as allowed."""
        self._unread += data
        self._unacknowledged += ack_size
        self.connection.count_queued(len(data))
        self.more()

    def eof(self) -> None:
        """Record that the client sends no more."""
        self._ended = True
        self.more()

    def cancelled(self) -> None:
        """Record that the client has reset the stream; its task is being cancelled."""
        self._cancelled = True

    def unacked_size(self) -> int:
        """Drop the client's unacknowledged data, and return its size."""
        size = self._unacknowledged
        self._drop_unread()
        return size

    def _drop_unread(self) -> None:
        self.connection.count_queued(-len(self._unread))
        self._unread.clear()
        self._unacknowledged = 0

    # Receiving

    @property
    def left(self) -> bool:
        """True if the client has half-closed or cancelled it."""
        return self._ended or self._cancelled

    def listen(self, receiver: Receiver) -> None:
        """Pass messages to `receiver` from now on, beginning with those already received."""
        self._receiver = receiver
        self.connection.decide(self)
        if self._refusal is not None:
            receiver.broken(self._refusal)
        elif self._unacknowledged or self._partial or self._ended:
            self.connection.postpone((self,))

    def refuse(self, error: GrpcError) -> None:
        """End the call with `error` instead of its next message."""
        self._over = True
        self._refusal = error
        if self._receiver is not None:
            self._receiver.broken(error)

    def resume(self) -> None:
        """Pass on pending messages in the connection's next share."""
        if self in self.connection.choked:
            self.connection.choked.discard(self)
            self.connection.postpone((self,))

    def more(self) -> None:
        """Pass on received messages, as far as they are read, within the connection's share."""
        if self._decoding or self._receiver is None or self._over or not self.connection.is_open:
            return
        self._decoding = True
        try:
            self._hand_out(self._receiver)
        except GrpcError as error:
            self._over = True
            self._receiver.broken(error)
        except Exception:
            self._over = True
            self.connection.context.logger.exception("a call failed: operation=%s", self.path)
            text = "an error of this server; its log has more"
            self._receiver.broken(GrpcError(Status.INTERNAL, text))
        finally:
            self._decoding = False

    def _hand_out(self, receiver: Receiver) -> None:
        partial, connection = self._partial, self.connection
        handled = 0
        while True:
            if receiver.choked or connection.overloaded:
                connection.choked.add(self)
                return
            if handled and partial and connection.share.used_up:
                connection.postpone((self,))
                return
            if (message := self._next_message()) is not None:
                receiver.received(message)
                handled += 1
            elif self._unacknowledged:
                self._take_piece()
            else:
                break
        self._limit_time()
        if self._ended:
            self._over = True
            if partial:
                raise GrpcError(Status.INTERNAL, "the stream ended within a message")
            receiver.half_closed()

    def _take_piece(self) -> None:
        """Move a piece of the unread bytes to the message that is being read."""
        piece = self._unread[:_PIECE]
        del self._unread[:_PIECE]
        acknowledged = len(piece) if self._unread else self._unacknowledged
        self._unacknowledged -= acknowledged
        self._partial += piece
        self.connection.acknowledge(self._id, acknowledged)
        self.connection.count_queued(-len(piece))
        self.connection.account(len(piece))

    def _next_message(self) -> bytes | None:
        partial = self._partial
        if len(partial) < _HEADER:
            return None
        if partial[0]:
            raise GrpcError(Status.UNIMPLEMENTED, "compressed messages are not understood here")
        size = _HEADER + int.from_bytes(partial[1:_HEADER], "big")
        most = self.connection.context.limits.message_bytes
        if size - _HEADER > most:
            raise GrpcError(
                Status.RESOURCE_EXHAUSTED,
                f"a message of {size - _HEADER} bytes; the limit message_bytes is {most}",
            )
        if len(partial) < size:
            return None
        message = bytes(partial[_HEADER:size])
        del partial[:size]
        self._stop_timer()
        self.connection.account(-size)
        return message

    def _limit_time(self) -> None:
        """Limit the time in which the rest of a begun message comes."""
        if self._timer is None and self._partial and not self._ended:
            seconds = self.connection.context.limits.message_time
            text = f"a message has not come whole within {seconds:g} s (the limit message_time)"
            self._timer = asyncio.get_running_loop().call_later(
                seconds, self.refuse, GrpcError(Status.DEADLINE_EXCEEDED, text)
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def message(self) -> bytes | None:
        """Return the first message; ``None`` if the client sends none. `listen` takes over later.

        Raises:
            GrpcError: the message cannot be decoded, or none came in time.
        """
        one = _One()
        self.listen(one)
        try:
            async with asyncio.timeout(self.connection.context.limits.greeting_time):
                return await one.got
        except TimeoutError:
            text = "no request came within the limit greeting_time"
            raise GrpcError(Status.DEADLINE_EXCEEDED, text) from None
        finally:
            if self._receiver is one:
                self._receiver = None

    @property
    def _id(self) -> int:
        return cast(int, self._stream.id)

    # Sending

    async def send(self, frames: bytes) -> None:
        """Send whole frames, as fast as the client reads; if it does not read, cut it off."""
        stream = self._stream
        if not self._begun:
            self._begun = True
            await self._in_time(stream.send_headers(_INITIAL))
        for start in range(0, len(frames), _CHUNK):
            chunk = frames[start : start + _CHUNK]
            if self.connection.takes(self._id, len(chunk)):
                await stream.send_data(chunk)
            else:
                await self._in_time(stream.send_data(chunk))

    async def finish(self, status: Status, text: str = "") -> None:
        """End the call; messages that the client still sends are not read.

        The stream is not reset: some clients would drop unread messages.
        """
        self._over = True
        trailers = [] if self._begun else [*_INITIAL]
        trailers.append(("grpc-status", str(status.value)))
        if text:
            trailers.append(("grpc-message", encode_grpc_message(text)))
        await self._in_time(self._stream.send_headers(trailers, end_stream=True))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.connection.context.limits.output_time):
                await sending
        except TimeoutError:
            self.connection.end_slow("output_time")
            raise StreamTerminatedError("the client does not read") from None

    def closed(self) -> None:
        """End the call, for any reason."""
        self._over = True
        self._receiver = None
        self._stop_timer()
        self.connection.account(-len(self._partial))
        self._partial.clear()
        self._drop_unread()
        self.connection.choked.discard(self)
        self._stream.buffer = None  # type: ignore[assignment]  # breaks a reference cycle


class _One:
    """Receiver of one message."""

    def __init__(self) -> None:
        self.got: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def choked(self) -> bool:
        return self.got.done()

    def received(self, message: bytes) -> None:
        self.got.set_result(message)

    def half_closed(self) -> None:
        if not self.got.done():
            self.got.set_result(None)

    def broken(self, error: GrpcError) -> None:
        if not self.got.done():
            self.got.set_exception(error)
