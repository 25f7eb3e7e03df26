"""Where connections come in: accepted, counted, and given a protocol.

Rules:

* A `Door` owns its sockets, the task that accepts on each, one task for each handshake, and the
  refused connections whose clients may still read why. `aclose` ends them all.
* A `Greeting` is a connection's place in `Admission`, from being accepted to its end. Its protocol
  turns it into a connection that is let in (`let_in`), and gives it back once it is lost (`over`).
* Each turn of the loop accepts a few connections. A connection over its source's rate is refused
  at once, without a protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from tenure.background import Failures
from tenure.server.admission import Source, local_source, source_at
from tenure.server.auth.identity import ANONYMOUS, Identity
from tenure.server.context import Context
from tenure.server.limits import LimitReached

__all__ = ["Door", "Greeting", "peer_host", "peer_name"]

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE = 1.0  # seconds without accepting, when there are no descriptors left
_SHUTDOWN_TIME = 5.0  # seconds that a TLS connection has for its farewell
_TURN = 16  # connections that are accepted before others have their turn
_LINGER = 1.0  # seconds in which the client of a refused connection can read why
_LINGERING = 32  # refused connections that wait for that
_ALERT = b"\x15\x03\x03\x00\x02\x02\x50"  # of TLS, fatal: internal_error


class Greeting:
    """One connection's place among the server's connections.

    Args:
        context: the server's.
        peer: the client's address, for the log.
        source: what it is counted by; by default what `peer` names.

    Attributes:
        peer: the client's address, for the log.
        source: what the connection is counted by.
        deadline: when the client must have said who it is.
        displaced: called, soon, when the connection must yield its slot before that; the protocol
            sets it in `connection_made`.
    """

    __slots__ = (
        "_context",
        "_error",
        "_identity",
        "_stage",
        "deadline",
        "displaced",
        "peer",
        "source",
    )

    def __init__(self, context: Context, peer: str, source: Source | None = None) -> None:
        self._context = context
        self._stage = "greeting"
        self._identity = ANONYMOUS
        self._error: LimitReached | None = None
        self.peer = peer
        self.source = source or source_at(peer_host(peer) or peer)
        self.deadline = context.clock.now() + context.limits.greeting_time
        self.displaced: Callable[[LimitReached], None] = _nothing
        context.admission.greet(self)

    def let_in(self, identity: Identity = ANONYMOUS, *, returning: bool = False) -> None:
        """Count the connection as let in. Once it is, this changes nothing.

        Args:
            identity: its client's.
            returning: its program has sessions here, and returns to them.

        Raises:
            LimitReached: there are as many connections as may be; it is a greeting still.
        """
        if self._error is not None:
            raise self._error
        if self._stage == "greeting":
            self._context.admission.let_in(self.source, identity, returning=returning)
            self._context.admission.stop_greeting(self)
            self._stage = "in"
            self._identity = identity

    def displace(self, error: LimitReached) -> None:
        self._stage = "over"
        self._error = error
        self._context.log(logging.WARNING, "connection refused", peer=self.peer, limit=error.limit)
        asyncio.get_running_loop().call_soon(self._tell_displaced)

    def _tell_displaced(self) -> None:
        assert self._error is not None
        self.displaced(self._error)

    def over(self) -> None:
        """Count the connection no more: it is lost. Safe to call twice."""
        was, self._stage = self._stage, "over"
        if was == "greeting":
            self._context.admission.stop_greeting(self)
        elif was == "in":
            self._context.admission.leave(self.source, self._identity)


def _cancel(task: asyncio.Task[None], _: LimitReached) -> None:
    """End a handshake whose slot is needed."""
    task.cancel()


def _nothing(_: LimitReached) -> None:
    """Do nothing: the connection has no protocol."""


class Door:
    """Accepts on bound sockets, and makes a protocol of each connection.

    Args:
        context: the server's.
        sockets: bound; they are the door's from now on.
        protocol: makes the protocol of one connection.
        tls: for connections that begin with a TLS handshake.
        refusal: what a refused client is sent, in the listener's protocol.
    """

    def __init__(
        self,
        context: Context,
        sockets: Sequence[socket.socket],
        protocol: Callable[[Greeting], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        refusal: Callable[[LimitReached], bytes],
    ) -> None:
        self._context = context
        self._sockets = list(sockets)
        self._protocol = protocol
        self._tls = tls
        self._refusal = refusal if tls is None else _alert
        self._refused: deque[socket.socket] = deque()
        self._failures = Failures("accepting a connection", context.logger)
        self._accepting: dict[asyncio.Task[None], socket.socket] = {}
        self._arriving: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to accept."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(1024)
            self._accepting[loop.create_task(self._accept(sock))] = sock

    def replace(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on other sockets from now on. Connections stay, and so do handshakes."""
        former = [each for each in self._accepting if not each.done()]
        self._accepting = {task: self._accepting[task] for task in former}
        self._sockets = list(sockets)
        self.open()
        for task in former:
            task.add_done_callback(self._accept_last)
            task.cancel()

    def _accept_last(self, task: asyncio.Task[None]) -> None:
        """Accept what waits on a socket that was replaced, and close it."""
        sock = self._accepting.pop(task, None)
        if sock is None:
            return  # the door is closed meanwhile, and has closed it
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError), sock:  # the error says that no more wait
            while True:
                self._admit(loop, *sock.accept())

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Begin connections with other certificates; see `tenure.server.listener.Listener`."""
        self._tls = tls
        if cut_handshakes:
            for task in self._arriving:
                task.cancel()

    async def close(self) -> None:
        """Accept nobody any more; who has come in stays. Safe to call twice."""
        accepting, self._accepting = dict(self._accepting), {}
        await _ended(list(accepting))
        for sock in (*self._sockets, *accepting.values()):
            sock.close()
        self._sockets.clear()

    async def aclose(self) -> None:
        """Accept nobody any more, and send away who is at the door. Safe to call twice."""
        await self.close()
        await _ended(list(self._arriving))
        while self._refused:
            self._refused.popleft().close()

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            if accepted >= _TURN:  # asyncio's loop would accept all that wait in one turn
                accepted = 0
                await asyncio.sleep(0)
            accepted += 1
            try:
                connection, address = await _accepted(loop, sock)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    await self._wait_for_resources(error)
                continue  # or else it was gone before it was accepted
            except Exception as error:
                self._failures.report(error)
                await asyncio.sleep(_PAUSE)
                continue
            try:
                self._admit(loop, connection, address)
            except Exception as error:  # this one is sent away; the next may come in
                self._failures.report(error)
                connection.close()

    async def _wait_for_resources(self, error: OSError) -> None:
        if self._refused:
            self._refused.popleft().close()
        elif self._context.admission.make_room():
            await asyncio.sleep(0)  # in which its socket is closed
        else:
            self._context.log(logging.ERROR, "no connection can be accepted", reason=error)
            await asyncio.sleep(_PAUSE)

    def _admit(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, address: object
    ) -> None:
        peer = peer_name(address)
        local = connection.family == socket.AF_UNIX
        source = local_source(connection) if local else source_at(peer_host(peer))
        try:
            self._context.admission.arrive(source)
        except LimitReached as error:
            self._context.log(logging.WARNING, "connection refused", peer=peer, limit=error.limit)
            self._refuse(loop, connection, error)
            return
        greeting = Greeting(self._context, peer, source)
        task = loop.create_task(self._arrive(loop, connection, greeting))
        greeting.displaced = partial(_cancel, task)
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, connection, greeting))

    def _refuse(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, error: LimitReached
    ) -> None:
        """Say why, and close the connection a moment later: at once, the client might not read it.

        Closing with unread input would reset the connection.
        """
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client is gone already
            connection.send(self._refusal(error))
            connection.shutdown(socket.SHUT_WR)
        if not self._refused:
            loop.call_later(_LINGER, self._close_refused)
        self._refused.append(connection)
        if len(self._refused) > _LINGERING:
            self._refused.popleft().close()

    def _close_refused(self) -> None:
        while self._refused:
            self._refused.popleft().close()

    async def _arrive(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, greeting: Greeting
    ) -> None:
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: self._protocol(greeting), connection)
        else:
            await loop.connect_accepted_socket(
                lambda: self._protocol(greeting),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._context.limits.greeting_time,
                ssl_shutdown_timeout=_SHUTDOWN_TIME,
            )

    def _arrived(
        self, connection: socket.socket, greeting: Greeting, task: asyncio.Task[None]
    ) -> None:
        self._arriving.discard(task)
        if task.cancelled():
            reason: object = None
        else:
            reason = task.exception()
            if reason is None:
                return  # the protocol has it now
        greeting.over()
        connection.close()
        if reason is not None:
            # uvloop's errors have no words.
            why = (
                str(reason) or "the client has ended it; perhaps it does not trust the certificate"
            )
            self._context.log(logging.WARNING, "handshake failed", peer=greeting.peer, reason=why)
            if isinstance(reason, ssl.SSLCertVerificationError) or "CERTIFICATE" in why.upper():
                self._context.audit.refused_login(greeting.peer, why)


def _alert(_: LimitReached) -> bytes:
    """Refuse a client that begins with a TLS handshake."""
    return _ALERT


async def _accepted(
    loop: asyncio.AbstractEventLoop, sock: socket.socket
) -> tuple[socket.socket, object]:
    """Accept the next connection. When this is cancelled, none has been accepted and lost."""
    while True:
        try:
            return sock.accept()
        except (BlockingIOError, InterruptedError):
            readable = loop.create_future()
            loop.add_reader(sock, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and see them end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def peer_host(peer: str) -> str | None:
    """The address in a `peer_name`; ``None`` for a local socket."""
    host, separator, port = peer.rpartition(":")
    return host.strip("[]") if separator and port.isdecimal() else None


def peer_name(address: object) -> str:
    """Where a connection comes from, in words."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(address) if address else "a local socket"
