"""Connection of an engine to one of its servers, with automatic reconnect.

Rules:

* The kit's reconnector chooses the server. After a lost connection the same one is first, since it
  still has the sessions. It is last if it was silent, dismissed the client, answered nothing, or
  could not reattach a session.
* Pauses are short compared with the shortest recovery window.
* Connecting, TLS and the greeting together have a timeout, a fraction of the shortest window.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from tenure.clock import Clock
from tenure.engines._kit.reconnect import LONGEST_PAUSE, Reconnector, backoff
from tenure.engines._kit.url import Endpoint
from tenure.engines.advice import on_connecting
from tenure.engines.contract import RateAnswer, RateRule, Withdrawn
from tenure.engines.native.calls import ConnectionGone, NativeCall
from tenure.engines.native.connection import Handlers, NativeConnection
from tenure.engines.native.url import NativeUrl
from tenure.errors import EngineError, EngineUnavailable, SessionExpired, TenureError
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire

Dial: TypeAlias = Callable[[Endpoint, asyncio.Protocol], Awaitable[None]]
"""Connects a protocol to a server. It raises `OSError`, and is cancelled after the timeout."""

CONNECTION_TIMEOUT = 10.0
"""Default timeout in seconds of a call's wait for a connection."""

_CONNECT_TIMEOUT = (0.5, 5.0)  # seconds that may be spent on one server: the least, and the most
_SILENCE = 0.5  # seconds of silence before a connection is dropped, at the least
_LONGEST_WINDOW = 1800.0

_log = logging.getLogger("tenure")


class ReconnectedSession(Protocol):
    """Session that is attached over the connections.

    Attributes:
        channel: its number on every connection.
        window: its recovery window, in seconds.
        is_store_lost: whether the server has lost contact to its store.
    """

    channel: int
    window: float
    is_store_lost: bool

    def attached(self, answer: wire.Attached, connection: NativeConnection) -> None:
        """Handle the answer to an attach over this connection."""

    def receive(self, message: Struct) -> None:
        """Handle a message that is not an answer."""

    def reattach(self, connection: NativeConnection) -> None:
        """Reattach it on a new connection, unless it has ended."""

    def interrupt(self) -> None:
        """Record that the connection is lost."""

    async def close(self) -> None:
        """End it."""

    def stop(self, error: TenureError) -> None:
        """End it without the server, because the engine is closed."""


