"""Connections of one engine, with automatic reconnect. Pending commands survive a reconnect.

The kit's `Reconnector` decides when to connect. Rules:

* Each connection is prepared before it is used (see `RedisReconnectorOwner`).
* A command that is sent without a connection waits for the next one, behind earlier unanswered
  commands. They are sent, in that order, when every session is reattached. Requests that are
  withdrawn before that are dropped (see `UnsentOperations`).
* With RESP2, a second connection receives the pushes; when one ends, the other is closed. Commands
  then wait until subscriptions are confirmed. The second connection repeats a subscription
  periodically, because otherwise its end would not be noticed.
* With sentinels and in a cluster, a query every `_LOOK` seconds checks that the server is still the
  master: in a partition a former one keeps its connections, and answers. Sentinels and nodes that
  do not answer prove nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tenure.background import Failures
from tenure.engines._kit.commands.pipeline import Operation, UnsentOperations
from tenure.engines._kit.reconnect import LONGEST_PAUSE, Reconnector, backoff
from tenure.engines.contract import LastWords
from tenure.engines.redis.commands import UNSERVED, Command, Refusal, code_of, keys_of, pack
from tenure.engines.redis.connecting import (
    Loading,
    Lost,
    Moved,
    Server,
    connect,
    connect_once,
    greet,
    moved_to,
    shown,
    translated,
)
from tenure.engines.redis.connection import Batch, RedisConnection
from tenure.engines.redis.locating import HOPS, locator_of
from tenure.engines.redis.url import RedisUrl
from tenure.errors import EngineUnavailable, TenureError

_log = logging.getLogger("tenure")

_LONGEST_LOADING_PAUSE = 0.5
_LOOK = 1.0
"""Seconds between two queries of the sentinels, or of other nodes of the cluster."""

_Pair = tuple[RedisConnection, RedisConnection]
"""The connections for commands and for pushes, usually the same."""


class RedisReconnectorOwner(Protocol):
    """Receiver of the connections' reports."""

    def pushed(self, channel: bytes, message: bytes) -> None:
        """Handle a published message."""

    def lost(self, why: TenureError) -> None:
        """Handle the end of the connection."""

    async def prepare(self, connection: RedisConnection, server: Server) -> None:
        """Prepare a new connection, before it is used for commands."""

    def resumed(self) -> None:
        """Look up what may have been missed; pending commands have been sent again."""


