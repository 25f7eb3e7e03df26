"""Connection to one server, from its greeting to its end.

Rules:

* It is used only on its loop. Messages of one iteration of the loop are written together at its
  end, except for a program that sends one request at a time.
* The server's limit of requests in flight is not exceeded, and none are added while the transport
  reports a full buffer. The rest wait here, in order. Other messages do not wait.
* After a silence, in either direction, a `Ping` is sent. If the server is silent for three times as
  long, the connection is dropped. A loop that was blocked first reads received data.
* Each end leads to `connection_lost`, which sets `gone`; the owner is notified once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, cast

from msgspec import DecodeError, Struct

from tenure.background import Failures
from tenure.busy_poll import BusyPoll
from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.native.calls import NativeCall
from tenure.errors import EngineUnavailable, InvalidArgument, TenureError, Unsupported
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire
from tenure.wire.frames import BadFrame, FrameReader, FrameWriter

Handlers: TypeAlias = Mapping[type[Struct], Callable[[Any], None]]

_log = logging.getLogger("tenure")
_failures = Failures("looking after a connection", _log)

LARGEST_ANSWER = 256 * 1024 * 1024
"""Maximum bytes of a message from a server after the greeting."""

_PRICES = wire.PRICES

_CHECK = "Check that it is a tenure server, and that the URL's scheme says whether it uses TLS"

_ENOUGH = 768
"""Bytes that are sent at once, before the end of the loop's iteration."""


class ConnectionOwner(Protocol):
    """Receiver of a connection's reports."""

    def handlers(self, connection: NativeConnection) -> Handlers:
        """Return the handler of each message after the greeting."""

    def silence_limit(self, heartbeat: float) -> float:
        """Return the seconds of silence after which the connection is dropped."""

    def fail(self, call: NativeCall, error: TenureError) -> None:
        """Fail a call."""


