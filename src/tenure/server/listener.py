"""Listener of one address: the base class of each protocol's listener, and its acceptance.

A listener is created without I/O; then the server opens, drains and closes it. It binds the address
in its URL, where port 0 means any free port, or serves given sockets that are already bound (socket
activation).

**Acceptance** counts connections, and makes their protocols. Rules:

* A `Door` owns its sockets, one task for each handshake, and the rejected connections whose clients
  may still read the reason. `aclose` ends them all.
* A `Greeting` is a connection's entry in `Admission`, from acceptance to its end. The protocol
  calls `let_in` when the client is admitted, and `over` when the connection is lost.
* Each iteration of the loop accepts a few connections. A connection above its source's rate is
  rejected at once, without a protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from tenure.background import Failures
from tenure.server.addresses import parse
from tenure.server.admission import Source, local_source, source_at
from tenure.server.auth import Verdict
from tenure.server.auth.identity import ANONYMOUS, Identity
from tenure.server.budget import FORGOTTEN, Share, UnreadInput
from tenure.server.context import Context, explain, foreign
from tenure.server.limits import LimitReached
from tenure.server.meter import Traffic
from tenure.server.tls import (
    ARRIVING,
    LONGEST_RECORD,
    RECORD_HEADER,
    record_length,
    slice_tls,
    wake_for,
)

_ENDED, _SEEN = 16, 1024  # connections that are checked and ended in one iteration of the loop


class ServerConnection(Protocol):
    """A connection, as its listener ends it."""

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End it if it may not continue, and return whether it was ended."""
        ...

    def cut_off(self) -> None:
        """End it at once. Safe to call twice."""


C = TypeVar("C", bound=ServerConnection)


async def end_in_slices(connections: Iterable[ServerConnection], verdict: Verdict) -> int:
    """End the connections that may not continue, a few in each iteration of the loop."""
    total = ended = 0
    for seen, connection in enumerate(list(connections), start=1):
        ended += connection.end_unless_valid(verdict)
        if ended >= _ENDED or seen % _SEEN == 0:
            total, ended = total + ended, 0
            await asyncio.sleep(0)
    return total + ended


class Listener(ABC, Generic[C]):
    """One address of the server; each protocol has a class of its own.

    Args:
        context: the state shared by the server's listeners.
        url: the URL given to ``--listen``.
        tls: the TLS context if the URL's scheme requires it, else ``None``.
        sockets: bound sockets, perhaps already listening; the listener owns them.

    Raises:
        InvalidArgument: the URL is wrong; the message says why.

    Attributes:
        context: the state shared by the server's listeners.
        connections: the open connections, silent greetings included.
        traffic: the counts of this listener.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        """Check the URL; nothing is bound before `open`."""
        self.context = context
        self.connections: set[C] = set()
        self._address = parse(url)
        self.traffic = context.meter.listener(self._address.url)
        self._tls = tls
        self._given = list(sockets)
        self._door: Door | None = None  # while it is open

    @property
    @abstractmethod
    def address(self) -> str:
        """URL with the host and port at which it can be reached, once it is open."""

    @abstractmethod
    async def open(self) -> None:
        """Bind and begin to serve.

        Raises:
            EngineUnavailable: the address cannot be bound; the message says why.
            InvalidArgument: the address is invalid for this kind of listener.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Stop accepting, and send connected clients to other servers.

        It does not wait until they have disconnected, and ends no session.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect all clients; their sessions survive in the store. Safe to call twice.

        It may wait for the store. A caller may cancel it; then the listener is stopped, too. After
        a cancellation or a failure, sessions may still be attached. Then the store must not be
        closed, because that would end them.

        Raises:
            EngineError: sessions could not be detached in the store.
        """

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Use other certificates for new connections.

        Args:
            tls: the context with the new certificates.
            cut_handshakes: whether to end handshakes in progress, whose clients may no longer be
                trusted.
        """
        self._tls = tls
        if self._door is not None:
            self._door.renew_tls(tls, cut_handshakes=cut_handshakes)

    async def end_connections(self, verdict: Verdict) -> int:
        """End every connection that may not continue, and return their number.

        Their sessions are detached, and survive for their recovery windows. Other connections are
        served in between; new ones are checked by their greetings. A cancelled call may have ended
        some.
        """
        return await end_in_slices(self.connections, verdict)

    def joined(self, connection: C) -> None:
        """Add a connection; end it at once if the listener is closed."""
        self.connections.add(connection)
        if self._door is None:
            connection.cut_off()

    def left(self, connection: C) -> None:
        """Remove a lost connection."""
        self.connections.discard(connection)

    def _cut_off_all(self) -> None:
        for connection in list(self.connections):
            connection.cut_off()

    def _close_given(self) -> None:
        """Close the sockets that were given and never used."""
        for each in self._given:
            each.close()
        self._given.clear()


