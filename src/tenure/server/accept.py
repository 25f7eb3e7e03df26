"""Where connections come in: accepted one by one, counted before anything is done for them.

From being accepted until it has said who it is, TLS handshake included, a connection is a
*greeting*: these have a limit of their own and a time limit, so that strangers, however many and
however slow, keep nobody else out for longer than that.

Rules:

* A `Door` owns its sockets, the task that accepts on each, and one task for each handshake;
  `aclose` ends them all.
* A `Greeting` is given back once, whoever is first to find that it is over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial

from tenure.background import Failures
from tenure.server.context import Context
from tenure.server.limits import LimitReached

__all__ = ["Door", "Greeting", "peer_host", "peer_name"]

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE = 1.0  # seconds without accepting, when there are no descriptors left
_SHUTDOWN_TIME = 5.0  # seconds that a TLS connection has for its farewell


class Greeting:
    """One connection that has not said who it is.

    Attributes:
        peer: where it comes from, for the log.
        deadline: until when it may remain one.
    """

    __slots__ = ("_context", "_counted", "deadline", "peer")

    def __init__(self, context: Context, peer: str) -> None:
        """Raises `LimitReached`."""
        context.counts.greetings.take()
        self._context = context
        self._counted = True
        self.peer = peer
        self.deadline = context.clock.now() + context.limits.greeting_time

    def over(self) -> None:
        """It has said who it is, or it is gone. Safe to call twice."""
        if self._counted:
            self._counted = False
            self._context.counts.greetings.give_back()


class Door:
    """Accepts on bound sockets, and makes a protocol of each connection.

    Args:
        context: the server's.
        sockets: bound; they are the door's from now on.
        protocol: makes the protocol of one connection, which ends its greeting.
        tls: for connections that begin with a TLS handshake.
    """

    def __init__(
        self,
        context: Context,
        sockets: Sequence[socket.socket],
        protocol: Callable[[Greeting], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._context = context
        self._sockets = list(sockets)
        self._protocol = protocol
        self._tls = tls
        self._failures = Failures("accepting a connection", context.logger)
        self._accepting: list[asyncio.Task[None]] = []
        self._arriving: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to accept."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(1024)
            self._accepting.append(loop.create_task(self._accept(sock)))

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Begin connections with other certificates; see `tenure.server.listener.Listener`."""
        self._tls = tls
        if cut_handshakes:
            for task in self._arriving:
                task.cancel()

    async def close(self) -> None:
        """Accept nobody any more; who has come in stays. Safe to call twice."""
        await _ended(self._accepting)
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    async def aclose(self) -> None:
        """Accept nobody any more, and send away who is at the door. Safe to call twice."""
        await self.close()
        await _ended(list(self._arriving))

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._context.log(logging.ERROR, "no connection can be accepted", reason=error)
                    await asyncio.sleep(_PAUSE)
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

    def _admit(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, address: object
    ) -> None:
        peer = peer_name(address)
        try:
            greeting = Greeting(self._context, peer)
        except LimitReached as error:
            connection.close()
            self._context.log(logging.WARNING, "connection refused", peer=peer, limit=error.limit)
            return
        task = loop.create_task(self._arrive(loop, connection, greeting))
        self._arriving.add(task)
        task.add_done_callback(partial(self._arrived, connection, greeting))

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
