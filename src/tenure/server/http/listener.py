"""The listener for HTTP: ``http://host:port``, or ``https://`` inside TLS.

States: made ─open─► open ─drain─► draining ─aclose─► closed; and from each of them to closed.

Ownership: the listener owns its `Door`, its connections, the tasks of their requests, and a timer
that checks deadlines. It shares the server's `HttpService`.

* **Drain.** The door is closed, and ``/readyz`` answers 503. Connections stay.
* **Close.** Connections end with the response in progress, and after a second at once. Then their
  requests are cancelled.
* **Cancel.** A cancelled close cuts off all clients at once.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from tenure.background import Failures
from tenure.errors import InvalidArgument
from tenure.server.addresses import bind_ports
from tenure.server.context import Context
from tenure.server.http.connection import HEAD_BYTES, HttpServerConnection
from tenure.server.http.options import HttpOptions
from tenure.server.http.service import HttpService
from tenure.server.limits import LimitReached
from tenure.server.listener import Door, Greeting, Listener
from tenure.wire.places import shown

_TICK = 1.0  # seconds between two checks of the connections' deadlines
_KEEP_ALIVE = 75  # seconds that a connection may be idle between two requests
_FLUSHED_IN = 1.0  # seconds for responses in progress, when the listener closes


class HttpListener(Listener[HttpServerConnection]):
    """``http://`` and ``https://``.

    Args:
        context, url, tls, sockets: see `Listener`.
        options: the options of the server's HTTP listeners.

    Raises:
        InvalidArgument: the URL is not valid.
    """

    service: HttpService

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
        options: HttpOptions | None = None,
    ) -> None:
        super().__init__(context, url, tls=tls, sockets=sockets)
        if self._address.protocol != "http":
            raise InvalidArgument(f"HTTP is listened to at http://host:port, not {url!r}")
        self._options = options or HttpOptions()
        self._port = self._address.port
        self._state = ServerState()
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Failures("looking after connections", self.context.logger)

    @property
    def address(self) -> str:
        """URL at which the listener accepts."""
        return f"{'http' if self._tls is None else 'https'}://{self._place}"

    @property
    def _place(self) -> str:
        return shown(self._address.host, self._port)

    async def open(self) -> None:
        """Bind and accept."""
        given, self._given = self._given, []
        sockets = given or await bind_ports(self._address)
        if sockets[0].family in {socket.AF_INET, socket.AF_INET6}:
            self._port = sockets[0].getsockname()[1]
        self._door = Door(
            self.context, sockets, self._make_connection(), self._tls, _refusal, self.traffic
        )
        try:
            self.service = await HttpService.share(self.context, self._options)
        except BaseException:
            self._door.close()
            self._door = None
            raise
        self._door.open()
        self._tick()

    def _make_connection(self) -> partial[HttpServerConnection]:
        config = Config(
            self._answer,
            loop="none",
            http=HttpServerConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # the client's address is that of its connection
            timeout_keep_alive=_KEEP_ALIVE,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        config.load()
        return partial(_connected, self, config, self._state)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. A cancelled one has lost its connection."""
        try:
            await self.service(scope, receive, send)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise

    @property
    def _is_closed(self) -> bool:
        return self._door is None

    async def drain(self) -> None:
        """Accept no more connections, and end each with its response in progress."""
        if self._door is None:
            return
        self._door.close()
        self.service.health.draining = True

    async def aclose(self) -> None:
        """Close all connections, and with the last listener what they share."""
        self._close_given()
        door = self._door
        if door is None:
            return
        try:
            await self.drain()
            await door.aclose()
            self.service.end_streams()
            for connection in list(self.connections):
                connection.drain()
            await self._wait_for_connections(_FLUSHED_IN)
        finally:
            self._door = None
            if self._timer is not None:
                self._timer.cancel()
            self._cut_off_all()
            await self._end_requests()

    async def _end_requests(self) -> None:
        """Cancel the requests of lost connections, and end this listener's share."""
        try:
            await self._wait_for_connections(None)
            tasks = set(self._state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        finally:
            await self.service.unshare()

    async def _wait_for_connections(self, seconds: float | None) -> None:
        """Wait until every connection is lost, or the time has passed."""
        lost = [connection.gone for connection in self.connections]
        if lost:
            await asyncio.wait(lost, timeout=seconds)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK, self._tick)
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date)]
        now = self.context.clock.now()
        for connection in list(self.connections):
            with self._failures.contained():
                connection.tick(now)


def _connected(
    listener: HttpListener, config: Config, state: ServerState, greeting: Greeting
) -> HttpServerConnection:
    return HttpServerConnection(listener, greeting, config, state)


def _refusal(error: LimitReached) -> bytes:
    """Return the answer to a client that is rejected before its request."""
    text = f"{error}\n".encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(text)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text
