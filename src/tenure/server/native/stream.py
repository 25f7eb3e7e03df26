"""Stream of frames of one connection of the native protocol; a subclass handles the messages.

States (`ConnectionStage`)::

    GREETING ──Hello──► OPEN ──bad input, drain's end──► LEAVING ──► GONE
        └── too late, wrong, refused ──────────────────────┘
    and from each of them to GONE, when the connection is lost or cut off

* **Reading.** Input is carried out within `data_received`, within the connection's share of the
  loop's iteration (`tenure.server.budget`). The rest waits. Reading is paused meanwhile, while too
  many operations are pending, and while the client does not read.
* **Failures.** A message that cannot be decoded, or fails unexpectedly, ends the connection with a
  `Bye` and a line in the log.
* **Writing.** All messages of one iteration of the loop are one write. But the first message after
  input of the client, with no other operation pending, is written at once: it may be a grant that a
  client waits for. While the client does not read, nothing is passed to the transport; beyond the
  limit, in bytes or in seconds, the client is cut off.
* **Deadlines.** `tick` checks once a second the deadlines of the greeting, of the client's silence
  (three heartbeats), of unread output, and of an unread farewell.
* **Close.** `bye` sends the reason, then closes; `cut_off` closes at once.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import IntEnum
from typing import cast

from msgspec import DecodeError, Struct

from tenure.errors import EngineError, EngineUnavailable, InvalidArgument, TenureError
from tenure.server.context import Context, Foreign, answer, explain, foreign
from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting
from tenure.wire.errors import to_wire
from tenure.wire.frames import HEADER_BYTES, FrameReader, FrameTooLong, FrameWriter
from tenure.wire.messages import GREETING_BYTES, Bye, Failed, client_message

HEARTBEAT = 5.0
"""Heartbeat in seconds: a client that has sent nothing for so long sends `Ping`; after three it
counts as silent."""

_TURN = 256  # at most so many messages of one connection are carried out in one iteration
_LOOK = 8  # messages between two checks of the connection's share
_FAREWELL = 5.0  # seconds for a client to read the reason for the close
_MUCH = 512  # bytes, several answers: so much output is written before the iteration ends

_decode = client_message().decode


class ConnectionStage(IntEnum):
    """State of a connection."""

    GREETING = 0
    OPEN = 1
    LEAVING = 2
    GONE = 3


class OutOfOrder(Exception):
    """Error: a message is not allowed in this state."""


class NativeServerStream(asyncio.Protocol, ABC):
    """Stream of one connection; a subclass carries out its messages.

    Attributes:
        peer: the client's address.
        stage: its state.
    """

    def __init__(self, context: Context, greeting: Greeting) -> None:
        self.peer = greeting.peer
        self.stage = ConnectionStage.GREETING
        self._context = context
        self._limits = context.limits
        self._now = context.clock.now
        self._arrived = context.arrived
        self._greeting = greeting
        self._traffic = greeting.traffic
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline = greeting.deadline  # of the greeting, then of the farewell
        self._received_at = self._now()
        # Reading
        self._reader = FrameReader(GREETING_BYTES)
        self._frames: Iterator[memoryview] | None = None  # read, and not yet carried out
        self._behind = bytearray()  # input read after them
        self._size = 0  # bytes of the input that `_frames` are in
        self._begun_at = self._now()  # when the unfinished message began
        self._reading = True
        self._rests = False
        self._in_flight = 0
        self._share = greeting.share(self._go_on)
        # Writing
        self._writer = FrameWriter(self._limits.output_bytes)
        self._unwritten = 0  # bytes in it
        self._most_unwritten = self._limits.output_bytes
        self._changed: dict[tuple[int, int], None] = {}
        self._flushing = False
        self._prompt = True  # the next message may be written at once
        self._blocked_at: float | None = None  # since when the client does not read
        self._held = 0  # bytes of the answers that wait for room
        self._drained: asyncio.Future[None] | None = None  # done when the client reads again

    @abstractmethod
    def _carry_out(self, message: Struct) -> None:
        """Carry out a message of the client. Raises `OutOfOrder` if it is not allowed now."""

    @abstractmethod
    def _write_changed(self) -> None:
        """Move the messages in `_changed` to the output."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and start to count the client's silence."""
        self._transport = cast("asyncio.Transport", transport)
        self._greeting.displaced = self._yield_slot
        if transport.get_extra_info("sslcontext") is None:
            # Output is sent at once, so that the client reads the first answers while others are
            # made. (With TLS the transport would report that the client does not read.)
            self._transport.set_write_buffer_limits(high=0)
        self._received_at = self._now()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Drop input that has not been carried out."""
        self.stage = ConnectionStage.GONE
        self._greeting.over()
        self._share.close()
        self._frames = None
        self._behind.clear()
        self._let_go_on()

    def eof_received(self) -> bool:
        """Return false: the connection closes."""
        return False  # no client closes only its sending side here

    def pause_writing(self) -> None:
        """Stop reading, because the client does not read its answers."""
        self._blocked_at = self._now()
        self._settle_reading()

    def resume_writing(self) -> None:
        """Write the waiting output, and continue with the client's requests."""
        self._blocked_at = None
        self._let_go_on()
        self._flush()
        self._go_on_soon()
        self._settle_reading()

    def data_received(self, data: bytes) -> None:
        """Carry out the messages, within the connection's share of the iteration."""
        self._arrived()
        self._received_at = self._now()
        self._traffic.received += len(data)
        self._prompt = True
        try:
            if self._greeting.refused:
                self._greeting.forget(len(data))
                self._rests = True  # until its turn: uvloop polls again while many clients send
                self._settle_reading()
                self._share.queue()
                return
            if self._frames is not None:
                self._behind += data
                self._count_unread()
                return
            self._feed(data)
        except MemoryError as error:
            self._failed(error)
            return
        if self._share.begin(len(data)):
            self._go_on()
            self._share.end()
        else:
            self._go_on_soon()
            self._settle_reading()
            self._count_unread()

    def _feed(self, data: bytes | bytearray) -> None:
        if not self._reader.kept:
            self._begun_at = self._received_at
        self._size = self._reader.kept + len(data)
        self._frames = self._reader.feed(data)

    def _count_unread(self) -> None:
        """Count what is not carried out; close the connection if that is too much."""
        size = self._reader.kept if self._frames is None else self._size
        try:
            self._greeting.unread.set(size + len(self._behind))
        except LimitReached as error:
            self._context.refused("connection closed", error.limit, peer=self.peer)
            self.bye(EngineUnavailable(str(error)), again=True)

    @property
    def _may_go_on(self) -> bool:
        return (
            self.stage <= ConnectionStage.OPEN
            and self._blocked_at is None
            and self._in_flight < self._limits.operations_in_flight
        )

    def _go_on(self) -> None:
        """Carry out the input, as far as allowed, and send the answers."""
        self._rests = False
        self._flushing = True  # at the end of this, with all messages
        if self._frames is not None and self._may_go_on:
            try:
                self._carry_out_frames()
            except (DecodeError, OutOfOrder) as error:
                self._refuse_to_go_on(error)
            except Exception as error:
                self._failed(error)
            except BaseException:
                self.cut_off()
                raise
        self._flush()
        if self._frames is not None or not self._reading:
            self._settle_reading()
        if self._reader.kept or self._frames is not None or self._greeting.unread.size:
            self._count_unread()

    def _carry_out_frames(self) -> None:
        count = 0
        most = self._limits.operations_in_flight
        while self._frames is not None:
            for frame in self._frames:
                try:
                    message = _decode(frame)
                except (UnicodeDecodeError, RecursionError) as error:
                    raise DecodeError(str(error)) from error
                self._carry_out(message)
                count += 1
                if self._in_flight >= most or self.stage > ConnectionStage.OPEN:
                    return
                if self._blocked_at is not None or self._greeting.refused:
                    return
                if not count % _LOOK and (count >= _TURN or self._share.used_up):
                    self._go_on_soon()
                    return
            if count:
                self._begun_at = self._received_at
            behind, self._behind = self._behind, bytearray()
            self._frames = None
            if behind:
                self._feed(behind)

    def _go_on_soon(self) -> None:
        if self._frames is not None:
            self._share.queue()

    def _settle_reading(self) -> None:
        """Resume reading if no input is pending and the client reads."""
        reading = self._frames is None and self._blocked_at is None
        reading = reading and not self._rests and self._greeting.may_read
        if reading is self._reading or self.stage > ConnectionStage.OPEN:
            return
        self._reading = reading
        assert self._transport is not None
        if reading:
            self._received_at = self._begun_at = self._now()  # its input was not read meanwhile
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _stop_reading(self) -> None:
        """Carry out nothing more: the client is refused."""
        self._greeting.refuse(self._size + len(self._behind))
        self._frames = None
        self._behind.clear()
        self._settle_reading()

    def _refuse_to_go_on(self, error: Exception) -> None:
        """Report an error in the input to the client, and read no more from it."""
        if self.stage is ConnectionStage.GREETING and isinstance(error, FrameTooLong):
            found = foreign(error.length.to_bytes(HEADER_BYTES, "big"))
            if found is not None:
                self._send_away(found)
                return
        what = str(error) or type(error).__name__
        self._context.log(logging.WARNING, "bad message", peer=self.peer, why=what)
        self.bye(InvalidArgument(f"the server cannot read what this client sends: {what}"))

    def _send_away(self, found: Foreign) -> None:
        """Close a connection whose client uses another protocol."""
        self._context.log(logging.WARNING, explain(found), peer=self.peer)
        if found == "PROXY":
            self.bye(EngineUnavailable(explain(found)))
            return
        assert self._transport is not None
        self.stage = ConnectionStage.LEAVING
        self._deadline = self._now() + _FAREWELL
        self._transport.write(answer(found, "tenure's native protocol"))
        self._transport.close()

    def _failed(self, error: Exception) -> None:
        """Close the connection after a defect, or a lack of memory; its client may reconnect."""
        self._context.logger.error(
            "a message failed",
            extra={"facts": {"peer": self.peer, "error": repr(error)}},
            exc_info=None if isinstance(error, MemoryError) else error,
        )
        failure = "the server failed to carry out what this client sent; its log has more"
        try:
            self.bye(EngineUnavailable(failure), again=True)
        except MemoryError:
            self.cut_off()

    def count_pending(self, price: int = 1) -> None:
        """Count a pending operation as `price` operations."""
        self._in_flight += price

    def uncount_pending(self, price: int = 1) -> None:
        """Stop counting an operation that has ended."""
        if self._in_flight >= self._limits.operations_in_flight:
            self._go_on_soon()
        self._in_flight -= price

    # Writing

    def send(self, message: Struct) -> None:
        """Send a message, in this iteration of the loop or when the client reads."""
        if self.stage > ConnectionStage.OPEN:
            return
        try:
            self._unwritten += self._writer.add(message)
        except (DecodeError, UnicodeEncodeError, OverflowError) as error:
            self._report_unsendable(message, error)
        if self._unwritten > self._most_unwritten:
            self._cut_off_slow("it does not read fast enough")
        elif self._unwritten > _MUCH:
            self._flush()  # to know at once whether the client reads
        elif not self._flushing:
            if self._prompt and not self._in_flight:
                self._prompt = False
                self._flush()
            else:
                self._flushing = True
                self._loop.call_soon(self._flush)

    def _report_unsendable(self, message: Struct, error: Exception) -> None:
        """Answer that the answer cannot be sent."""
        self._context.log(logging.ERROR, "an answer cannot be sent", peer=self.peer, why=str(error))
        rid = getattr(message, "rid", 0)
        if rid:
            failure = EngineError(f"the server's answer cannot be sent: {error}")
            self._unwritten += self._writer.add(Failed(rid, to_wire(failure)))

    def _flush(self) -> None:
        self._flushing = False
        if self._blocked_at is not None or self.stage is ConnectionStage.GONE:
            return
        if self._changed:
            self._write_changed()
        if self._unwritten:
            assert self._transport is not None
            self._traffic.sent += self._unwritten
            self._unwritten = 0
            self._transport.write(self._writer.take())

    async def wait_for_room(self, size: int) -> None:
        """Return when an answer of so many bytes may be sent.

        Raises:
            LimitReached: too many bytes of answers are already waiting.
        """
        if self._blocked_at is None:
            return
        if self._held + size > self._limits.output_bytes:
            raise LimitReached(
                "this client requests more than it reads, and has reached the server's limit "
                f"output_bytes = {self._limits.output_bytes}; request less at a time",
                "output_bytes",
            )
        self._held += size
        try:
            await self._writable()
        finally:
            self._held -= size

    async def _writable(self) -> None:
        """Return when the client reads, or the connection is lost."""
        while self._blocked_at is not None and self.stage is not ConnectionStage.GONE:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def _let_go_on(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # Life of the connection

    def bye(self, error: TenureError, *, again: bool = False) -> None:
        """Send the reason for closing the connection, and close it."""
        if self.stage < ConnectionStage.LEAVING:
            self.send_bye(error, again=again)
            self.stage = ConnectionStage.LEAVING
            self._deadline = self._now() + _FAREWELL
            self._flush()
            assert self._transport is not None
            self._transport.close()

    def send_bye(self, error: TenureError, *, again: bool) -> None:
        """Send the client to another server; serve it until it disconnects."""
        if self.stage is ConnectionStage.OPEN or self.stage is ConnectionStage.GREETING:
            self.send(Bye(to_wire(error), again))

    def _yield_slot(self, error: LimitReached) -> None:
        """Close a connection that has not identified itself, because its slot is needed."""
        self.bye(EngineUnavailable(str(error)), again=True)

    def cut_off(self) -> None:
        """Close the connection at once."""
        if self.stage is not ConnectionStage.GONE and self._transport is not None:
            self.stage = ConnectionStage.LEAVING
            self._transport.abort()

    def _cut_off_slow(self, why: str) -> None:
        self._context.log(logging.WARNING, "connection cut off", peer=self.peer, why=why)
        self.cut_off()

    def tick(self, now: float) -> None:
        """Check the deadlines."""
        if self.stage is ConnectionStage.GREETING or self.stage is ConnectionStage.LEAVING:
            if now >= self._deadline:
                if self.stage is ConnectionStage.GREETING:
                    self._context.log(
                        logging.WARNING,
                        "connection cut off",
                        peer=self.peer,
                        why="it did not identify itself in time",
                    )
                self.cut_off()
        elif self._blocked_at is not None:
            if now - self._blocked_at > self._limits.output_time:
                self._cut_off_slow("it does not read")
        elif self._reading and now - self._received_at > 3 * HEARTBEAT:
            self._context.log(logging.INFO, "connection silent", peer=self.peer)
            self.cut_off()
        elif self._is_late(now):
            most = self._limits.message_time
            self._context.refused("connection closed", "message_time", peer=self.peer)
            self.bye(InvalidArgument(f"a message has not come whole within {most:g} s"))

    def _is_late(self, now: float) -> bool:
        """Return true if a message was begun too long ago."""
        unfinished = self._reading and self._frames is None and self._reader.kept > 0
        return unfinished and now - self._begun_at > self._limits.message_time