class NativeConnection(asyncio.Protocol):
    """Connection to one server.

    Attributes:
        endpoint: the server.
        greeting: a future of the server's `Welcome`.
        welcome: the server's greeting, once it has arrived.
        calls: the unanswered calls, by their numbers.
        useful: whether the server has answered a call.
        gone: done when the connection is lost.
        why: the reason of its end, as text.
        dismissed: whether other servers should be tried before this one.
    """

    welcome: wire.Welcome

    def __init__(
        self,
        owner: ConnectionOwner,
        endpoint: Endpoint,
        hello: wire.Hello,
        clock: Clock,
        busy_poll: float,
    ) -> None:
        """Prepare the protocol; the greeting is sent once the transport is connected."""
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.greeting: asyncio.Future[wire.Welcome] = loop.create_future()
        self.greeting.add_done_callback(_retrieve)
        self.calls: dict[int, NativeCall] = {}
        self.useful = False
        self.gone: asyncio.Future[None] = loop.create_future()
        self.why = ""
        self.dismissed = False
        self._owner = owner
        self._hello = hello
        self._loop = loop
        self._now = clock.now
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(wire.GREETING_BYTES)
        self._writer = FrameWriter(wire.GREETING_BYTES)
        self._decode = wire.server_message().decode
        self._handlers: Handlers = {
            wire.Welcome: self._welcomed,
            wire.Bye: self._dismissed,
        }
        self._poll = BusyPoll(loop.call_soon, busy_poll)
        self._most = self._in_flight = 0  # in the prices of `wire.PRICES`
        self._waiting: deque[NativeCall] = deque()
        self._paused = False
        self._flushing = False
        self._peak = 1  # maximum that was in flight since it was idle
        self._received_at = self._sent_at = self._now()
        self._ticked_at = self._tick_due = 0.0
        self._ticking: asyncio.TimerHandle | None = None

    # Calls by the owner

    def submit(self, call: NativeCall) -> None:
        """Send a call, as soon as the server reads it."""
        if self._waiting or self._paused or self._in_flight >= self._most:
            self._waiting.append(call)
        else:
            self._launch(call)

    def send(self, message: Struct) -> None:
        """Send a message without an answer."""
        self._writer.add(message)
        self._soon()

    def answered(self, rid: int) -> NativeCall | None:
        """Remove and return an unanswered call; ``None`` if there is none of that number."""
        self.useful = True
        return self._take(rid)

    def _take(self, rid: int) -> NativeCall | None:
        call = self.calls.pop(rid, None)
        if call is not None:
            self._in_flight -= _PRICES.get(type(call.message), 1)
        return call

    def forget(self, calls: Iterable[NativeCall]) -> None:
        """Expect no answers: their session has ended, and the server may answer none of them."""
        gone = set[NativeCall]()
        for call in calls:
            if self.calls.get(call.rid) is call:
                self._take(call.rid)
            elif not isinstance(call.message, wire.Close | wire.Detach):
                gone.add(call)
        if self._waiting:
            if gone:
                self._waiting = deque(each for each in self._waiting if each not in gone)
            self._launch_waiting()

    def unanswered(self) -> list[NativeCall]:
        """Remove and return the unanswered calls, in order."""
        calls = [*self.calls.values(), *self._waiting]
        self.calls.clear()
        self._in_flight = 0
        self._waiting.clear()
        return calls

    def close(self, why: str) -> None:
        """Close it after written data has been sent. Safe to call twice."""
        self._end(why)
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self, why: str) -> None:
        """Drop it at once. Safe to call twice."""
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        self.why = self.why or why
        if not self.greeting.done():
            self.greeting.set_exception(EngineUnavailable(f"{self.endpoint}: {self.why}"))
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    # Sending

    def _launch(self, call: NativeCall) -> None:
        try:
            self._writer.add(call.message)
        except BadFrame:
            self._owner.fail(
                call,
                InvalidArgument(
                    f"the message is too large: the server at {self.endpoint} accepts at most "
                    f"{self._writer.largest} bytes. Store the data in another place, and its "
                    "address here"
                ),
            )
            return
        call.sent = True
        calls = self.calls
        calls[call.rid] = call
        self._in_flight += _PRICES.get(type(call.message), 1)
        in_flight = len(calls)
        if in_flight == 1:
            alone, self._peak = self._peak == 1, 1
            if alone:  # as the last time: waiting for others would gain nothing
                self.flush()
                return
        elif in_flight > self._peak:
            self._peak = in_flight
        self._soon()

    def _soon(self) -> None:
        if len(self._writer) >= _ENOUGH:
            self.flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the written messages."""
        self._flushing = False
        transport = self._transport
        if len(self._writer) and transport is not None and not transport.is_closing():
            self._sent_at = self._now()
            try:
                transport.write(self._writer.take())
            except Exception as error:  # the next connection sends them again
                _failures.report(error)
                self.abort(f"messages could not be sent: {error!r}")
                return
            if self.calls:
                self._poll.expect()

    def pause_writing(self) -> None:
        """Stop writing until the transport's buffer has room."""
        self._paused = True

    def resume_writing(self) -> None:
        """Write again."""
        self._paused = False
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        waiting = self._waiting
        while waiting and not self._paused and self._in_flight < self._most:
            self._launch(waiting.popleft())

    # Reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)
        if transport.get_extra_info("sslcontext") is None:
            # Written data is sent at once, so that the server answers the first requests while
            # others are made. (In TLS this would report that there is no reader.)
            self._transport.set_write_buffer_limits(high=0)
        if self.why:  # it was dropped meanwhile
            self._transport.abort()
            return
        self._writer.add(self._hello)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle the messages that these bytes complete."""
        self._received_at = self._now()
        decode, handlers = self._decode, self._handlers
        try:
            for frame in self._reader.feed(data):
                if self.why:
                    return
                message = decode(frame)
                handle = handlers.get(type(message))
                if handle is None:
                    raise BadFrame(f"{type(message).__name__} before the greeting, or a second one")
                handle(message)
        except (DecodeError, RecursionError, UnicodeDecodeError) as error:
            self.abort(f"it sent an invalid message ({error}). {_CHECK}")
        self._poll.came(more=bool(self.calls))
        if self._waiting:
            self._launch_waiting()

    def connection_lost(self, error: Exception | None) -> None:
        """Record that the connection is closed, and the reason."""
        if self.greeting.done():
            self._end(str(error or "the server closed the connection"))
        else:
            self._end(
                f"it closed the connection without a greeting. {_CHECK}; if it "
                "requires client certificates, set ?tls_cert=FILE&tls_key=FILE"
            )
        self._transport = None
        if not self.gone.done():
            self.gone.set_result(None)

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if self.greeting.done():  # its waiter has left
            self.abort("it was too late")
            return
        if welcome.version != wire.VERSION:
            self._fail_greeting(
                Unsupported(
                    f"{self.endpoint} uses version {welcome.version} of the protocol, and this "
                    f"program version {wire.VERSION}. Update the older of the two"
                )
            )
            return
        self.welcome = welcome
        self._reader.largest = LARGEST_ANSWER
        self._writer.largest = welcome.message_bytes
        # Below the number at which the server stops reading, also if the last one is a list.
        self._most = max(1, welcome.operations - wire.READ_PRICE)
        self._handlers = {**self._owner.handlers(self), wire.Bye: self._dismissed}
        self.greeting.set_result(welcome)
        self._tick()

    def _dismissed(self, bye: wire.Bye) -> None:
        error = from_wire(bye.error)
        self.dismissed = True
        if self.greeting.done():
            self.abort(f"it dismissed this client: {error}")
        else:
            self._fail_greeting(error)

    def _fail_greeting(self, error: TenureError) -> None:
        self.greeting.set_exception(error)
        self.abort(str(error))

    # Heartbeat

    def check_sooner(self) -> None:
        """Apply a shorter limit of the silence."""
        beat = self._owner.silence_limit(self.welcome.heartbeat) / 3
        if self._ticking is not None and self._now() + beat < self._tick_due:
            self._ticking.cancel()
            self._tick_in(beat)

    def _tick(self) -> None:
        try:
            self._beat()
        except Exception as error:  # the next connection has its own heartbeat
            _failures.report(error)
            self.abort(f"its heartbeat failed: {error!r}")

    def _beat(self) -> None:
        now = self._now()
        limit = self._owner.silence_limit(self.welcome.heartbeat)
        beat = limit / 3
        if self._ticking is not None and now - self._tick_due > beat:
            # The loop was blocked: first read received data.
            self._received_at = max(self._received_at, now - beat)
        silent = now - self._received_at
        if silent >= limit:
            self.dismissed = True  # perhaps another one is better
            self.abort(f"it was silent for {silent:.1f} s")
            return
        if silent >= beat or self._sent_at < self._ticked_at:
            self.send(wire.Ping())
        self._ticked_at = now
        self._tick_in(beat)

    def _tick_in(self, seconds: float) -> None:
        self._tick_due = self._now() + seconds
        self._ticking = self._loop.call_later(seconds, self._tick)


def _retrieve(greeting: asyncio.Future[wire.Welcome]) -> None:
    """Retrieve the failure of a greeting whose waiter has left."""
    if not greeting.cancelled():
        greeting.exception()