_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE = 1.0  # seconds without accepting, when no descriptors are left and none can be freed
_HANDSHAKE = 0.002  # seconds that a TLS handshake takes on the server
_PROTOCOL = 0.0005  # seconds that the beginning of a connection without TLS takes
_LEAST_TIME = 0.05
_SHUTDOWN_TIME = 5.0  # seconds for the end of a TLS connection
_TURN = 8  # connections that are accepted before others have their turn
_LINGER = 1.0  # seconds in which the client of a refused connection can read why
_LINGERING = 32  # refused connections that wait for that
_FIRST = 16  # bytes that show whether a client begins a TLS handshake
_ALERT = b"\x15\x03\x03\x00\x02\x02\x50"  # of TLS, fatal: internal_error


class Greeting:
    """Entry of one connection among the server's connections.

    Args:
        context: the server's context.
        peer: the client's address, for the log.
        source: the source that it counts for; by default that of `peer`.
        traffic: the counts of its listener.

    Attributes:
        traffic: the counts of its listener.
        peer: the client's address, for the log.
        source: the source that the connection counts for.
        deadline: time by which the client must have identified itself.
        unread: the connection's input that is not carried out.
        refused: whether the client is refused, so that nothing more is carried out.
        admitted: called when the client is admitted.
        abort: ends the connection at once, if it has a transport.
        displaced: scheduled when the connection must yield its slot earlier; the protocol sets it
            in `connection_made`.
    """

    __slots__ = (
        "_context",
        "_error",
        "_forgotten",
        "_identity",
        "_is_counted",
        "_shares",
        "_stage",
        "abort",
        "admitted",
        "deadline",
        "displaced",
        "peer",
        "refused",
        "source",
        "traffic",
        "unread",
    )

    def __init__(
        self,
        context: Context,
        peer: str,
        source: Source | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._context = context
        self.traffic = traffic or Traffic()
        self.traffic.opened += 1
        self.traffic.connections += 1
        self._is_counted = True
        self._stage = "greeting"
        self._identity = ANONYMOUS
        self._error: LimitReached | None = None
        self._shares: list[Share] = []
        self._forgotten = 0  # bytes of a refused client that were dropped
        self.refused = False
        self.unread = UnreadInput(context.input)
        self.peer = peer
        self.source = source or source_at(peer_host(peer) or peer)
        self.deadline = context.clock.now() + context.limits.greeting_time
        self.displaced: Callable[[LimitReached], None] = _nothing
        self.abort: Callable[[], None] = _do_nothing
        self.admitted: Callable[[], None] = _do_nothing
        context.admission.greet(self)

    def share(self, work: Callable[[], None], causes: float = 0.0) -> Share:
        """Return a share of the loop for the connection: a stranger's until it is let in."""
        share = Share(self._context.budget, self.source, work, causes, stranger=True)
        if self._stage == "in":
            share.greeted()
        self._shares.append(share)
        return share

    async def turn(self, causes: float) -> None:
        """Return when the connection may cause so many seconds of work."""
        turn = asyncio.get_running_loop().create_future()
        share = Share(self._context.budget, self.source, partial(_set, turn), causes, stranger=True)
        share.queue()
        try:
            await turn
        finally:
            share.close()

    def let_in(self, identity: Identity = ANONYMOUS, *, returning: bool = False) -> None:
        """Count the connection as admitted. Further calls change nothing.

        Args:
            identity: the client's identity.
            returning: whether its program has sessions on this server.

        Raises:
            LimitReached: the limit is reached; the connection remains a greeting.
        """
        if self._error is not None:
            raise self._error
        if self._stage == "greeting":
            anonymous = identity.kind in {"anonymous", "uid"}
            self.unread.greeted(self.source if anonymous else identity)
            self._context.admission.let_in(self.source, identity, returning=returning)
            self._context.admission.stop_greeting(self)
            self._stage = "in"
            self._identity = identity
            for share in self._shares:
                share.greeted()
            self.admitted()

    def refuse(self, size: int) -> None:
        """Carry out nothing more, and drop the `size` bytes that wait."""
        self.refused = True
        self.unread.set(0)
        self.forget(size)

    def forget(self, size: int) -> None:
        """Drop input of a refused client."""
        self._forgotten += size

    @property
    def may_read(self) -> bool:
        """False once a refused client has sent more than it may until it has the reason."""
        return self._forgotten <= FORGOTTEN

    def displace(self, error: LimitReached) -> None:
        """End the connection, because a newer one takes its slot."""
        self._stage = "over"
        self._error = error
        self._context.refused("connection refused", error.limit, peer=self.peer)
        asyncio.get_running_loop().call_soon(self._end_displaced)

    def _end_displaced(self) -> None:
        assert self._error is not None
        self.displaced(self._error)

    def cut_off(self) -> None:
        """End the connection at once."""
        self.abort()

    def over(self) -> None:
        """Stop counting the lost connection. Safe to call twice."""
        was, self._stage = self._stage, "over"
        self.displaced = _nothing  # which breaks reference cycles, like the next line
        self.abort = self.admitted = _do_nothing
        for share in self._shares:  # their work refers to the transport, which refers to them
            share.close()
        self._shares.clear()
        self.unread.set(0)
        if self._is_counted:
            self._is_counted = False
            self.traffic.connections -= 1
        if was == "greeting":
            self._context.admission.stop_greeting(self)
        elif was == "in":
            self._context.admission.leave(self.source, self._identity)


def _nothing(_: LimitReached) -> None:
    """Do nothing: the connection has no protocol."""


def _do_nothing() -> None:
    """Do nothing: the connection has no transport."""


class Door:
    """Accepts on bound sockets, and makes a protocol for each connection.

    Args:
        context: the server's context.
        sockets: the bound sockets; the door owns them.
        protocol: makes the protocol of one connection.
        tls: for connections that begin with a TLS handshake.
        refusal: the rejection to send, in the listener's protocol.
        traffic: the listener's counts.
    """

    def __init__(
        self,
        context: Context,
        sockets: Sequence[socket.socket],
        protocol: Callable[[Greeting], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        refusal: Callable[[LimitReached], bytes],
        traffic: Traffic | None = None,
    ) -> None:
        """Prepare to accept on `sockets`; `open` starts that."""
        self._context = context
        self._sockets = list(sockets)
        self._protocol = protocol
        self._traffic = traffic
        self._tls = tls
        self._refusal = refusal if tls is None else _alert
        self._refused: deque[socket.socket] = deque()
        self._failures = Failures("accepting a connection", context.logger)
        self._loop = asyncio.get_running_loop()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._arriving: dict[asyncio.Task[None], socket.socket] = {}
        self._cut: set[asyncio.Task[None]] = set()  # those that the server has ended

    def open(self) -> None:
        """Begin to accept."""
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(1024)
            self._resume(sock)

    def replace(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on other sockets from now on. Connections and handshakes continue."""
        former = self._sockets
        self._sockets = list(sockets)
        self.open()
        for sock in former:
            self._stop(sock)
            with contextlib.suppress(OSError), sock:  # the error says that no more are waiting
                while True:
                    self._admit(*sock.accept())

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Use other certificates for new connections; see `tenure.server.listener.Listener`."""
        self._tls = tls
        if cut_handshakes:
            self._cut_arriving()

    def close(self) -> None:
        """Stop accepting. Accepted connections stay open. Safe to call twice."""
        for sock in self._sockets:
            self._stop(sock)
            sock.close()
        self._sockets.clear()

    async def aclose(self) -> None:
        """Stop accepting; close handshakes and rejected connections. Safe to call twice."""
        self.close()
        while self._arriving:
            self._cut_arriving()
            await asyncio.wait(set(self._arriving))
        while self._refused:
            self._refused.popleft().close()

    def _resume(self, sock: socket.socket) -> None:
        self._paused.pop(sock, None)
        self._loop.add_reader(sock, self._accept, sock)

    def _stop(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        paused = self._paused.pop(sock, None)
        if paused is not None:
            paused.cancel()

    def _accept(self, sock: socket.socket) -> None:
        """Accept some of the waiting connections; the loop calls again while there are more."""
        for _ in range(_TURN):
            try:
                connection, address = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room(sock, error)
                    return
                continue  # closed before it was accepted
            try:
                self._admit(connection, address)
            except Exception as error:  # this one is rejected; the next may be admitted
                self._failures.report(error)
                connection.close()

    def _make_room(self, sock: socket.socket, error: OSError) -> None:
        if self._refused:
            self._refused.popleft().close()
        elif not self._context.admission.make_room():
            self._context.log(logging.ERROR, "no connection can be accepted", reason=error)
            self._loop.remove_reader(sock)
            self._paused[sock] = self._loop.call_later(_PAUSE, self._resume, sock)

    def _admit(self, connection: socket.socket, address: object) -> None:
        connection.setblocking(False)
        peer = peer_name(address)
        local = connection.family == socket.AF_UNIX
        source = local_source(connection) if local else source_at(peer_host(peer))
        try:
            self._context.admission.arrive(source)
        except LimitReached as error:
            self._context.refused("connection refused", error.limit, peer=peer)
            self._refuse(connection, error)
            return
        greeting = Greeting(self._context, peer, source, self._traffic)
        task = self._loop.create_task(self._arrive(connection, greeting))
        greeting.displaced = partial(self._cut_off, task)
        self._arriving[task] = connection
        task.add_done_callback(partial(self._arrived, connection, greeting))

    def _cut_arriving(self) -> None:
        for task in self._arriving:
            self._cut_off(task)

    def _cut_off(self, task: asyncio.Task[None], _: LimitReached | None = None) -> None:
        """End a connection that has no protocol yet.

        Its task is not cancelled: a protocol made in this iteration of the loop would never get its
        `connection_lost`.
        """
        connection = self._arriving.get(task)
        if connection is not None:
            self._cut.add(task)
            with contextlib.suppress(OSError):  # the client has ended it first
                connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, connection: socket.socket, error: LimitReached) -> None:
        """Send the reason, and close the connection a moment later, so that the client can read it.

        Closing with unread input would reset the connection.
        """
        with contextlib.suppress(OSError):  # the client has disconnected
            connection.send(self._refusal(error))
            connection.shutdown(socket.SHUT_WR)
        if not self._refused:
            self._loop.call_later(_LINGER, self._close_refused)
        self._refused.append(connection)
        if len(self._refused) > _LINGERING:
            self._refused.popleft().close()

    def _close_refused(self) -> None:
        while self._refused:
            self._refused.popleft().close()

    async def _arrive(self, connection: socket.socket, greeting: Greeting) -> None:
        loop = self._loop
        if self._tls is None:
            await greeting.turn(_PROTOCOL)
            if asyncio.current_task() in self._cut:
                raise ConnectionAbortedError("the server has ended it")
            await loop.connect_accepted_socket(lambda: self._protocol(greeting), connection)
        else:
            await self._handshake_begins(connection, greeting)
            ARRIVING.set(connection)  # this task's context
            transport, _ = await loop.connect_accepted_socket(
                lambda: self._protocol(greeting),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._time_left(greeting),
                ssl_shutdown_timeout=_SHUTDOWN_TIME,
            )
            greeting.abort = transport.abort
            greeting.admitted = slice_tls(transport, greeting.share, greeting.cut_off).admit

    async def _handshake_begins(self, connection: socket.socket, greeting: Greeting) -> None:
        """Wait until the client's first message has come whole, and its source is next.

        The kernel wakes the server for no less, so that single bytes cost nothing.
        """
        try:
            async with asyncio.timeout(self._time_left(greeting)):
                await self._received(connection, RECORD_HEADER)
                first = connection.recv(_FIRST, socket.MSG_PEEK)
                found = foreign(first)
                if found is not None and found != "TLS":
                    raise ConnectionAbortedError(explain(found))
                await self._received(connection, min(record_length(first), LONGEST_RECORD))
        except TimeoutError:
            raise ConnectionAbortedError("no TLS handshake was begun in time") from None
        await greeting.turn(_HANDSHAKE)
        if asyncio.current_task() in self._cut:
            raise ConnectionAbortedError("the server has ended it")  # an answer would be useless

    async def _received(self, connection: socket.socket, size: int) -> None:
        """Return when so many bytes have come, or the client has ended the connection."""
        wake_for(connection, size)
        ready = self._loop.create_future()
        self._loop.add_reader(connection, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(connection)

    def _time_left(self, greeting: Greeting) -> float:
        """Return the seconds left to identify itself; a late handshake gets a short extension."""
        return max(_LEAST_TIME, greeting.deadline - self._context.clock.now())

    def _arrived(
        self, connection: socket.socket, greeting: Greeting, task: asyncio.Task[None]
    ) -> None:
        del self._arriving[task]
        cut = task in self._cut
        self._cut.discard(task)
        reason = None if task.cancelled() else task.exception()
        if reason is None and not task.cancelled():
            return  # the protocol owns it now
        greeting.over()
        connection.close()
        if reason is not None and not cut:
            # uvloop's errors have no messages.
            why = (
                str(reason) or "the client has ended it; perhaps it does not trust the certificate"
            )
            self._context.log(logging.WARNING, "handshake failed", peer=greeting.peer, reason=why)
            if isinstance(reason, ssl.SSLCertVerificationError) or "CERTIFICATE" in why.upper():
                self._context.refused_login(greeting.peer, why)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _alert(_: LimitReached) -> bytes:
    """Reject a client that begins with a TLS handshake."""
    return _ALERT


def peer_host(peer: str) -> str | None:
    """Return the address in a `peer_name`; ``None`` for a local socket."""
    host, separator, port = peer.rpartition(":")
    return host.strip("[]") if separator and port.isdecimal() else None


def peer_name(address: object) -> str:
    """Return the origin of a connection as text."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(address) if address else "a local socket"
