"""The native protocol's listener: binds, accepts, checks its connections, drains, closes.

States: made ─open─► open ─drain─► draining ─aclose─► closed; and from each of them to closed.

Ownership: the listener owns its `Door` (sockets, handshakes), its connections, and a timer that
checks their deadlines and the file of a Unix socket. It shares the server's `SessionRegistry`,
which owns the sessions.

* **Drain.** The door is closed, and every client gets `Bye`: it attaches its sessions to another
  server, or to this one after a restart. Clients that stay connected are still served. No session
  ends.
* **Close.** Connections are closed, and the share in the registry ends. With the last share, every
  session is detached in the store, without a timeout.
* **Cancel.** A cancelled `open` leaves nothing open. `aclose` closes everything of its own before
  it waits for the store.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence

from tenure.background import Failures
from tenure.errors import EngineUnavailable
from tenure.server.addresses import Address, SocketFile, bind_ports
from tenure.server.context import Context
from tenure.server.limits import LimitReached
from tenure.server.listener import Door, Listener
from tenure.server.native.connection import NativeServerConnection
from tenure.server.sessions.registry import SessionRegistry
from tenure.wire.errors import to_wire
from tenure.wire.frames import FrameWriter
from tenure.wire.messages import GREETING_BYTES, Bye
from tenure.wire.places import shown

_TICK = 1.0  # seconds between two checks of the connections' deadlines


class NativeListener(Listener[NativeServerConnection]):
    """``tenure://``, ``tenures://`` and ``tenure+unix://``.

    Attributes:
        farewell: the message that clients get when the listener drains.
    """

    registry: SessionRegistry

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        super().__init__(context, url, tls=tls, sockets=sockets)
        self._url = self._address.url
        self._socket_file: SocketFile | None = None  # of a Unix socket, until the listener drains
        self._unreachable = False  # whether the loss of its file is logged
        self.farewell: EngineUnavailable | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Failures("looking after connections", self.context.logger)

    @property
    def address(self) -> str:
        """URL at which the listener accepts."""
        return self._url

    async def open(self) -> None:
        """Bind and accept."""
        await self.context.counts.semaphores.count_once()
        given, self._given = self._given, []
        sockets = given or await self._bind()
        self._url = _bound_url(self._address, sockets[0])
        self.registry = SessionRegistry.share(self.context)
        self._door = Door(
            self.context,
            sockets,
            lambda each: NativeServerConnection(self, each),
            self._tls,
            _refusal,
            self.traffic,
        )
        self._door.open()
        self._tick()

    async def _bind(self) -> list[socket.socket]:
        address = self._address
        if address.path:
            self._socket_file = SocketFile(address.path, address.mode)
            return [self._socket_file.bind()]
        return await bind_ports(address)

    async def drain(self) -> None:
        """Accept no more connections, and make each client reconnect."""
        if self._door is None:
            return
        file, self._socket_file = self._socket_file, None
        self._door.close()
        if file is not None:
            file.remove()
        self.farewell = EngineUnavailable(f"the server at {self._url} is going to be stopped")
        for connection in list(self.connections):
            connection.send_bye(self.farewell, again=True)

    async def aclose(self) -> None:
        """Close all connections, and with the last listener the sessions."""
        door, self._door = self._door, None
        self._close_given()
        if door is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        lost = [connection.gone for connection in self.connections]
        try:
            await door.aclose()
        finally:
            if self._socket_file is not None:
                self._socket_file.remove()
            self._cut_off_all()
            last = self.registry.unshare()
        if lost:
            await asyncio.wait(lost)
        if last:
            await self.registry.aclose()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK, self._tick)
        now = self.context.clock.now()
        for connection in list(self.connections):
            with self._failures.contained():
                connection.tick(now)
        with self._failures.contained():
            self._keep_socket_file()

    def _keep_socket_file(self) -> None:
        """Bind again if the file of the Unix socket was deleted; connections are not affected."""
        file, door = self._socket_file, self._door
        if file is None or door is None or not file.is_gone():
            return
        try:
            bound = file.bind(timeout=0)
        except EngineUnavailable as error:
            if not self._unreachable:
                self._unreachable = True
                self.context.log(
                    logging.ERROR,
                    "the socket file was deleted, and cannot be created again",
                    address=self._url,
                    why=error,
                )
            return
        self._unreachable = False
        door.replace([bound])
        self.context.log(
            logging.WARNING, "the socket file was deleted, and is created again", address=self._url
        )


def _refusal(error: LimitReached) -> bytes:
    """Return the last message to a client that is rejected before its greeting."""
    writer = FrameWriter(GREETING_BYTES)
    writer.add(Bye(to_wire(EngineUnavailable(str(error))), True))
    return bytes(writer.take())


def _bound_url(address: Address, bound: socket.socket) -> str:
    if address.path:
        return address.url
    place = shown(address.host, bound.getsockname()[1])
    return f"{address.url.partition('://')[0]}://{place}"