class NativeReconnector:
    """Connection of an engine to one server of several, and its sessions.

    Attributes:
        sessions: the sessions by channel, attached, being attached or to be reattached.
        timeout: timeout in seconds of a call's wait for a connection.
    """

    def __init__(self, address: NativeUrl, clock: Clock, program: bytes, dial: Dial) -> None:
        self.address = address
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.sessions: dict[int, ReconnectedSession] = {}
        self.timeout = CONNECTION_TIMEOUT
        self._abandoned: dict[Struct, int] = {}
        self.program = program
        self._dial = dial
        endpoints = random.sample(address.endpoints, len(address.endpoints))
        self._reconnector = Reconnector[Endpoint, NativeConnection](address.url, endpoints, self)
        self._made: set[NativeConnection] = set()  # connections whose transports are not closed yet
        self._last_rid = 0
        self._last_channel = 0

    # Opening and closing

    async def open(self) -> None:
        """Connect to any server of the URL; each is tried once.

        Raises:
            EngineUnavailable: no server can be reached.
            AuthenticationFailed, Unsupported, EngineError: a server's error.
        """
        try:
            await self._reconnector.open()
        except (Exception, asyncio.CancelledError):  # otherwise this object could not be closed
            await self._until_closed()
            raise
        assert self.connection is not None
        if self.address.token and self.address.tls is None and not self.connection.endpoint.local:
            _log.warning(
                "the token is sent unencrypted; use tenures:// to encrypt it: url=%s",
                self.address.url,
            )

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        await self._reconnector.aclose()
        for session in list(self.sessions.values()):
            session.stop(EngineError(f"{self.address.url} was closed"))
        await self._until_closed()

    async def _until_closed(self) -> None:
        """Wait until the transports are closed, and abort the others after a second."""
        if self._made:
            await asyncio.wait([each.gone for each in self._made], timeout=1.0)
        while self._made:
            for each in self._made:
                each.abort("the program closes it")
            await asyncio.wait([each.gone for each in self._made])

    # The connection

    async def connected(self) -> NativeConnection:
        """Return the connection, waiting for it if necessary.

        Raises:
            EngineUnavailable: there was none for `timeout` seconds, or the engine is closed.
        """
        return await self._reconnector.connected(self.timeout)

    @property
    def connection(self) -> NativeConnection | None:
        """The connection in use; ``None`` while disconnected."""
        return self._reconnector.connection

    @property
    def failure(self) -> TenureError | None:
        """Cause of the missing connection; ``None`` while there is one."""
        return self._reconnector.failure

    @property
    def several(self) -> bool:
        """True if there is another server to try."""
        return self._reconnector.several

    def try_others(self, connection: NativeConnection, why: str) -> None:
        """Drop a connection, and try its server last."""
        self._reconnector.lost(connection, _unavailable(connection, why), first=False)

    def pause(self, failures: int) -> float:
        """Return the seconds before the next attempt, after so many failures."""
        return backoff(failures, self.longest_pause())

    # Calls and sessions

    def next_rid(self) -> int:
        """Return the number of the next call of this program."""
        self._last_rid += 1
        return self._last_rid

    @property
    def last_rid(self) -> int:
        """The number of the latest call."""
        return self._last_rid

    def next_channel(self) -> int:
        """Return a channel for one more session."""
        self._last_channel += 1
        return self._last_channel

    def add(self, session: ReconnectedSession) -> None:
        """Add a session; its window limits the silence of a server."""
        self.sessions[session.channel] = session
        if self.connection is not None:
            self.connection.check_sooner()

    def fail(self, call: NativeCall, error: TenureError) -> None:
        """Fail a call."""
        if call.owner is not None:
            call.owner.failed(call)
        expired = isinstance(error, SessionExpired)
        if expired and call.may_have_run and isinstance(call.message, wire.Withdraw):
            call.succeed(Withdrawn.LEFT)
        else:
            call.fail(error)

    def close_abandoned(
        self, attach: Struct, channel: int, connection: NativeConnection | None
    ) -> None:
        """Close the abandoned new session that this message may have opened, now or later.

        If the answer is lost with the connection, both messages are sent again over the next one.
        """
        self._abandoned[attach] = channel
        if connection is not None:
            self._close_abandoned(attach, channel, connection)

    def _close_abandoned(self, attach: Struct, channel: int, connection: NativeConnection) -> None:
        def closed(answer: asyncio.Future[object]) -> None:
            if not isinstance(answer.exception(), ConnectionGone):
                self._abandoned.pop(attach, None)

        self.close_channel(channel, connection).add_done_callback(closed)

    def close_channel(self, channel: int, connection: NativeConnection) -> asyncio.Future[object]:
        """Close a session without an object; return a future of the answer."""
        rid = self.next_rid()
        call = NativeCall(rid, wire.Close(rid, channel), self.loop.create_future())
        connection.submit(call)
        return call.future

    # For the kit's reconnector

    @property
    def _shortest_window(self) -> float:
        return min((each.window for each in self.sessions.values()), default=_LONGEST_WINDOW)

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts to connect, in seconds."""
        return min(LONGEST_PAUSE, self._shortest_window / 8)

    def hello(self) -> wire.Hello:
        """Return the first message of a connection."""
        features = sorted(wire.FEATURES)
        return wire.Hello(wire.VERSION, wire.VERSION, features, self.address.token, self.program)

    async def connect(self, host: Endpoint) -> NativeConnection:
        """Connect to one server and wait for its greeting."""
        connection = NativeConnection(self, host, self.hello(), self.clock, self.address.busy_poll)
        least, most = _CONNECT_TIMEOUT
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
                f"{host} did not answer within {limit:.1f} s. Check that it is 'tenure serve', and "
                "that the URL's scheme says whether it uses TLS"
            ) from None
        except OSError as error:
            connection.abort("it could not be opened")
            refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            raise EngineUnavailable(
                f"there is no listener at {host}; see whether 'tenure serve' runs there"
                if refused
                else f"{host} cannot be reached: {error}{on_connecting(error, 'tenure')}"
            ) from error
        except BaseException:
            connection.abort("it is not needed any more")
            raise
        connection.gone.add_done_callback(partial(self._gone, connection))
        return connection

    def _gone(self, connection: NativeConnection, _: object) -> None:
        first = connection.useful and not connection.dismissed
        self._reconnector.lost(connection, _unavailable(connection, connection.why), first=first)

    def up(self, connection: NativeConnection) -> None:
        """Reattach every session over a new connection."""
        for session in list(self.sessions.values()):
            session.reattach(connection)
        for attach, channel in list(self._abandoned.items()):
            connection.send(attach)  # finds the session, if this server has opened it
            self._close_abandoned(attach, channel, connection)

    def down(self, connection: NativeConnection, why: TenureError) -> None:
        """Close a connection; sessions and calls wait for the next one."""
        connection.close(str(why))
        for call in connection.unanswered():
            if call.owner is None:
                call.fail(ConnectionGone(connection.why))
        for session in list(self.sessions.values()):
            session.interrupt()

    # For a connection

    def handlers(self, connection: NativeConnection) -> Handlers:
        """Return the handlers of the messages of a connection."""
        return dispatch(self.sessions, connection, self.fail, self.close_channel)

    def silence_limit(self, heartbeat: float) -> float:
        """Return the seconds of silence after which a connection is dropped."""
        return max(_SILENCE, min(3 * heartbeat, self._shortest_window / 3))


def _unavailable(connection: NativeConnection, why: str) -> EngineUnavailable:
    return EngineUnavailable(f"{connection.endpoint}: {why}")


def dialler(address: NativeUrl, tls: ssl.SSLContext | None) -> Dial:
    """Return a dialler for TCP, TLS or a Unix socket, depending on the address."""

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


def dispatch(
    sessions: Mapping[int, ReconnectedSession],
    connection: NativeConnection,
    fail: Callable[[NativeCall, TenureError], None],
    close: Callable[[int, NativeConnection], object],
) -> Handlers:
    """Return the handler of each message of a connection.

    Args:
        sessions: the sessions by channel.
        connection: the connection of the messages.
        fail: fails a call.
        close: closes a session that was attached to an unknown channel.
    """
    calls, answered = connection.calls, connection.answered

    def succeed(rid: int, result: object) -> None:
        call = answered(rid)
        if call is not None:
            if call.owner is not None:
                call.owner.answered(call)
            call.succeed(result)

    def placed(answer: wire.Placed) -> None:
        call = answered(answer.rid)
        if call is not None and call.owner is not None:
            call.owner.placed(call, answer)

    def done(answer: wire.Done) -> None:
        call = calls.get(answer.rid)
        if call is not None and isinstance(call.message, wire.Withdraw):
            # A server older than this field omits it.
            was_there = answer.found is not False or call.may_have_run
            succeed(answer.rid, Withdrawn.LEFT if was_there else Withdrawn.MISSING)
        else:
            succeed(answer.rid, answer.found)

    def failed(answer: wire.Failed) -> None:
        call = answered(answer.rid)
        if call is not None:
            fail(call, from_wire(answer.error))

    def attached(answer: wire.Attached) -> None:
        call = answered(answer.rid)
        if call is None or call.future.done():
            return  # it was cancelled, and the server has been notified
        assert isinstance(call.message, wire.Attach)
        channel = call.message.channel
        session = sessions.get(channel)
        if session is not None:
            session.attached(answer, connection)
            call.succeed(None)
        else:  # its window has passed meanwhile, for the program
            close(channel, connection)

    def part(rid: int, found: list[Any], *, more: bool) -> None:
        call = calls.get(rid)
        if call is not None:
            call.parts += found
            if not more:
                succeed(rid, call.parts)

    def semaphores_listed(answer: wire.SemaphoresListed) -> None:
        part(answer.rid, [each.model() for each in answer.semaphores], more=answer.more)

    def sessions_listed(answer: wire.SessionsListed) -> None:
        part(answer.rid, [each.model() for each in answer.sessions], more=answer.more)

    def requests_listed(answer: wire.RequestsListed) -> None:
        part(answer.rid, [each.model() for each in answer.requests], more=answer.more)

    def rate_decided(answer: wire.RateDecided) -> None:
        rule = RateRule(answer.limit, answer.per, answer.burst)
        decided = RateAnswer(rule, answer.granted, answer.wait, answer.at, answer.free)
        succeed(answer.rid, decided)

    def deliver(push: Any) -> None:
        session = sessions.get(push.channel)
        if session is not None:
            session.receive(push)

    def ended(push: wire.Ended) -> None:
        deliver(push)
        connection.send(wire.EndReceived(push.channel))

    return {
        wire.Placed: placed,
        wire.Done: done,
        wire.Failed: failed,
        wire.Attached: attached,
        wire.SemaphoreDescribed: lambda each: succeed(each.rid, each.semaphore.model()),
        wire.NodeDescribed: lambda each: succeed(each.rid, each.node.model()),
        wire.NodesListed: lambda each: part(each.rid, each.paths, more=each.more),
        wire.NamesListed: lambda each: succeed(each.rid, each.names),
        wire.SemaphoresListed: semaphores_listed,
        wire.SessionsListed: sessions_listed,
        wire.RequestsListed: requests_listed,
        wire.StoreTime: lambda each: succeed(each.rid, each.seconds),
        wire.RateDecided: rate_decided,
        wire.Granted: deliver,
        wire.Removed: deliver,
        wire.Changed: deliver,
        wire.WatchRefused: deliver,
        wire.Proven: deliver,
        wire.Contact: deliver,
        wire.Ended: ended,
        wire.Unproven: _ignore,
        wire.Pong: _ignore,
    }


def _ignore(_: Struct) -> None:
    """Ignore a message that only shows that the server is alive."""
