"""One server, and all connections of one program to it.

One connection is shared: it carries the first attempt of every request, and holds the locks that
were free at once. The kit's reconnector maintains it. Each other connection belongs to one request,
or is temporarily idle.

The shard owns all its tasks: `stop` cancels them and waits for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines._kit.operations import OperationQueues
from tenure.engines._kit.reconnect import LONGEST_PAUSE, Reconnector, backoff
from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.connection import DflockdConnection, Kind, dial, kind_of
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import EngineError, EngineUnavailable, TenureError, Unsupported
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, SemaphoreDescription
from tenure.wire import lines
from tenure.wire.lines import Reply

IDLE = 10.0
"""Seconds for which an idle connection is kept."""

PARTING = 1.0
"""Seconds within which a server notices that a waiter has disconnected."""

_UNKNOWN_TOKEN = "0" * 32
_log = logging.getLogger("tenure")


class Applicant(Protocol):
    """Request that needs a connection."""

    def go(self) -> None:
        """Use the shared connection, which is established."""

    def take(self, connection: DflockdConnection) -> None:
        """Use this connection, which holds nothing."""


class Shard:
    """One server.

    Args:
        changed: called when the shared connection is lost or re-established.

    Attributes:
        kind: the server's features; ``None`` until it was reached.
        queues: the operation queues of its keys.
    """

    def __init__(
        self, address: DflockdUrl, endpoint: Endpoint, clock: Clock, changed: Callable[[], None]
    ) -> None:
        """Start without connections; `open` connects."""
        self.kind: Kind | None = None
        self.queues = OperationQueues()
        self._address = address
        self._endpoint = endpoint
        self._clock = clock
        self._changed = changed
        self._reconnector = Reconnector[Endpoint, DflockdConnection](
            str(endpoint), [endpoint], self
        )
        self._awaiting_shared: dict[Applicant, None] = {}
        self._awaiting_own: dict[Applicant, None] = {}
        self._own: set[DflockdConnection] = set()
        self._idle: list[tuple[float, DflockdConnection]] = []
        self._orphans: list[bytes] = []
        self._dialling: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failures = Failures(f"connecting to {self}", _log)

    def __str__(self) -> str:
        """Return the server's endpoint."""
        return str(self._endpoint)

    @property
    def shared(self) -> DflockdConnection | None:
        """The shared connection; ``None`` while disconnected."""
        return self._reconnector.connection

    @property
    def failure(self) -> TenureError | None:
        """Reason why there is no shared connection; ``None`` while there is one."""
        return self._reconnector.failure

    @property
    def own(self) -> int:
        """Number of connections, without the shared one."""
        return len(self._own)

    async def open(self) -> None:
        """Try to connect once, and maintain a connection from then on."""
        await self._reconnector.open(required=False)

    async def stop(self) -> None:
        """Close everything. Safe to call twice."""
        self._stopping = True
        for task in self._dialling:
            task.cancel()
        if self._dialling:
            await asyncio.wait(self._dialling)
        await self._reconnector.aclose()
        for connection in self._own:
            connection.hang_up()
        self._own.clear()
        self._idle.clear()

    def connections(self) -> list[DflockdConnection]:
        """Return all connections."""
        return [*([] if self.shared is None else [self.shared]), *self._own]

    # The shared connection, for the reconnector

    async def connect(self, host: Endpoint) -> DflockdConnection:
        """Connect, and determine the kind of the server."""
        connection = await dial(self._address, host, self._clock)
        self.kind, connection = await kind_of(self._address, host, self._clock, connection)
        if connection.lost:
            raise EngineUnavailable(f"{host} closed the connection")
        return connection

    def up(self, connection: DflockdConnection) -> None:
        """Let requests use the new connection."""
        connection.users[self] = None
        self._changed()
        for release in self._orphans:
            connection.send(release, _ignore)
        self._orphans.clear()
        awaiting, self._awaiting_shared = self._awaiting_shared, {}
        for request in awaiting:
            with self._failures.contained():
                request.go()

    def down(self, connection: DflockdConnection, why: TenureError) -> None:  # noqa: ARG002  logged
        """Close a connection."""
        connection.hang_up()
        if not self._stopping:
            self._changed()

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts, in seconds."""
        return LONGEST_PAUSE

    def cut(self, why: str) -> None:
        """Reconnect: the shared connection is lost."""
        if self.shared is not None:
            error = EngineUnavailable(f"the connection to {self} was lost: {why}")
            self._reconnector.lost(self.shared, error, first=None)

    def await_shared(self, request: Applicant) -> None:
        """Call `request.go` when the connection is established."""
        self._awaiting_shared[request] = None

    def forget(self, request: Applicant) -> None:
        """Cancel a request's wait for a connection."""
        self._awaiting_shared.pop(request, None)
        self._awaiting_own.pop(request, None)

    def leave_behind(self, release: bytes) -> None:
        """Release a lock that was held on a lost connection.

        This is for a server that has not noticed the loss, or that keeps its locks over a restart.
        """
        if self.shared is not None:
            self.shared.send(release, _ignore)
        elif not self._stopping:
            self._orphans.append(release)

    # Connections of one request each

    def await_own(self, request: Applicant) -> None:
        """Call `request.take` with a connection that holds nothing."""
        self._awaiting_own[request] = None
        self._hand_out()

    def put_back(self, connection: DflockdConnection) -> None:
        """Keep a connection that holds nothing, unless it still expects replies."""
        if connection is self.shared:
            return
        if connection.lost or self._stopping or not connection.is_resting:
            self.drop(connection)
            return
        connection.users.clear()
        self._idle.append((self._clock.now(), connection))
        self._hand_out()

    def drop(self, connection: DflockdConnection) -> None:
        """Close a connection."""
        connection.hang_up()
        self.closed(connection)

    def part(self, connection: DflockdConnection, parted: Callable[[], None]) -> None:
        """Close a connection on which a request waits; call `parted` when the server has, too."""

        def closed() -> None:
            self.closed(connection)
            parted()

        connection.part(closed, 0.0 if self.kind is Kind.PLAIN else PARTING)

    def closed(self, connection: DflockdConnection) -> None:
        """Forget a connection that has been closed."""
        self._own.discard(connection)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._awaiting_own and not self._stopping:
            while self._idle:
                _, connection = self._idle.pop()
                if not connection.lost:
                    break
                self._own.discard(connection)
            else:
                break
            request = next(iter(self._awaiting_own))
            del self._awaiting_own[request]
            request.take(connection)
        most = self._address.connections - 1
        while not self._stopping and len(self._dialling) < min(
            len(self._awaiting_own), most - len(self._own)
        ):
            task = asyncio.create_task(self._dial())
            self._dialling.add(task)
            task.add_done_callback(self._dialled)

    async def _dial(self) -> None:
        """Open a connection for a request that still awaits one."""
        failures = 0
        while self._awaiting_own:
            try:
                connection = await dial(self._address, self._endpoint, self._clock)
            except Exception as error:
                if not isinstance(error, TenureError):
                    self._failures.report(error)
                _log.debug("server unreachable: peer=%s error=%s", self, error)
                await asyncio.sleep(backoff(failures))
                failures += 1
            else:
                self._own.add(connection)
                self._idle.append((self._clock.now(), connection))
                break

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dialling.discard(task)
        self._hand_out()

    # Upkeep

    def look_after(self) -> None:
        """Drop connections that do not answer, and keep idle ones alive."""
        now, quiet = self._clock.now(), self._address.read_timeout / 3.3
        limit = self._address.answer_timeout
        for connection in self.connections():
            if connection.is_silent(limit):
                connection.lose(f"the server did not answer within {limit:g} s")
            elif connection.lost:
                self._own.discard(connection)
            elif now >= connection.last_sent + quiet and not connection.is_blocked:
                connection.send(self.sign_of_life, _ignore)
        kept = [each for each in self._idle if now - each[0] < IDLE and not each[1].lost]
        dropped = [each[1] for each in self._idle if each not in kept]
        self._idle = kept
        for connection in dropped:
            self.drop(connection)
        if self._awaiting_own:
            self._hand_out()

    @property
    def sign_of_life(self) -> bytes:
        """Harmless request that keeps the connection open."""
        if self.kind is Kind.FENCING:
            return lines.PING
        return lines.renew("_", _UNKNOWN_TOKEN)

    async def prove_life(self) -> float:
        """Return the time of a request, once the server has answered it."""
        while True:
            connection = await self._reconnector.connected(None)
            at = self._clock.now()
            try:
                await connection.request(self.sign_of_life)
            except ConnectionError as error:
                _log.debug("server closed the connection: peer=%s error=%s", self, error)
            else:
                return at

    # The server's keys

    async def semaphores(self) -> list[SemaphoreDescription]:
        """Describe the keys of the server.

        Raises:
            Unsupported, EngineUnavailable, EngineError
        """
        if self.kind is Kind.PLAIN:
            raise cannot(f"list the keys of {self}, which runs dflockd 0.x", DEFAULT_NODE)
        if self.shared is None:
            raise EngineUnavailable(
                f"the keys of {self} are unknown: {self.failure}", node=DEFAULT_NODE
            ) from self.failure
        try:
            reply = await self.shared.request(lines.STATS)
            stats = json.loads(reply.body)
            return [
                *(_mutex(each["key"], 1, each["waiters"]) for each in stats["locks"]),
                *(_mutex(each["key"], 0, 0) for each in stats["idle_locks"]),
                *(_semaphore(each) for each in stats["semaphores"]),
            ]
        except ConnectionError as error:
            raise EngineUnavailable(
                f"the connection to {self} was lost: {error}", node=DEFAULT_NODE
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{self} did not describe its keys: {error!r}", node=DEFAULT_NODE
            ) from error


def _mutex(name: str, held: int, waiting: int) -> SemaphoreDescription:
    """Describe a key of limit 1: a mutex, unless a client uses it as a semaphore."""
    whole = EPHEMERAL_LIMIT
    return SemaphoreDescription(
        name, b"", whole, held * whole, ephemeral=True, waiting=int(waiting)
    )


def _semaphore(stats: dict[str, Any]) -> SemaphoreDescription:
    limit, held, waiting = int(stats["limit"]), int(stats["holders"]), int(stats["waiters"])
    return SemaphoreDescription(stats["key"], b"", limit, held, ephemeral=False, waiting=waiting)


def cannot(what: str, node: str | None = None, name: str | None = None) -> Unsupported:
    """Return the error for a feature that dflockd's protocol does not have."""
    return Unsupported(
        f"dflockd:// cannot {what}; sqlite://, redis:// and tenure:// can",
        node=node,
        name=name,
    )


def _ignore(reply: Reply) -> None:
    """Ignore the reply: its arrival is the proof of life."""
