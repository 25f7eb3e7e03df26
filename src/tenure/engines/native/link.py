"""The way from a program to its server: one connection at a time, made anew when it is lost.

Rules:

* The kit's reconnector chooses the server. After a lost connection the same one comes first, since
  it still has the sessions; but not one that was silent, that dismissed the client, that answered
  nothing, or that could not attach a session again.
* Pauses are never longer than the sessions can bear.
* Dialling, TLS and the greeting together have a time limit, a share of the shortest window.
* Events here are logged, without anything secret.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeAlias

from msgspec import Struct

from tenure.clock import Clock
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines._kit.reconnect import Reconnector
from tenure.engines._kit.url import Endpoint
from tenure.engines.advice import on_connecting
from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import Call, ConnectionGone
from tenure.engines.native.connection import Connection, Handlers
from tenure.engines.native.hearing import Receiver, hearing
from tenure.engines.native.url import NativeUrl
from tenure.errors import EngineUnavailable, SessionExpired, TenureError
from tenure.wire import messages as wire

__all__ = ["PATIENCE", "Dial", "Link", "LinkedSession", "dialler"]

Dial: TypeAlias = Callable[[Endpoint, asyncio.Protocol], Awaitable[None]]
"""Connects a protocol to a server; it raises `OSError`, and is cancelled when that takes long."""

PATIENCE = 10.0
"""Seconds for which a call waits for a connection, by default."""

_DIALLING = (0.5, 5.0)  # seconds that may be spent on one server: the least, and the most
_SILENCE = 0.5  # seconds of silence before a server is given up, at the least
_LONGEST_WINDOW = 1800.0

_log = logging.getLogger("tenure")


class LinkedSession(Receiver, Protocol):
    """Session over a link.

    Attributes:
        channel: where it is on every connection.
        window: its recovery window, in seconds.
        is_store_lost: the server has no contact to its own store.
    """

    channel: int
    window: float
    is_store_lost: bool

    def reattach(self, connection: Connection) -> None:
        """Reattach it on a new connection, unless it is over."""

    def cut_off(self) -> None:
        """Note that the connection is lost."""

    async def close(self) -> None:
        """End it."""

    def stop(self) -> None:
        """End it without the server, because the engine is closed."""


class Link:
    """An engine's connection to one server of several.

    Attributes:
        sessions: those that are attached, are being attached, or are to be attached again, by
            their channels.
        patience: seconds for which a call waits for a connection.
    """

    def __init__(self, address: NativeUrl, clock: Clock, program: bytes, dial: Dial) -> None:
        """Start without a connection, with the servers in random order."""
        self.address = address
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.sessions: dict[int, LinkedSession] = {}
        self.patience = PATIENCE
        self._disowned: dict[Struct, int] = {}
        self._program = program
        self._dial = dial
        endpoints = random.sample(address.endpoints, len(address.endpoints))
        self._reconnector = Reconnector[Endpoint, Connection](address.url, endpoints, self)
        self._made: set[Connection] = set()  # those whose transports are not closed yet
        self._last_rid = 0
        self._last_channel = 0

    # Life

    async def open(self) -> None:
        """Connect to any server of the URL; each is tried once.

        Raises:
            EngineUnavailable: none can be reached.
            AuthenticationFailed, Unsupported, EngineError: what one of them said.
        """
        try:
            await self._reconnector.open()
        except (Exception, asyncio.CancelledError):  # this object will not be closed later
            await self._until_closed()
            raise
        assert self.connection is not None
        self._warn_of_an_open_token(self.connection)

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        await self._reconnector.aclose()
        for session in list(self.sessions.values()):
            session.stop()
        await self._until_closed()

    async def _until_closed(self) -> None:
        """Wait until the transports are closed, and abort those that are not after a second."""
        if self._made:
            await asyncio.wait([each.gone for each in self._made], timeout=1.0)
        while self._made:
            for each in self._made:
                each.abort("the program closes it")
            await asyncio.wait([each.gone for each in self._made])

    async def connected(self) -> Connection:
        """Return the connection, and wait for it if necessary.

        Raises:
            EngineUnavailable: there was none for so long; or the engine is closed.
        """
        return await self._reconnector.connected(self.patience)

    @property
    def connection(self) -> Connection | None:
        """The connection in use; ``None`` while disconnected."""
        return self._reconnector.connection

    @property
    def failure(self) -> TenureError | None:
        """Cause of the lack of a connection; ``None`` while there is one."""
        return self._reconnector.failure

    def next_rid(self) -> int:
        """The number of the next request of this program."""
        self._last_rid += 1
        return self._last_rid

    @property
    def last_rid(self) -> int:
        """The number of the latest request."""
        return self._last_rid

    def next_channel(self) -> int:
        """A channel for one more session."""
        self._last_channel += 1
        return self._last_channel

    def add(self, session: LinkedSession) -> None:
        """Add a session; it limits the silence of a server."""
        self.sessions[session.channel] = session
        if self.connection is not None:
            self.connection.look_sooner()

    def disown(self, attach: Struct, channel: int, connection: Connection | None) -> None:
        """Close the abandoned new session that this may have begun, now or later.

        Where the answer is lost with the connection, both are said again over the next one.
        """
        self._disowned[attach] = channel
        if connection is not None:
            self._close_disowned(attach, channel, connection)

    def _close_disowned(self, attach: Struct, channel: int, connection: Connection) -> None:
        def closed(answer: asyncio.Future[object]) -> None:
            if not isinstance(answer.exception(), ConnectionGone):
                self._disowned.pop(attach, None)

        self.close_channel(channel, connection).add_done_callback(closed)

    def close_channel(self, channel: int, connection: Connection) -> asyncio.Future[object]:
        """Close a session that has no object any more; returns a future of the answer."""
        rid = self.next_rid()
        call = Call(rid, wire.Close(rid, channel), self.loop.create_future())
        connection.submit(call)
        return call.future

    def elsewhere(self, connection: Connection, why: str) -> None:
        """This server cannot do what must be done: try the others, and this one last."""
        self._reconnector.lost(connection, _unavailable(connection, why), first=False)

    @property
    def several(self) -> bool:
        """True if there is another server to try."""
        return self._reconnector.several

    @property
    def _shortest_window(self) -> float:
        return min((each.window for each in self.sessions.values()), default=_LONGEST_WINDOW)

    def pause(self, tries: int) -> float:
        """Seconds before the next try, after so many in vain."""
        return backoff(tries, self.longest_pause())

    # For the reconnector

    def longest_pause(self) -> float:
        """Longest pause between two attempts to connect, in seconds."""
        return min(LONGEST_PAUSE, self._shortest_window / 8)

    async def connect(self, host: Endpoint) -> Connection:
        """Connect to one server and wait for its greeting."""
        hello = wire.Hello(
            wire.VERSION, wire.VERSION, sorted(wire.FEATURES), self.address.token, self._program
        )
        connection = Connection(self, host, hello, self.clock, self.address.busy_poll)
        least, most = _DIALLING
        limit = max(least, min(most, self._shortest_window / 4))
        try:
            async with asyncio.timeout(limit):
                await self._dial(host, connection)
                self._made.add(connection)
                connection.gone.add_done_callback(lambda _: self._made.discard(connection))
                await asyncio.wait([connection.greeting])
            connection.greeting.result()
        except TenureError:  # before its builtin relatives: AuthenticationFailed is an OSError
            connection.abort("the server has refused")
            raise
        except TimeoutError:
            connection.abort("it was too late")
            raise EngineUnavailable(
                f"{host} did not answer within {limit:.1f} s; is it 'tenure serve', and does "
                "the URL's scheme say rightly whether it speaks TLS?"
            ) from None
        except OSError as error:
            connection.abort("it could not be made")
            refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            raise EngineUnavailable(
                f"there is no listener at {host}; see whether 'tenure serve' runs there"
                if refused
                else f"{host} cannot be reached: {error}{on_connecting(error, 'tenure')}"
            ) from error
        except BaseException:
            connection.abort("it is not wanted any more")
            raise
        connection.gone.add_done_callback(partial(self._gone, connection))
        return connection

    def _gone(self, connection: Connection, _: object) -> None:
        first = connection.useful and not connection.dismissed
        self._reconnector.lost(connection, _unavailable(connection, connection.why), first=first)

    def _warn_of_an_open_token(self, connection: Connection) -> None:
        if self.address.token and self.address.tls is None and not connection.endpoint.local:
            _log.warning(
                "the token is sent unencrypted; use tenures:// to encrypt it: url=%s",
                self.address.url,
            )

    def up(self, connection: Connection) -> None:
        """Reattach every session over a new connection."""
        for session in list(self.sessions.values()):
            session.reattach(connection)
        for attach, channel in list(self._disowned.items()):
            connection.send(attach)  # finds the session, if this server has begun it
            self._close_disowned(attach, channel, connection)

    def down(self, connection: Connection, why: TenureError) -> None:
        """Close a connection; sessions and calls wait for the next one."""
        connection.close(str(why))
        for call in connection.unanswered():
            if call.owner is None:
                call.fail(ConnectionGone(connection.why))
        for session in list(self.sessions.values()):
            session.cut_off()

    # For a connection

    def handlers(self, connection: Connection) -> Handlers:
        """Return the handlers of the messages of a connection."""
        return hearing(self.sessions, connection, self.refuse, self.close_channel)

    def silence_limit(self, heartbeat: float) -> float:
        """Return the seconds of silence after which a connection is given up."""
        return max(_SILENCE, min(3 * heartbeat, self._shortest_window / 3))

    def refuse(self, call: Call, error: TenureError) -> None:
        """A request has failed."""
        if call.owner is not None:
            call.owner.refused(call)
        expired = isinstance(error, SessionExpired)
        if expired and call.perhaps_done and isinstance(call.message, wire.Withdraw):
            call.succeed(Withdrawn.LEFT)  # before that, perhaps
        else:
            call.fail(error)


def _unavailable(connection: Connection, why: str) -> EngineUnavailable:
    return EngineUnavailable(f"{connection.endpoint}: {why}")


def dialler(address: NativeUrl, tls: ssl.SSLContext | None) -> Dial:
    """Return a dialler for TCP, TLS or a Unix socket, as the address says."""

    async def dial(endpoint: Endpoint, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        if endpoint.path:
            await loop.create_unix_connection(lambda: protocol, endpoint.path)
        elif tls is not None and address.tls is not None:
            name = address.tls.server_name or endpoint.host
            await loop.create_connection(
                lambda: protocol, endpoint.host, endpoint.port, ssl=tls, server_hostname=name
            )
        else:
            await loop.create_connection(lambda: protocol, endpoint.host, endpoint.port)

    return dial