class RedisReconnector:
    """Connections of one engine.

    Attributes:
        operate: sends an operation, now or when there is a connection.
    """

    operate: Callable[[Operation[Any]], None]

    def __init__(self, address: RedisUrl, owner: RedisReconnectorOwner) -> None:
        self._address = address
        self._owner = owner
        self._reconnector = Reconnector[str, _Pair](address.url, [address.url], self)
        self._connection: RedisConnection | None = None
        # Receives pushes; usually the same connection.
        self._receiver: RedisConnection | None = None
        self._waiting: deque[Command] = deque()
        self._unsent = UnsentOperations()  # after the waiting commands
        self._server: Server | None = None  # of the latest connection
        self._locator = locator_of(address)
        self._following: asyncio.Task[None] | None = None
        self._failures = Failures(f"following the master of {address.url}", _log)
        self._gates = 0
        self._channels: dict[str, None] = {}
        self._progress = (0, 0)
        self._was_up = False
        self._route()

    @property
    def failure(self) -> TenureError | None:
        """Reason why there is no connection; ``None`` while there is one."""
        return self._reconnector.failure

    def last_words(self, command: Command) -> LastWords | None:
        """Return the bytes of a command for a new connection to this server; none with TLS."""
        address, server = self._address, self._server
        if address.tls is not None or server is None:
            return None
        account = tuple(filter(None, (address.username, address.password)))
        login = pack(("AUTH", *account)) if address.password else b""
        database = pack(("SELECT", address.db)) if address.db else b""
        return LastWords(server.place, login + database + command.packed(keys_of(address.prefix)))

    @property
    def is_up(self) -> bool:
        """True while there is a connection."""
        return self._connection is not None

    async def open(self) -> None:
        """Connect for the first time, waiting for a server that loads its data.

        Raises:
            EngineUnavailable, AuthenticationFailed, Unsupported, EngineError, InvalidArgument
        """
        for failures in itertools.count():
            try:
                await self._reconnector.open()
                break
            except Loading as error:
                level = logging.DEBUG if failures else logging.WARNING
                _log.log(level, "waiting until the server has loaded its data: error=%s", error)
            await asyncio.sleep(backoff(failures, _LONGEST_LOADING_PAUSE))
        if self._locator.follows:
            self._following = asyncio.get_running_loop().create_task(self._follow())

    async def aclose(self) -> None:
        """Disconnect. Safe to call twice."""
        try:
            if self._following is not None:
                self._following.cancel()
                await asyncio.wait([self._following])
            await self._reconnector.aclose()
        finally:
            self._locator.disconnect()
            self._unsent.take_all()
            self._waiting.clear()

    # Sending

    def send(self, call: Command) -> None:
        """Send a command, now or when there is a connection."""
        if self._connection is None or self._gates:
            self._queue_operations()
            self._waiting.append(call)
        else:
            self._connection.send(call)

    def _route(self) -> None:
        """Choose the recipient of operations, to save a call."""
        connection = None if self._gates else self._connection
        self.operate = self._unsent.operate if connection is None else connection.operate

    def _queue_operations(self) -> None:
        self._waiting.extend(Batch(each.session, each) for each in self._unsent.take_all())

    def subscribe(self, channel: str) -> None:
        """Subscribe to a channel; commands sent from now on are later."""
        self._channels[channel] = None
        receiver = self._receiver
        if receiver is None:
            return
        if receiver is not self._connection:
            self._gates += 1
            self._route()
        receiver.subscribe(channel).add_done_callback(partial(self._confirmed, receiver))

    def unsubscribe(self, channel: str) -> None:
        """Unsubscribe from a channel."""
        self._channels.pop(channel, None)
        if self._receiver is not None:
            self._receiver.unsubscribe(channel)

    def _confirmed(self, receiver: RedisConnection, answer: asyncio.Future[Any]) -> None:
        error = answer.exception()
        if receiver is not self._receiver:
            return  # a gate belongs to its connection
        if error is not None:
            self.drop(str(error))
        elif receiver is not self._connection:
            self._gates -= 1
            self._route()
            self._send_waiting()

    def _send_waiting(self) -> None:
        self._queue_operations()
        while self._waiting and self._connection is not None and not self._gates:
            self._connection.send(self._waiting.popleft())

    def check(self) -> bool:
        """Return false if an answer is due and nothing has arrived since the last call."""
        if self._connection is None or self._receiver is None:
            return True
        before = self._progress
        self._progress = (self._connection.progress, self._receiver.progress)
        one, other = (now > then for now, then in zip(self._progress, before, strict=True))
        alive = (one or not self._connection.waits) and (other or not self._receiver.waits)
        if self._receiver is not self._connection and not self._receiver.waits:
            self._receiver.subscribe(next(iter(self._channels))).add_done_callback(_retrieve)
        return alive

    async def _follow(self) -> None:
        """Leave a server when another one has become the master."""
        while True:
            await asyncio.sleep(_LOOK)
            with self._failures.contained():
                await self._look()

    async def _look(self) -> None:
        server = self._server
        if server is None or self._connection is None:
            return
        try:
            place = await self._locator.newer(server)
        except TenureError as error:
            if self._address.service:
                _log.debug("the sentinels do not answer: error=%s", error)
            else:
                _log.debug("a node of the cluster does not answer: error=%s", error)
            return
        if place is not None and server is self._server:
            why = f"{shown(place)} instead of {shown(server.place)}"
            url = self._address.url
            if self._address.service:
                _log.warning("the sentinels name another master: url=%s reason=%s", url, why)
            else:
                _log.warning("the cluster names another master: url=%s reason=%s", url, why)
            self._locator.moved(place)
            self.drop(f"another server is the master now: {why}")

    # For the kit's reconnector

    async def connect(self, host: str) -> _Pair:
        """Open and prepare the connections."""
        if self._was_up:  # a server may drop every connection at once
            await asyncio.sleep(backoff(0))
        made: list[RedisConnection] = []

        def lost(why: str, unanswered: list[Command]) -> None:
            self._waiting.extendleft(reversed(unanswered))
            if self._connection in made:
                self.drop(why)
            for each in made:
                each.drop(why)

        try:
            connection, server = await self._connect(lost)
            made.append(connection)
            await self._locator.serve(connection, server)
            if server.protocol == 2:
                made.append(
                    await connect_once(self._address, server.place, self._owner.pushed, lost)
                )
            await self._prepare(connection, made[-1], server)
        except BaseException as error:
            for each in made:
                each.drop("it could not be prepared")
            if isinstance(error, OSError) and not isinstance(error, TenureError):
                raise EngineUnavailable(f"{host}: {error}") from error
            raise
        self._server = server
        return connection, made[-1]

    async def _connect(self, lost: Lost) -> tuple[RedisConnection, Server]:
        """Connect to the server that has the namespace."""
        for hop in range(HOPS):
            place = await self._locator.locate()
            try:
                return await connect(self._address, place, self._owner.pushed, lost)
            except Moved as moved:
                if hop == HOPS - 1:  # nodes that name each other: the next attempt queries all
                    raise
                self._locator.moved(moved.place)
        raise AssertionError

    async def _prepare(
        self, connection: RedisConnection, receiver: RedisConnection, server: Server
    ) -> None:
        try:
            async with asyncio.timeout(self._address.connect_timeout):
                if receiver is not connection:
                    await greet(receiver, self._address, protocol=2)
                await self._owner.prepare(connection, server)
                subscribed: set[str] = set()
                while missing := [each for each in self._channels if each not in subscribed]:
                    subscribed.update(missing)  # and others may join meanwhile
                    await receiver.subscribe(*missing)
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._address.url} does not answer") from error
        except Refusal as refusal:
            raise translated(self._address, refusal) from refusal
        if connection.over or receiver.over:
            raise EngineUnavailable(f"{self._address.url} closed the connection")

    def up(self, connection: _Pair) -> None:
        """Send the commands that wait for a connection."""
        self._connection, self._receiver = connection
        self._progress = (0, 0)
        self._was_up = True
        self._route()
        self._send_waiting()
        self._owner.resumed()

    def down(self, connection: _Pair, why: TenureError) -> None:
        """Drop the connections; commands wait for the next ones."""
        self._connection = self._receiver = None
        self._gates = 0
        self._route()
        for each in connection:
            each.drop(str(why))
        self._owner.lost(why)

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts, in seconds."""
        return LONGEST_PAUSE

    def drop(self, why: str) -> None:
        """Drop the connection, and make another one."""
        pair = self._reconnector.connection
        if pair is not None:
            code = code_of(why)
            error = EngineUnavailable(f"{self._address.url}: {UNSERVED.get(code, why)}")
            place = None if self._server is None else moved_to(why, self._server.place)
            if place is not None:
                self._locator.moved(place)
            first = None if code in UNSERVED else True
            self._reconnector.lost(pair, error, first=first)


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error of a subscription whose connection has ended."""
    answer.exception()
