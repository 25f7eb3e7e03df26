"""Stream of a connection: requests in order, and collected replies.

* **Reading.** Input is carried out within `data_received`, within the connection's share of the
  loop's iteration (`tenure.server.budget`). Reading is paused while much input is pending, or while
  the client does not read its replies. It continues while the client waits for a lock, because a
  disconnect must be noticed; a client that keeps sending meanwhile is cut off.
* **End of input.** A client that half-closes right after its requests, like ``printf … | nc``, gets
  every reply, also that of a wait. An end of input that comes later, during a wait, or in the
  middle of a request, counts as a disconnect: the wait ends.
* **Writing.** The replies of an iteration are one write. While the client does not read, nothing
  more is carried out.
* **Busy.** While a request is pending, later requests wait.

**Half-closed** connections and disconnected clients are distinguished (`probe`). Both look the same
at first. The kernel of a disconnected client rejects data that is written to it or, about a minute
after the end, a probe.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import select
import socket
import termios
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tenure.server.context import Context, Foreign, answer, explain, foreign, is_http
from tenure.server.dflockd.claims import WAITING, Claim
from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting
from tenure.wire.lines import ERROR, RawRequest, RequestReader

_PROBES = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def probe(transport: asyncio.Transport) -> None:
    """Let the kernel detect a disconnected client; `is_gone` has the result."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES:
        if hasattr(socket, option):  # not all systems support all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_gone(transport: asyncio.Transport) -> bool:
    """Return true if the client is known to have disconnected."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_read(transport: asyncio.Transport) -> bool:
    """Return true if all written data has reached the client's kernel."""
    sock = transport.get_extra_info("socket")
    if transport.get_write_buffer_size():
        return False
    if sock is None:
        return True
    unread = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, unread)
    return not unread[0]


_TURN = 2 * 1024  # bytes that are split into requests at a time
_LOOK = 8  # requests after which it is seen whether its share is used up
_LONG = 1024  # bytes of a reply that does not wait for others
_MUCH = 64 * 1024  # unread bytes with which it is not read from
_TOO_MUCH = 512 * 1024  # unread bytes of a client that waits for a lock
_FAREWELL = 5.0  # seconds for a client to read its last word
_TOGETHER = 1.0  # seconds between a request and the end of input of a client that half-closes


