"""One connection to a dflockd server: opened, then requests out and replies in, in the same order.

The loop owns it, except that a thread may send renewals and read while the loop is stuck
(`session`). A lock guards the requests without replies. Replies that the thread reads wait for
the loop, except replies to renewals.

Rules:

* A reply belongs to the oldest request without one. Its handler runs on the loop; the handler of a
  renewal runs in any thread.
* A connection is lost once: closed by the server, timed out, or closed by `hang_up`. After that
  only the handlers of renewals are called, with `LOST`. The users of the connection are notified,
  except after `hang_up`.

**Opening** includes TCP, TLS, the token and the kind of the server (`dial`, `kind_of`). dflockd
reports no version, so the kind of a server is determined by its answers: `PING` exists since 2.0,
whose tokens begin with a fencing token; `STATS` since 1.0, which has semaphores. An early server
closes the connection after an unknown request, so `kind_of` may have to open another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Protocol, TypeAlias

from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import AuthenticationFailed, EngineUnavailable, TenureError
from tenure.wire import lines
from tenure.wire.lines import BadReply, Reply, ReplyReader, read_reply

Handler: TypeAlias = Callable[[Reply], None]

LOST = Reply("")
"""Argument of the handlers of renewals when the connection is lost."""

_BYTES = 64 * 1024
_BROKEN_OFF = b"_"
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class User(Protocol):
    """User of a connection."""

    def cut(self, why: str) -> None:
        """Handle the loss of the connection."""


class _Expected:
    """A request without a reply."""

    __slots__ = ("any_thread", "blocking", "handler", "sent")

    def __init__(self, handler: Handler, sent: float, *, blocking: bool, any_thread: bool) -> None:
        self.handler = handler
        self.sent = sent
        self.blocking = blocking
        self.any_thread = any_thread


class DflockdConnection:
    """An established connection.

    Args:
        connected: a non-blocking socket; the connection closes it.

    Attributes:
        users: notified when it is lost.
        lost: true once it is lost.
        last_sent: time of the latest request, on the clock.
    """

    def __init__(
        self, connected: socket.socket, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Take over a connected socket and read its replies on `loop`."""
        self.users: dict[User, None] = {}
        self.lost = False
        self.last_sent = clock.now()
        self._socket = connected
        self._descriptor = connected.fileno()
        self._clock = clock
        self._loop = loop
        self._lock = threading.Lock()
        self._out = bytearray()
        self._expected: deque[_Expected] = deque()
        self._arrived: deque[tuple[_Expected, Reply]] = deque()
        self._reader = ReplyReader()
        self._broken = ""
        self._parted: Callable[[], None] | None = None
        self._parting: asyncio.TimerHandle | None = None
        loop.add_reader(self._descriptor, self._readable)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._descriptor

    # Requests

    def send(
        self, request: bytes, handler: Handler, *, blocking: bool = False, any_thread: bool = False
    ) -> None:
        """Send a request. From threads other than the loop's only with `any_thread`.

        Args:
            request: the line and its arguments, as bytes.
            handler: called with the reply, or with `LOST`.
            blocking: whether the server may reply late.
            any_thread: whether the handler may be called in any thread.
        """
        with self._lock:
            if self.lost or self._broken:
                lost = True
            else:
                lost = False
                self.last_sent = now = self._clock.now()
                self._expected.append(
                    _Expected(handler, now, blocking=blocking, any_thread=any_thread)
                )
                self._write(request)
        if lost and any_thread:
            handler(LOST)

    async def request(self, request: bytes) -> Reply:
        """Send a request and wait for its reply. Raises `ConnectionError`."""
        answer: asyncio.Future[Reply] = self._loop.create_future()

        def answered(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)

        waiting = _Waiting(answer)
        self.users[waiting] = None
        try:
            if self.lost:
                raise ConnectionResetError("the connection is closed")
            self.send(request, answered)
            return await answer
        finally:
            self.users.pop(waiting, None)

    def is_silent(self, limit: float) -> bool:
        """Return true if the oldest reply is overdue, with a timeout in seconds."""
        with self._lock:
            if not self._expected or self._expected[0].blocking:
                return False
            return self._clock.now() - self._expected[0].sent > limit

    @property
    def is_blocked(self) -> bool:
        """True while the server is in a blocking wait, and reads nothing."""
        with self._lock:
            return bool(self._expected) and self._expected[0].blocking

    @property
    def awaits_renewal(self) -> bool:
        """True while a renewal has no reply, but may get one."""
        with self._lock:
            return not self._broken and any(each.any_thread for each in self._expected)

    @property
    def is_resting(self) -> bool:
        """True if every request has its reply."""
        with self._lock:
            return not self._expected and not self._arrived

    def _write(self, data: bytes) -> None:
        if self._out:
            self._out += data
            return
        try:
            sent = self._socket.send(data)
        except _WOULD_BLOCK:
            sent = 0
        except OSError as error:
            self._break(error)
            return
        if sent < len(data):
            self._out += data[sent:]
            self._loop.call_soon_threadsafe(self._await_room)

    def _await_room(self) -> None:
        if not self.lost:
            self._loop.add_writer(self._descriptor, self._writable)

    def _writable(self) -> None:
        with self._lock:
            try:
                while self._out:
                    sent = self._socket.send(self._out[:_BYTES])
                    del self._out[:sent]
            except _WOULD_BLOCK:
                return
            except OSError as error:
                self._break(error)
        self._loop.remove_writer(self._descriptor)

    def _break(self, why: object) -> None:
        """Mark the connection as unusable, and notify the loop."""
        if not self._broken:
            self._broken = str(why) or type(why).__name__
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.dispatch)

    # Replies

    def _readable(self) -> None:
        self.receive()
        self.dispatch()

    def receive_in_thread(self) -> None:
        """Read the replies that have arrived, in another thread than the loop's."""
        self.receive()
        if self._arrived:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.dispatch)

    def receive(self) -> None:
        """Read the replies that have arrived; `dispatch` handles them, on the loop."""
        renewals: list[tuple[_Expected, Reply]] = []
        with self._lock:
            if self.lost or self._broken:
                return
            try:
                while data := self._socket.recv(_BYTES):
                    for line in self._reader.feed(data):
                        self._match(read_reply(line), renewals)
                self._break("the server closed the connection")
            except _WOULD_BLOCK:
                pass
            except (OSError, BadReply) as error:
                self._break(error)
        for expected, reply in renewals:
            expected.handler(reply)

    def _match(self, reply: Reply, renewals: list[tuple[_Expected, Reply]]) -> None:
        if not self._expected:
            raise BadReply(f"the server sent {reply.status!r} without a request")
        expected = self._expected.popleft()
        (renewals if expected.any_thread else self._arrived).append((expected, reply))

    def dispatch(self) -> None:
        """Handle the replies that have arrived. On the loop."""
        while self._arrived and not self.lost:
            expected, reply = self._arrived.popleft()
            expected.handler(reply)
        if self._broken:
            self.lose(self._broken)

    # The end

    def lose(self, why: str) -> None:
        """Close it and notify its users. On the loop; safe to call twice."""
        if self.lost:
            return
        users = list(self.users)
        self.hang_up()
        for user in users:
            user.cut(why)

    def hang_up(self) -> None:
        """Close it without notifying its users. On the loop; safe to call twice."""
        if self.lost:
            return
        self.users.clear()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with self._lock:
            self.lost = True
            expected, self._expected = self._expected, deque()
            self._socket.close()
        for each in expected:
            if each.any_thread:
                each.handler(LOST)
        if self._parting is not None:
            self._parting.cancel()
        parted, self._parted = self._parted, None
        if parted is not None:
            parted()

    def part(self, parted: Callable[[], None], limit: float) -> None:
        """Half-close, and call `parted` when the server has closed too, or after `limit` seconds.

        A server that has closed has released everything on this connection. The input ends inside a
        request: a server that still replies to half-closed connections, such as tenure's, does not
        wait for the rest of it.
        """
        self.users.clear()
        self._parted = parted
        self._parting = self._loop.call_later(limit, self.hang_up)
        try:
            if not self._out:
                with contextlib.suppress(*_WOULD_BLOCK):  # then it ends inside an earlier request
                    self._socket.send(_BROKEN_OFF)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.hang_up()


