"""One server, and all connections of one program to it.

One connection is shared: keys are tried for on it, and what was free at once is held on it. It is
dialled anew whenever it is lost. The others each belong to one request, or are idle for a while.

All tasks here are the shard's own: `stop` ends them, and waits for that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines._kit.url import Endpoint
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.dialing import Kind, dial, kind_of
from tenure.engines.dflockd.line import Lines
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import EngineError, EngineUnavailable, Unsupported
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, SemaphoreDescription
from tenure.wire.lines import asking
from tenure.wire.lines.replies import Reply

__all__ = ["Shard", "cannot", "words"]

IDLE = 10.0
"""Seconds for which a connection is kept that holds nothing."""

PARTING = 1.0
"""Seconds within which a server notices that a waiter has left."""

_UNKNOWN_TOKEN = "0" * 32
_log = logging.getLogger("tenure")


class Applicant(Protocol):
    """Request that needs a connection."""

    def go(self) -> None:
        """Go on: the shared connection is there."""

    def take(self, connection: DflockdConnection) -> None:
        """Use this connection, which holds nothing."""


class Shard:
    """One server.

    Args:
        changed: called when the shared connection is lost, and when there is another one.

    Attributes:
        kind: what it can do; ``None`` until it has been reached.
        shared: the connection that all share, while there is one.
        failure: why the latest attempt to connect failed; ``None`` when it did not.
        tried: set when the first attempt to connect has ended.
        lines: the order of what is asked for there.
    """

    def __init__(
        self, address: DflockdUrl, endpoint: Endpoint, clock: Clock, changed: Callable[[], None]
    ) -> None:
        """Start without connections; `start` connects."""
        self.kind: Kind | None = None
        self.shared: DflockdConnection | None = None
        self.failure: OSError | None = None
        self.tried = asyncio.Event()
        self.came_up = asyncio.Event()
        self.lines = Lines()
        self._address = address
        self._endpoint = endpoint
        self._clock = clock
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._wanting: dict[Applicant, None] = {}
        self._waiting: dict[Applicant, None] = {}  # for a connection of their own
        self._own: set[DflockdConnection] = set()
        self._idle: list[tuple[float, DflockdConnection]] = []
        self._orphans: list[bytes] = []
        self._dialling = 0
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failures = Failures(f"connecting to the dflockd server at {self}", _log)

    def __str__(self) -> str:
        """Return the server's endpoint."""
        return str(self._endpoint)

    @property
    def own(self) -> int:
        """Number of connections beside the shared one."""
        return len(self._own)

    def start(self) -> None:
        """Connect, now and whenever the connection is lost."""
        self._begin(self._keep_connected())

    async def stop(self) -> None:
        """Close everything. Safe to call twice."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for connection in self.connections():
            connection.hang_up()
        self.shared = None
        self._own.clear()
        self._idle.clear()

    def connections(self) -> list[DflockdConnection]:
        """All that there are."""
        return [*([] if self.shared is None else [self.shared]), *self._own]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The shared connection

    def want_shared(self, request: Applicant) -> None:
        """Have `request.go` called when the connection is there."""
        self._wanting[request] = None

    def forget(self, request: Applicant) -> None:
        """It wants no connection any more."""
        self._wanting.pop(request, None)
        self._waiting.pop(request, None)

    async def _keep_connected(self) -> None:
        failures = 0
        while True:
            try:
                connection = await dial(self._address, self._endpoint, self._clock)
                self.kind, connection = await kind_of(
                    self._address, self._endpoint, self._clock, connection
                )
            except Exception as error:
                self._failed(error)
                await asyncio.sleep(backoff(failures))
                failures += 1
                continue
            self.failure = None
            began = self._clock.now()
            await self._serve_until_lost(connection)
            lasted = self._clock.now() - began
            failures = 0 if lasted > LONGEST_PAUSE else failures + 1
            await asyncio.sleep(backoff(failures))

    async def _serve_until_lost(self, connection: DflockdConnection) -> None:
        self._lost.clear()
        connection.users[self] = None
        self.shared = connection
        self.tried.set()
        self.came_up.set()
        if connection.lost:
            self.cut("it was closed")
        else:
            self._changed()
        for release in self._orphans:
            connection.ask(release, _ignore)
        self._orphans.clear()
        wanting, self._wanting = self._wanting, {}
        for request in wanting:
            with self._failures.contained():
                request.go()
        await self._lost.wait()

    def cut(self, why: str) -> None:
        """The shared connection is lost."""
        _log.debug("connection lost: peer=%s error=%s", self, why)
        self.failure = ConnectionResetError(why)
        self.shared = None
        self.came_up.clear()
        self._lost.set()
        self._changed()

    def leave_behind(self, release: bytes) -> None:
        """Release something that was held on a connection that is lost.

        This is for a server that has not noticed the loss, or that keeps its holds over a restart.
        """
        if self.shared is not None:
            self.shared.ask(release, _ignore)
        elif not self._stopping:
            self._orphans.append(release)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, OSError):  # not of the network
            self._failures.report(error)
            error = EngineUnavailable(f"{type(error).__name__}: {error}")
        if self.failure is None:
            _log.debug("server unreachable: peer=%s error=%s", self, error)
        self.failure = error
        self.tried.set()

    # Connections of one's own

    def want_own(self, request: Applicant) -> None:
        """Have `request.take` called with a connection that holds nothing."""
        self._waiting[request] = None
        self._hand_out()

    def give_back(self, connection: DflockdConnection) -> None:
        """Keep a connection that holds nothing, unless something on it has not been answered."""
        if connection is self.shared:
            return
        if connection.lost or self._stopping or not connection.is_resting:
            self.drop(connection)
            return
        connection.users.clear()
        self._idle.append((self._clock.now(), connection))
        self._hand_out()

    def drop(self, connection: DflockdConnection) -> None:
        """It is of no use any more."""
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
        while self._waiting and not self._stopping:
            while self._idle:
                _, connection = self._idle.pop()
                if not connection.lost:
                    break
                self._own.discard(connection)
            else:
                break
            request = next(iter(self._waiting))
            del self._waiting[request]
            request.take(connection)
        most = self._address.connections - 1
        while self._dialling < min(len(self._waiting), most - len(self._own)) and (
            not self._stopping
        ):
            self._dialling += 1
            self._begin(self._dial())

    async def _dial(self) -> None:
        failures = 0
        try:
            while self._waiting:
                try:
                    connection = await dial(self._address, self._endpoint, self._clock)
                except Exception as error:
                    self._failed(error)
                    await asyncio.sleep(backoff(failures))
                    failures += 1
                    continue
                self.failure = None
                self._own.add(connection)
                self._idle.append((self._clock.now(), connection))
                break
        finally:
            self._dialling -= 1
        self._hand_out()

    # Upkeep

    def look_after(self) -> None:
        """Drop connections that do not answer, and keep idle ones alive."""
        now, quiet = self._clock.now(), self._address.read_timeout / 3.3
        for connection in self.connections():
            if connection.is_silent(self._address.patience):
                connection.lose(f"the server did not answer within {self._address.patience:g} s")
            elif connection.lost:
                self._own.discard(connection)
            elif now >= connection.last_sent + quiet and not connection.is_blocked:
                connection.ask(self.sign_of_life, _ignore)
        kept = [each for each in self._idle if now - each[0] < IDLE and not each[1].lost]
        dropped = [each[1] for each in self._idle if each not in kept]
        self._idle = kept
        for connection in dropped:
            self.drop(connection)
        if self._waiting:
            self._hand_out()

    @property
    def sign_of_life(self) -> bytes:
        """A request that changes nothing, and after which the connection stays open."""
        if self.kind is Kind.FENCING:
            return asking.PING
        return asking.renew("_", _UNKNOWN_TOKEN)

    async def prove_life(self) -> float:
        """Return the time of a request that the server answered, once it does."""
        while True:
            await self.came_up.wait()
            connection = self.shared
            if connection is not None:
                at = self._clock.now()
                try:
                    await connection.request(self.sign_of_life)
                except ConnectionError as error:
                    _log.info("server closed the connection: peer=%s error=%s", self, error)
                    await asyncio.sleep(0)
                else:
                    return at

    # What the server tells of itself

    async def semaphores(self) -> list[SemaphoreDescription]:
        """Describe what the server has. Raises what fails."""
        if self.kind is Kind.PLAIN:
            raise cannot(f"see what a server before dflockd 1.0 has ({self})", DEFAULT_NODE)
        if self.shared is None:
            raise EngineUnavailable(
                f"the dflockd server at {self} cannot be reached: {words(self.failure)}",
                node=DEFAULT_NODE,
            ) from self.failure
        try:
            reply = await self.shared.request(asking.STATS)
            stats = json.loads(reply.body)
            return [
                *(_mutex(each["key"], 1, each["waiters"]) for each in stats["locks"]),
                *(_mutex(each["key"], 0, 0) for each in stats["idle_locks"]),
                *(_semaphore(each) for each in stats["semaphores"]),
            ]
        except ConnectionError as error:
            raise EngineUnavailable(
                f"the connection to the dflockd server at {self} was lost: {words(error)}",
                node=DEFAULT_NODE,
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"the dflockd server at {self} does not tell what it has: {words(error)}",
                node=DEFAULT_NODE,
            ) from error


def _mutex(name: str, held: int, waiting: int) -> SemaphoreDescription:
    """A key of limit 1, which is a mutex unless a client uses it as a semaphore."""
    whole = EPHEMERAL_LIMIT
    return SemaphoreDescription(
        name, b"", whole, held * whole, ephemeral=True, waiting=int(waiting)
    )


def _semaphore(told: dict[str, Any]) -> SemaphoreDescription:
    limit, held, waiting = int(told["limit"]), int(told["holders"]), int(told["waiters"])
    return SemaphoreDescription(told["key"], b"", limit, held, ephemeral=False, waiting=waiting)


def cannot(what: str, node: str | None = None, name: str | None = None) -> Unsupported:
    """The error for what dflockd's protocol has no words for."""
    return Unsupported(
        f"dflockd:// cannot {what}; sqlite://, redis:// and tenure:// can",
        node=node,
        name=name,
    )


def words(error: Exception | None) -> str:
    """Describe why a server is not connected, for people."""
    return "not reached yet" if error is None else str(error) or type(error).__name__


def _ignore(reply: Reply) -> None:
    """Ignore the reply: its arrival is the proof of life."""
