"""One connection to a server, from its greeting to its end.

Rules:

* It is used on its loop alone. What is to be sent in one turn of the loop is sent together at the
  end of the turn; but a program that asks for one thing at a time does not wait for that.
* No more requests are under way than the server said it reads, and none are added while the
  transport says that the server does not read: the rest wait here, in order. What is not a request
  (proof, heartbeats, acknowledgements) does not wait.
* After a silence, in either direction, a `Ping` is sent. A server that is silent for three times as
  long is given up. A loop that was held up itself first reads what has arrived.
* Whatever ends it, `connection_lost` follows, `gone` is done then, and its owner is notified once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, cast

from msgspec import DecodeError, Struct

from tenure.background import Failures
from tenure.busy_poll import BusyPoll
from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.native.calls import Call
from tenure.errors import EngineUnavailable, InvalidArgument, TenureError, Unsupported
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire
from tenure.wire.frames import BadFrame, FrameReader, FrameWriter

__all__ = ["LARGEST_ANSWER", "Connection", "ConnectionOwner", "Handlers"]

Handlers: TypeAlias = Mapping[type[Struct], Callable[[Any], None]]

_log = logging.getLogger("tenure")
_failures = Failures("looking after a connection", _log)

LARGEST_ANSWER = 256 * 1024 * 1024
"""Bytes of a message that is accepted from a server that has been greeted."""

_PERHAPS = "is it a tenure server, and does the URL's scheme say rightly whether it speaks TLS?"

_ENOUGH = 768
"""Bytes that are sent at once, though the turn of the loop is not over."""


class ConnectionOwner(Protocol):
    """Receiver of what a connection reports."""

    def handlers(self, connection: Connection) -> Handlers:
        """Return the handler of each message after the greeting."""

    def silence_limit(self, heartbeat: float) -> float:
        """Return the seconds of silence after which a server is given up."""

    def refuse(self, call: Call, error: TenureError) -> None:
        """Fail a call."""


class Connection(asyncio.Protocol):
    """A connection, as its `Link` has it.

    Attributes:
        endpoint: the server.
        greeting: a future of the server's `Welcome`.
        welcome: that, once it has come.
        calls: the requests that were sent and have not been answered, by their numbers.
        useful: the server has answered a request.
        gone: done when the connection is lost.
        why: in words, why it was given up or lost.
        dismissed: other servers should be asked before this one is asked again.
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
        self.greeting.add_done_callback(_look_at)
        self.calls: dict[int, Call] = {}
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
        self._most = 0
        self._waiting: deque[Call] = deque()
        self._paused = False
        self._flushing = False
        self._peak = 1  # the most that were under way since nothing was
        self._heard_at = self._sent_at = self._now()
        self._ticked_at = self._tick_due = 0.0
        self._ticking: asyncio.TimerHandle | None = None

    # What the link asks

    def submit(self, call: Call) -> None:
        """Send a request, as soon as the server reads it."""
        if self._waiting or self._paused or len(self.calls) >= self._most:
            self._waiting.append(call)
        else:
            self._launch(call)

    def send(self, message: Struct) -> None:
        """Send what is no request."""
        self._writer.add(message)
        self._soon()

    def unanswered(self) -> list[Call]:
        """The requests that were not answered, in the order in which they were made."""
        calls = [*self.calls.values(), *self._waiting]
        self.calls.clear()
        self._waiting.clear()
        return calls

    def close(self, why: str) -> None:
        """Give it up, after what is written has been sent. Safe to call twice."""
        self._end(why)
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self, why: str) -> None:
        """Give it up at once. Safe to call twice."""
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

    def _launch(self, call: Call) -> None:
        try:
            self._writer.add(call.message)
        except BadFrame:
            self._owner.refuse(
                call,
                InvalidArgument(
                    f"the server at {self.endpoint} accepts messages of at most "
                    f"{self._writer.largest} bytes; store the data elsewhere and keep its "
                    "address here"
                ),
            )
            return
        call.sent = True
        calls = self.calls
        calls[call.rid] = call
        under_way = len(calls)
        if under_way == 1:
            alone, self._peak = self._peak == 1, 1
            if alone:  # as it was the last time: waiting for others would gain nothing
                self.flush()
                return
        elif under_way > self._peak:
            self._peak = under_way
        self._soon()

    def _soon(self) -> None:
        if len(self._writer) >= _ENOUGH:
            self.flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what was written."""
        self._flushing = False
        transport = self._transport
        if len(self._writer) and transport is not None and not transport.is_closing():
            self._sent_at = self._now()
            try:
                transport.write(self._writer.take())
            except Exception as error:  # what was to be sent is sent on the next connection
                _failures.report(error)
                self.abort(f"what was asked could not be sent: {error!r}")
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
        while waiting and not self._paused and len(self.calls) < self._most:
            self._launch(waiting.popleft())

    # Reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = cast("asyncio.Transport", transport)
        if transport.get_extra_info("sslcontext") is None:
            # What is written goes out at once, so that the server answers the first requests
            # while others are made. (In TLS this would say that there is no reader.)
            self._transport.set_write_buffer_limits(high=0)
        if self.why:  # it was given up meanwhile
            self._transport.abort()
            return
        self._writer.add(self._hello)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle the messages that the bytes complete."""
        self._heard_at = self._now()
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
            self.abort(f"what it says cannot be understood ({error}); {_PERHAPS}")
        self._poll.came(more=bool(self.calls))
        if self._waiting:
            self._launch_waiting()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is closed, and the reason."""
        if self.greeting.done():
            self._end(str(error or "the server closed the connection"))
        else:
            self._end(
                f"it closed the connection without a greeting; {_PERHAPS} One that wants clients' "
                "certificates is shown one with ?tls_cert=FILE&tls_key=FILE"
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
                    f"{self.endpoint} speaks version {welcome.version} of the protocol, and this "
                    f"program version {wire.VERSION}; update the older of the two"
                )
            )
            return
        self.welcome = welcome
        self._reader.largest = LARGEST_ANSWER
        self._writer.largest = welcome.message_bytes
        self._most = max(1, welcome.operations)
        self._handlers = {**self._owner.handlers(self), wire.Bye: self._dismissed}
        self.greeting.set_result(welcome)
        self._tick()

    def _dismissed(self, bye: wire.Bye) -> None:
        error = from_wire(bye.error)
        self.dismissed = True
        if self.greeting.done():
            self.abort(f"it says: {error}")
        else:
            self._fail_greeting(error)

    def _fail_greeting(self, error: TenureError) -> None:
        self.greeting.set_exception(error)
        self.abort(str(error))

    # Heartbeat

    def look_sooner(self) -> None:
        """The server may be given up after a shorter silence than before."""
        beat = self._owner.silence_limit(self.welcome.heartbeat) / 3
        if self._ticking is not None and self._now() + beat < self._tick_due:
            self._ticking.cancel()
            self._tick_in(beat)

    def _tick(self) -> None:
        try:
            self._beat()
        except Exception as error:  # the next connection is looked after anew
            _failures.report(error)
            self.abort(f"it could not be looked after: {error!r}")

    def _beat(self) -> None:
        now = self._now()
        limit = self._owner.silence_limit(self.welcome.heartbeat)
        beat = limit / 3
        if self._ticking is not None and now - self._tick_due > beat:
            # This loop stood still: what has arrived is read before anything is judged.
            self._heard_at = max(self._heard_at, now - beat)
        silent = now - self._heard_at
        if silent >= limit:
            self.dismissed = True  # perhaps another one is better
            self.abort(f"nothing was heard of it for {silent:.1f} s")
            return
        if silent >= beat or self._sent_at < self._ticked_at:
            self.send(wire.Ping())
        self._ticked_at = now
        self._tick_in(beat)

    def _tick_in(self, seconds: float) -> None:
        self._tick_due = self._now() + seconds
        self._ticking = self._loop.call_later(seconds, self._tick)


def _look_at(greeting: asyncio.Future[wire.Welcome]) -> None:
    """Read the failure of a greeting whose waiter has left."""
    if not greeting.cancelled():
        greeting.exception()