class _Waiting:
    """Coroutine that waits for a reply."""

    def __init__(self, answer: asyncio.Future[Reply]) -> None:
        self._answer = answer

    def cut(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectionResetError(why))


# While nothing can be sent, TCP keepalive detects a dead peer.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Kind(Enum):
    """Features of a server."""

    FENCING = "with fencing tokens"  # dflockd 2.x, and tenure's own server
    COUNTING = "with semaphores, and without fencing tokens"  # dflockd 1.x
    PLAIN = "with locks alone"  # before


@contextlib.asynccontextmanager
async def _unavailable(address: DflockdUrl, endpoint: Endpoint) -> AsyncIterator[None]:
    """Limit the time, and raise network errors as `EngineUnavailable`."""
    limit = address.connect_timeout
    try:
        async with asyncio.timeout(limit):
            yield
    except TenureError:  # before its builtin relatives: AuthenticationFailed is an OSError
        raise
    except TimeoutError as error:
        raise EngineUnavailable(f"{endpoint} did not answer within {limit:g} s") from error
    except OSError as error:
        cause = str(error) or type(error).__name__
        raise EngineUnavailable(f"{endpoint} cannot be reached: {cause}") from error


async def dial(address: DflockdUrl, endpoint: Endpoint, clock: Clock) -> DflockdConnection:
    """Open a usable connection.

    Raises:
        EngineUnavailable: the server cannot be reached, or not in time.
        AuthenticationFailed: the server rejects the token.
    """
    async with _unavailable(address, endpoint):
        transport = await _connected(address, endpoint)
        connection = DflockdConnection(transport, clock, asyncio.get_running_loop())
        try:
            if address.token:
                reply = await connection.request(lines.auth(address.token))
                if reply.status != "ok":
                    raise AuthenticationFailed(
                        f"{endpoint} rejected the token ({reply.status}), or has no token "
                        "configured; check the token in the URL and in the server's settings"
                    )
        except BaseException:
            connection.hang_up()
            raise
        return connection


