"""One connection of an HTTP client: uvicorn's protocol, within the server's limits.

States: *greeting*, *in* (its client has shown an identity, or none is required), *gone*.

* **Reading.** Input is parsed in the connection's share of the loop's iteration
  (`tenure.server.budget`), that of a stranger in its turns alone. A connection carries out one
  request at a time.
* **Strangers** stay greetings: they have `greeting_time`, yield their slots when there are too
  many, and are closed after one response. Health checks need no more.
* **Deadlines** are checked by `tick`: of the greeting, of an unfinished request, of unread output.
* **Sizes.** The head of a request has at most `HEAD_BYTES`, its body `BODY_BYTES`.
* **Close.** `drain` closes it after the response in progress, `cut_off` at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tenure.server.auth import ANONYMOUS, Identity, Verdict, peer_of
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.context import Context, explain, foreign
from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting, Listener

HEAD_BYTES: Final = 16 * 1024
"""Longest first line and headers of a request."""

BODY_BYTES: Final = 64 * 1024
"""Longest body of a request: the forms and commands of the console are short."""

_MOST_UNREAD = 64 * 1024  # bytes that wait for a turn before the connection is read no more
_REQUEST = 0.001  # seconds that a request takes after it was parsed


class _Log:
    """The log of uvicorn's protocol, as lines of the server's log."""

    level = logging.WARNING

    def __init__(self, context: Context, peer: str) -> None:
        self._context = context
        self._peer = peer

    def warning(self, why: str) -> None:
        self._context.log(logging.WARNING, "bad request", peer=self._peer, why=why)

    def error(self, why: str, *_: object, exc_info: BaseException | None = None) -> None:
        self._context.logger.error(
            "a request failed",
            extra={"facts": {"peer": self._peer, "error": repr(exc_info or why.strip())}},
            exc_info=exc_info,
        )


class HttpServerConnection(H11Protocol):
    """Server end of a connection.

    Attributes:
        peer: the client's address.
        shown: the client, as known to its transport.
        identity: the latest identity that the client has shown.
        gone: done when the connection is lost.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        listener: Listener[HttpServerConnection],
        greeting: Greeting,
        config: Config,
        state: ServerState,
    ) -> None:
        super().__init__(config, state, {"connection": self})
        self.peer = greeting.peer
        self.shown = UNKNOWN_PEER
        self.identity = ANONYMOUS
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self.logger = cast("logging.Logger", _Log(listener.context, greeting.peer))
        self._listener = listener
        self._context = listener.context
        self._greeting = greeting
        self._traffic = greeting.traffic
        self._now = listener.context.clock.now
        self._is_in = False
        self._is_fresh = True  # nothing was parsed
        self._pending = bytearray()  # received, and not parsed
        self._paused = False  # while it waits
        self._received = 0  # bytes since the latest response
        self._begun_at: float | None = None  # when the unfinished request began
        self._blocked_at: float | None = None  # since when the client does not read
        self._share = greeting.share(self._go_on, _REQUEST)

    @property
    def is_stranger(self) -> bool:
        """True until the client has shown an identity, if the server requires one."""
        return not self._is_in

    def let_in(self, identity: Identity) -> None:
        """Serve the client from now on.

        Raises:
            LimitReached: the limit of connections is reached.
        """
        try:
            self._greeting.let_in(identity)
        except LimitReached as error:
            self._context.refused("connection refused", error.limit, peer=self.peer)
            raise
        self._is_in = True
        self.identity = identity

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection with its listener."""
        made = cast("asyncio.Transport", transport)
        super().connection_made(_CountedTransport(made, self._traffic))  # type: ignore[arg-type]
        self.shown = peer_of(transport)
        self._greeting.displaced = lambda _: self.cut_off()
        self._listener.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what has not been carried out."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._greeting.over()
        self._share.close()
        self._pending.clear()
        self._listener.left(self)
        self.gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse the input, within the connection's share of the iteration."""
        self._traffic.received += len(data)
        self._received += len(data)
        if self._begun_at is None:
            self._begun_at = self._now()
        waits = bool(self._pending)
        self._pending += data
        if not self._has_room():
            return
        if not waits and self._share.begin(len(data)):
            self._parse()
            self._share.end()
            return
        self._share.queue()
        if not self._paused and (self._share.stranger or len(self._pending) > _MOST_UNREAD):
            self._paused = True
            self.transport.pause_reading()

    def _has_room(self) -> bool:
        """Count the input of the request; end the connection if it is too much."""
        most = HEAD_BYTES + 2 * BODY_BYTES  # requests that follow one another too
        try:
            if self._received > most:
                raise LimitReached(f"a request has more than {most} bytes", "message_bytes")
            self._greeting.unread.set(self._received)
        except LimitReached as error:
            self._context.refused("connection closed", error.limit, peer=self.peer)
            self.cut_off()
            return False
        return True

    def _go_on(self) -> None:
        """Parse the input that has waited for a turn."""
        self._parse()
        if self._paused:
            self._paused = False
            if not (self.flow.read_paused or self.transport.is_closing()):
                self.transport.resume_reading()

    def _parse(self) -> None:
        if self.transport.is_closing():
            self._pending.clear()
            return
        data = bytes(self._pending)
        self._pending.clear()
        if not data:
            return  # h11 takes it for the end of the input
        if self._is_fresh and self._begins_foreign(data):
            return
        self._is_fresh = False
        try:
            super().data_received(data)
        except (h11.ProtocolError, UnicodeDecodeError, ValueError) as error:
            self._context.log(logging.WARNING, "bad request", peer=self.peer, why=error)
            self.cut_off()

    def _begins_foreign(self, data: bytes) -> bool:
        """Close a connection whose client uses another protocol."""
        found = foreign(data)
        if found is None or found == "HTTP":
            return False
        self._context.log(logging.WARNING, explain(found), peer=self.peer)
        self.cut_off()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP; during another response, end the connection instead."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its response is not sent any more
            self.cycle.message_event.set()
            self.cut_off()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """Begin to count the next request."""
        self._received = len(self._pending)
        self._begun_at = self._now() if self._pending else None
        self._greeting.unread.set(self._received)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Limit the time for which the client may not read."""
        self._blocked_at = self._now()
        super().pause_writing()

    def resume_writing(self) -> None:
        """End the time limit of a client that did not read."""
        self._blocked_at = None
        super().resume_writing()

    # Life of the connection

    def tick(self, now: float) -> None:
        """Check the deadlines."""
        limits = self._context.limits
        if not self._is_in and now >= self._greeting.deadline:
            self._end_late("greeting_time")
        elif self._blocked_at is not None and now - self._blocked_at > limits.output_time:
            self._end_late("output_time")
        elif self._is_late(now - limits.message_time):
            self._end_late("message_time")

    def _is_late(self, earliest: float) -> bool:
        """Return true if a request was begun too long ago, and has not come whole."""
        whole = self.cycle is not None and not self.cycle.more_body
        unfinished = not whole or self.cycle.response_complete
        return unfinished and self._begun_at is not None and self._begun_at < earliest

    def _end_late(self, limit: str) -> None:
        self._context.refused("connection closed", limit, peer=self.peer)
        self.cut_off()

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End the connection if its identity may not continue."""
        if self.transport.is_closing():
            return False
        why = verdict(self.identity if self._is_in else None, self.shown)
        if why is None:
            return False
        self._context.log(
            logging.WARNING, "connection ended", peer=self.peer, identity=self.identity, why=why
        )
        self._context.audit.record("connection ended", self.identity, self.peer, why=why)
        self.cut_off()
        return True

    def drain(self) -> None:
        """Close the connection once it has no response in progress."""
        if not self.transport.is_closing():
            self.shutdown()

    def cut_off(self) -> None:
        """Close the connection at once. Safe to call twice."""
        if self.transport is not None:
            self.transport.abort()


class _CountedTransport:
    """A transport that counts what is written to it; everything else is the transport's.

    Args:
        transport: the transport of the connection.
        traffic: the counts of the listener.
    """

    def __init__(self, transport: asyncio.Transport, traffic: Any) -> None:
        self._transport = transport
        self._traffic = traffic
        self._write = transport.write

    def write(self, data: bytes) -> None:
        self._traffic.sent += len(data)
        self._write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
