"""The way from a program to its server: one connection at a time, made anew when it is lost.

Rules:

* All servers of the URL are tried in turn, beginning with a random one. After a lost connection
  the same server comes first, since it still has the sessions; after one that was silent, that
  dismissed us or that could not take a session up again, it comes last.
* Between two rounds there is a pause, which grows, never beyond what the sessions can bear, and
  is never the same for two programs (jitter). A connection that was good for nothing counts as a
  failed try, so that a server which answers and refuses is not asked in a tight loop.
* Dialling, TLS and the greeting together have a time limit, a share of the shortest window.
* Events here are logged, without anything secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import TYPE_CHECKING

from msgspec import Struct

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines._kit.url import Endpoint
from tenure.engines.advice import on_connecting
from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import Call, ConnectionGone
from tenure.engines.native.connection import Connection
from tenure.engines.native.dial import Dial
from tenure.engines.native.url import NativeUrl
from tenure.errors import EngineUnavailable, SessionExpired, TenureError
from tenure.wire import messages as wire

if TYPE_CHECKING:
    from tenure.engines.native.session import NativeSession

__all__ = ["PATIENCE", "Link"]

PATIENCE = 10.0
"""Seconds for which a call waits for a connection, by default."""

_DIALLING = (0.5, 5.0)  # seconds that may be spent on one server: the least, and the most
_SILENCE = 0.5  # seconds of silence before a server is given up, at the least
_LONGEST_WINDOW = 1800.0

_log = logging.getLogger("tenure")


class Link:
    """An engine's connection to one server of several.

    Attributes:
        sessions: those that are attached, are being attached, or are to be attached again, by
            their channels.
        connection: the one that can be used; ``None`` while disconnected.
        patience: seconds for which a call waits for a connection.
    """

    def __init__(self, address: NativeUrl, clock: Clock, program: bytes, dial: Dial) -> None:
        self.address = address
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.decode = wire.server_message().decode
        self.sessions: dict[int, NativeSession] = {}
        self.connection: Connection | None = None
        self._disowned: dict[Struct, int] = {}
        self.patience = PATIENCE
        self._program = program
        self._dial = dial
        self._endpoints = list(address.endpoints)
        random.shuffle(self._endpoints)
        self._made: set[Connection] = set()  # those whose transports are not closed yet
        self._up = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._failures = Failures(f"keeping a connection to {address.url}", _log)
        self._tries = 0  # in vain, since the last connection that was of use
        self._trouble: TenureError = EngineUnavailable(f"{address.url} is not open")
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
            connection = await self._try_all()
        except (Exception, asyncio.CancelledError):  # this object will not be closed later
            await self._until_closed()
            raise
        if connection is None:
            await self._until_closed()
            raise self._trouble
        self._warn_of_an_open_token(connection)
        self._use(connection)
        self._running = self.loop.create_task(self._run(connection))

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        if self.connection is not None:
            self.connection.close("the program closes it")
            self._lose(self.connection)
        for session in list(self.sessions.values()):
            session.stop()
        self._up.set()  # wake those that wait for a connection: there will be none
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
        """The connection, waiting for one if need be.

        Raises:
            EngineUnavailable: there was none for so long; or the engine is closed.
        """
        if self._running is None:
            raise EngineUnavailable(f"{self.address.url} is not open")
        try:
            async with asyncio.timeout(self.patience):
                while self.connection is None:
                    await self._up.wait()
                    if self._running is None:
                        raise EngineUnavailable(f"{self.address.url} was closed")
                return self.connection
        except TimeoutError:
            raise EngineUnavailable(
                f"{self.address.url} has been out of reach for {self.patience:g} s: {self._trouble}"
            ) from None

    @property
    def failure(self) -> TenureError | None:
        """Cause of the lack of a connection; ``None`` while there is one."""
        return self._trouble if self.connection is None else None

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

    def add(self, session: NativeSession) -> None:
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

        rid = self.next_rid()
        call = Call(rid, wire.Close(rid, channel), self.loop.create_future())
        call.future.add_done_callback(closed)
        connection.submit(call)

    def elsewhere(self, connection: Connection, why: str) -> None:
        """This server cannot do what must be done: try the others, and this one last."""
        connection.dismissed = True
        connection.close(why)
        self._lose(connection)

    @property
    def several(self) -> bool:
        """True if there is another server to try."""
        return len(self._endpoints) > 1

    def silence_limit(self, heartbeat: float) -> float:
        """Seconds of silence after which a server is given up."""
        return max(_SILENCE, min(3 * heartbeat, self._shortest_window / 3))

    @property
    def _shortest_window(self) -> float:
        return min((each.window for each in self.sessions.values()), default=_LONGEST_WINDOW)

    def pause(self, tries: int) -> float:
        """Seconds before the next try, after so many in vain."""
        return backoff(tries, min(LONGEST_PAUSE, self._shortest_window / 8))

    # Connecting

    async def _run(self, connection: Connection) -> None:
        while True:
            await asyncio.wait([connection.gone])
            with self._failures.contained():
                self._lose(connection)
            connection = await self._connect_again(connection)
            _log.debug("connected to %s again", connection.endpoint)
            try:
                self._use(connection)
            except Exception as error:  # another connection takes its place
                self._failures.report(error)
                connection.abort("it could not be used")

    async def _connect_again(self, lost: Connection) -> Connection:
        if lost.useful and not lost.dismissed:
            self._tries = 0
        else:
            self._to_the_end(lost.endpoint)
            self._tries += 1
        _log.debug("the connection to %s is lost: %s; trying again", lost.endpoint, lost.why)
        while True:
            if self._tries and self._tries % len(self._endpoints) == 0:
                await asyncio.sleep(self.pause(self._tries // len(self._endpoints) - 1))
            before = str(self._trouble)
            connection = await self._try_all()
            if connection is not None:
                return connection
            if not isinstance(self._trouble, EngineUnavailable) and str(self._trouble) != before:
                _log.error("%s: trying again: %s", self.address.url, self._trouble)
            self._tries += len(self._endpoints) - self._tries % len(self._endpoints)

    def _to_the_end(self, endpoint: Endpoint) -> None:
        self._endpoints.remove(endpoint)
        self._endpoints.append(endpoint)

    async def _try_all(self) -> Connection | None:
        """A connection that was greeted, to the first server in turn that will have us."""
        troubles: list[TenureError] = []
        for endpoint in list(self._endpoints):
            try:
                return await self._greet(endpoint)
            except TenureError as error:
                troubles.append(error)
                self._to_the_end(endpoint)
            except Exception as error:  # whatever it is, it may pass
                self._failures.report(error)
                troubles.append(EngineUnavailable(f"{endpoint}: {error!r}"))
                self._to_the_end(endpoint)
        self._trouble = _worst(troubles)
        return None

    async def _greet(self, endpoint: Endpoint) -> Connection:
        hello = wire.Hello(
            wire.VERSION, wire.VERSION, sorted(wire.FEATURES), self.address.token, self._program
        )
        connection = Connection(self, endpoint, hello)
        least, most = _DIALLING
        limit = max(least, min(most, self._shortest_window / 4))
        try:
            async with asyncio.timeout(limit):
                await self._dial(endpoint, connection)
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
                f"{endpoint} did not answer within {limit:.1f} s; is it 'tenure serve', and does "
                "the URL's scheme say rightly whether it speaks TLS?"
            ) from None
        except OSError as error:
            connection.abort("it could not be made")
            refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            raise EngineUnavailable(
                f"there is no listener at {endpoint}; see whether 'tenure serve' runs there"
                if refused
                else f"{endpoint} cannot be reached: {error}{on_connecting(error, 'tenure')}"
            ) from error
        except BaseException:
            connection.abort("it is not wanted any more")
            raise
        return connection

    def _warn_of_an_open_token(self, connection: Connection) -> None:
        if self.address.token and self.address.tls is None and not connection.endpoint.local:
            _log.warning(
                "the token for %s goes over the network for everybody on the way to read; "
                "tenures:// would encrypt it",
                self.address.url,
            )

    def _use(self, connection: Connection) -> None:
        """It has been greeted: every session is attached again over it."""
        self.connection = connection
        self._up.set()
        for session in list(self.sessions.values()):
            session.reattach(connection)
        for attach, channel in list(self._disowned.items()):
            connection.send(attach)  # finds the session, if this server has begun it
            self._close_disowned(attach, channel, connection)

    def _lose(self, connection: Connection) -> None:
        """It is of no more use, if that is not known yet."""
        if self.connection is not connection:
            return
        self.connection = None
        self._up.clear()
        self._trouble = EngineUnavailable(f"{connection.endpoint}: {connection.why}")
        for call in connection.unanswered():
            if call.session is None:
                call.fail(ConnectionGone(connection.why))
        for session in list(self.sessions.values()):
            session.cut_off()

    def refuse(self, call: Call, error: TenureError) -> None:
        """A request has failed."""
        if call.session is not None:
            call.session.refused(call)
        expired = isinstance(error, SessionExpired)
        if expired and call.perhaps_done and isinstance(call.message, wire.Withdraw):
            call.succeed(Withdrawn.LEFT)  # before that, perhaps
        else:
            call.fail(error)


def _worst(troubles: list[TenureError]) -> TenureError:
    """Return the error of several servers: that of one that was reached, or else all of them."""
    for each in troubles:
        if not isinstance(each, EngineUnavailable):
            return each
    worst = EngineUnavailable("; ".join(map(str, troubles)))
    worst.__cause__ = troubles[0].__cause__
    return worst