async def kind_of(
    address: DflockdUrl, endpoint: Endpoint, clock: Clock, dialled: DflockdConnection
) -> tuple[Kind, DflockdConnection]:
    """Return the kind of a server, and a usable connection, perhaps the given one.

    Raises:
        EngineUnavailable: the server does not answer in time.
        AuthenticationFailed: the server requires a token.
    """
    connection = dialled
    try:
        for request, kind in ((lines.PING, Kind.FENCING), (lines.STATS, Kind.COUNTING)):
            async with _unavailable(address, endpoint):
                reply = await connection.request(request)
            if reply.status == "ok":
                return kind, connection
            if reply.status == "error_auth":
                raise AuthenticationFailed(
                    f"{endpoint} requires a token: write dflockd://TOKEN@HOST"
                )
            connection.hang_up()
            connection = await dial(address, endpoint, clock)
    except BaseException:
        connection.hang_up()
        raise
    return Kind.PLAIN, connection


async def _connected(address: DflockdUrl, endpoint: Endpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = endpoint.host, endpoint.port
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise EngineUnavailable(f"{host!r} is not a host name: {error}") from error
    failure: OSError = OSError(f"{host!r} has no address")
    for family, kind, protocol, _, target in found:
        made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            await loop.sock_connect(made, target)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):  # Linux has them, macOS some
                    made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if address.tls is not None:
                made = await _encrypted(made, address.tls, address.server_name or host)
        except OSError as error:
            made.close()
            failure = error
            continue
        except BaseException:
            made.close()
            raise
        return made
    raise failure


async def _encrypted(plain: socket.socket, tls: ssl.SSLContext, name: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    made = tls.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
    try:
        while True:
            try:
                made.do_handshake()
            except ssl.SSLWantReadError:
                await _ready(made, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(made, loop.add_writer, loop.remove_writer)
            else:
                return made
    except BaseException:
        made.close()
        raise


async def _ready(
    made: socket.socket,
    add: Callable[[int, Callable[[], None]], None],
    remove: Callable[[int], bool],
) -> None:
    ready = asyncio.Event()
    descriptor = made.fileno()
    add(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        with contextlib.suppress(ValueError):
            remove(descriptor)