class DflockdServerStream(asyncio.Protocol):
    """Stream of one connection.

    Args:
        context: the server's context.
        greeting: its entry among the server's connections.
        commands: the commands, as defined by `tenure.server.dflockd.commands`.
    """

    __slots__ = (
        "_arrived",
        "_awaited",
        "_blocked_at",
        "_busy",
        "_commands",
        "_context",
        "_fresh",
        "_greeting",
        "_leaving",
        "_lines",
        "_loop",
        "_now",
        "_over",
        "_reader",
        "_reading",
        "_received_at",
        "_replies",
        "_request",
        "_requests",
        "_rests",
        "_share",
        "_special",
        "_traffic",
        "_transport",
        "_unread",
        "peer",
    )

    def __init__(
        self,
        context: Context,
        greeting: Greeting,
        commands: Mapping[str, Callable[[Any, str, str, float], bytes | None]],
    ) -> None:
        self.peer = greeting.peer
        self._greeting = greeting
        self._traffic = greeting.traffic
        self._commands = commands
        self._context = context
        self._now = context.clock.now
        self._arrived = context.arrived
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # Reading
        self._reader = RequestReader()
        self._requests: deque[RawRequest] = deque()  # read, and not carried out
        self._unread = bytearray()  # arrived behind them
        self._reading = True
        self._rests = False  # a stranger, until its next turn
        self._special = True  # it is greeting or leaving
        self._fresh = True  # nothing has been received
        self._over = False  # its client says nothing more
        self._received_at = self._now()
        self._lines = 0
        self._share = greeting.share(self._go_on)
        # The request that it is busy with
        self._busy = False
        self._request: RawRequest = ("", "", "")
        self._awaited: Claim | None = None
        # Writing
        self._replies: list[bytes] = []
        self._blocked_at: float | None = None  # since when the client does not read
        self._leaving: asyncio.TimerHandle | None = None  # set once it is being closed

    def greet(self, requests: list[RawRequest]) -> list[RawRequest]:
        """Check the first request by further rules; return the requests to carry out."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the connection: its client has sent everything, and every reply is written."""
        raise NotImplementedError

    def leave(self, word: bytes) -> None:
        """Send a last reply, and close the connection once the client has read it."""
        if self._transport is None or self._leaving is not None:
            return
        self._special = True
        if word:
            self._replies.append(word)
        self._flush()
        self._close()

    def _close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = self._loop.call_later(_FAREWELL, self.cut_off)
        if self._transport is not None:
            self._transport.close()

    def cut_off(self) -> None:
        """Close it now. Safe to call twice."""
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """Stop reading, because the client does not read its replies."""
        self._blocked_at = self._now()
        self._settle_reading()

    def resume_writing(self) -> None:
        """Continue with the client's requests."""
        self._blocked_at = None
        self._go_on_soon()
        self._settle_reading()

    def eof_received(self) -> bool:
        """Return true if the connection stays open for pending replies."""
        self._over = True
        if self._transport is None or self._transport.get_extra_info("sslcontext") is not None:
            return False  # TLS has no half-closed connections here
        late = self._now() - self._received_at > _TOGETHER
        if self._awaited is not None and (late or self._is_cut_short()):
            return False
        stays = self._busy or bool(self._requests or self._unread)  # it closes when all are done
        if stays:
            probe(self._transport)
        return stays

    def data_received(self, data: bytes) -> None:
        """Carry out the requests, within the connection's share of the iteration."""
        arrived, clock = self._arrived, self._now  # an instance's own are called faster like this
        arrived()
        self._traffic.received += len(data)
        if self._share.stranger:
            self._rest()
        try:
            if self._greeting.refused:
                self._greeting.forget(len(data))
                self._settle_reading()
                return
            waits = self._busy or self._requests or self._unread
            if waits or not self._share.begin(len(data)):
                self._keep(data)
                return
            request = None if self._special else self._reader.alone(data)
            if request is None:
                self._receive(data)
                self._share.end()
                return
            # The common case, with the same result as `_take`.
            self._fresh = False
            self._received_at = now = clock()
            self._lines = -1
            name, key, argument = self._request = request
            command = self._commands.get(name)
            reply = self._unknown(name) if command is None else command(self, key, argument, now)
            if reply is None:
                self._busy = True
            elif self._transport is not None:
                self._traffic.sent += len(reply)
                self._transport.write(reply)
        except Exception as error:
            self._failed(error)

    def _rest(self) -> None:
        """Read no more of a stranger before its turn: uvloop reads on while anyone sends."""
        self._rests = True
        self._settle_reading()
        self._share.queue()

    def _keep(self, data: bytes) -> None:
        """Queue input that cannot be carried out now."""
        self._unread += data
        if self._awaited is not None and len(self._unread) > _TOO_MUCH:
            self._context.log(logging.WARNING, "sends too much", peer=self.peer)
            self.cut_off()
            return
        self._settle_reading()
        self._go_on_soon()
        self._count_unread()

    def _count_unread(self) -> None:
        """Count what is not carried out; close the connection if that is too much."""
        try:
            self._greeting.unread.set(len(self._unread))
        except LimitReached as error:
            self._context.refused("connection closed", error.limit, peer=self.peer)
            self.leave(ERROR)

    def _stop_reading(self) -> None:
        """Carry out nothing more: the client is refused."""
        self._busy = True
        self._greeting.refuse(len(self._unread))
        self._unread.clear()
        self._settle_reading()

    def _receive(self, data: bytes) -> None:
        """Carry out input that is not exactly one request."""
        if self._fresh:
            self._fresh = False
            if (found := foreign(data)) is not None:
                self._send_away(found)
                return
        if len(data) > _TURN:
            self._keep(data)
        else:
            self._take(self._reader.feed(data))

    def _send_away(self, found: Foreign) -> None:
        """Close a connection whose client uses another protocol: nothing is carried out."""
        self._context.log(logging.WARNING, explain(found), peer=self.peer)
        self._busy = True
        self.leave(ERROR if found == "PROXY" else answer(found, "dflockd's protocol"))

    # Carrying out

    def _failed(self, error: Exception) -> None:
        """Close the connection after a defect, or a lack of memory."""
        self._context.logger.error(
            "a request failed",
            extra={"facts": {"peer": self.peer, "error": repr(error)}},
            exc_info=None if isinstance(error, MemoryError) else error,
        )
        self.leave(ERROR)

    def _unknown(self, command: str) -> bytes | None:
        """Return the reply to an unknown command."""
        if not is_http(command):
            return ERROR
        self._send_away("HTTP")
        return None

    def _take(self, requests: list[RawRequest]) -> None:
        """Carry out the pending input, as far as possible."""
        now = self._now()
        if requests or self._reader.lines != self._lines:
            self._lines = self._reader.lines
            self._received_at = now
        if self._special:
            requests = self.greet(requests)
        self._requests.extend(requests)
        self._work_off(now)

    def _work_off(self, now: float) -> None:
        requests = self._requests
        handled = 0
        while requests and not self._busy and self._blocked_at is None:
            self._request = request = requests.popleft()
            command = self._commands.get(request[0])
            if command is None:
                reply = self._unknown(request[0])
            else:
                reply = command(self, request[1], request[2], now)
            handled += 1
            if reply is None:
                self._busy = True
            else:
                self._replies.append(reply)
                if len(reply) > _LONG:
                    self._flush()  # to know at once whether the client reads
            if not handled % _LOOK and self._share.used_up:
                self._go_on_soon()
                break
        self._flush()
        if self._reader.failed and not requests and not self._busy:
            self.leave(ERROR)

    def _flush(self) -> None:
        replies = self._replies
        if replies and self._transport is not None:
            written = replies[0] if len(replies) == 1 else b"".join(replies)
            self._traffic.sent += len(written)
            self._transport.write(written)
            self._replies = []

    def _reply(self, reply: bytes) -> None:
        """Send a reply, and continue with the next request."""
        self._awaited = None
        if self._transport is None or self._leaving is not None:
            return
        self._busy = False
        self._received_at = self._now()
        self._replies.append(reply)
        self._flush()
        if self._requests or self._unread or self._over or self._reader.failed:
            self._go_on_soon()
        self._settle_reading()

    def _go_on_soon(self) -> None:
        if not self._busy:
            self._share.queue()

    def _go_on(self) -> None:
        """Continue with the pending input, if possible."""
        self._rests = False
        try:
            self._work_on()
        except Exception as error:
            self._failed(error)

    def _work_on(self) -> None:
        if self._busy or self._blocked_at is not None or self._transport is None:
            self._settle_reading()
            return
        now = self._received_at = self._now()
        if self._requests or not self._unread:
            self._work_off(now)
        else:
            piece = bytes(self._unread[:_TURN])
            del self._unread[:_TURN]
            if self._greeting.unread.size:
                self._count_unread()
            self._receive(piece)
        self._settle_reading()
        if self._waits_in_vain():
            self._transport.close()
        elif self._requests or self._unread:
            self._go_on_soon()
        elif self._over and not self._busy and self._transport is not None:
            self.end()

    def _waits_in_vain(self) -> bool:
        """Return true if it waits for a lock, and its input ended in the middle of a request."""
        claim = self._awaited
        waits = self._over and claim is not None and claim.stage is WAITING
        return waits and self._is_cut_short()

    def _is_cut_short(self) -> bool:
        """Return true if the input ends in the middle of a request."""
        unread = self._unread
        if not unread:
            return not self._reader.between
        lines = self._reader.lines + unread.count(b"\n")
        return lines % 3 != 0 or not unread.endswith(b"\n")

    def _settle_reading(self) -> None:
        full = len(self._unread) >= _MUCH and self._awaited is None
        able = not full and not self._rests and self._blocked_at is None
        reading = able and self._greeting.may_read
        if reading is not self._reading and self._transport is not None and not self._over:
            self._reading = reading
            if reading:
                self._received_at = self._now()
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
