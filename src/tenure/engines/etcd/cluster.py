"""An etcd cluster, as all sessions of an engine share it: members, watches, renewals and tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tenure.clock import Clock
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.keys import Keys, Name
from tenure.engines.etcd.late import LateWaiters
from tenure.engines.etcd.members import Lost, Members, Refused, failure, pauses
from tenure.engines.etcd.renewing import Renewable, Renewer, Rounds
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watching import Watching
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    NodeNotFound,
    SemaphoreNotFound,
    TenureError,
)

__all__ = ["EtcdAttempts", "EtcdCluster", "no_node", "not_found"]

T = TypeVar("T")
_log = logging.getLogger("tenure")

_NAMES = 4096
"""The number of names that are remembered, with what is prepared for them."""


class EndableSession(Renewable, Protocol):
    """A session, as its engine ends it."""

    def contact(self, there: bool, cause: TenureError | None = None) -> None:
        """Report to the program that a member is reached, or why none is."""

    def stop(self, error: TenureError) -> None:
        """End with the engine."""

    async def close(self) -> None:
        """Close the session."""


class EtcdCluster:
    """Services for the sessions of one engine.

    Attributes:
        keys: where everything lies.
        base: what is added to a create revision to make an order id.
        sessions: those that are attached.
        local: the requests of all sessions here, by their keys.
        names: the keys of semaphores, by node and name.
        members: of the cluster.
        tasks: those that `aclose` waits for.
        is_open: it may be used.
        patience: seconds after which an unanswered call is sent to another member, at the most.
    """

    loop: asyncio.AbstractEventLoop
    watching: Watching

    def __init__(self, address: EtcdUrl, clock: Clock, members: Members | None = None) -> None:
        """Start closed and without sessions."""
        self.url = address.url
        self.clock = clock
        self.keys = Keys(address.prefix)
        self.base = 0
        self.patience = address.timeout
        self.address = address
        self.is_open = False
        self.sessions: set[EndableSession] = set()
        self.local: dict[bytes, EtcdRequest] = {}
        self.late = LateWaiters(self.keys, clock, self.local, self.txn, self.patience)
        self.members = Members(address) if members is None else members
        self._thread = 0
        self.names: dict[tuple[str, str], Name] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if it is not open."""
        if not self.is_open:
            raise EngineUnavailable(f"{self.url} is not open")

    def _open_services(self) -> None:
        """Open what is shared, on the running loop."""
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.members.open()
        self._rounds = Rounds(self.members, self.clock, self.spawn)
        self._renewer = Renewer(self.address, self.clock, self.loop)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task that `aclose` waits for."""
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Asking

    async def txn(self, request: bytes, timeout: float) -> answers.Answer:
        """Send a transaction. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        return answers.read_answer(await self.members.call(wire.TXN, request, timeout))

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Call the current member. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        return await self.members.call(method, request, timeout)

    def reader(self, node: str | None) -> EtcdAttempts:
        """Return a reader that repeats its calls until the engine's patience is over."""
        return EtcdAttempts(self, node, self.address.connect_timeout + self.patience)

    def failure(self, refused: Refused, node: str | None, name: str | None = None) -> TenureError:
        """Make an error of a refusal."""
        return failure(self.url, refused, node=node, name=name)

    async def eventually(self, request: bytes, within: float, what: str) -> None:
        """See to it that something is done that may be done twice."""
        try:
            await self._repeat(lambda: self.txn(request, self.patience), within)
        except (Refused, TenureError) as error:
            _log.debug("write failed: operation=%s url=%s error=%s", what, self.url, error)

    async def _repeat(self, call: Callable[[], Awaitable[object]], within: float) -> None:
        """Call until there is an answer, or the time is over."""
        until, pause = self.clock.now() + within, pauses()
        while self.clock.now() < until:
            try:
                await call()
            except Lost:
                await asyncio.sleep(next(pause))
            else:
                return

    # Leases

    def renew(self, session: Renewable) -> None:
        """Have a session's lease kept alive. From any thread."""
        if threading.get_ident() == self._thread:
            self._rounds.renew(session)
        else:
            self._renewer.renew(session)

    async def keep_alive(self, session: Renewable) -> None:
        """Keep a lease alive, for a caller that leaves it or takes it over. Raises `Lost`."""
        turn = self.members.turn
        try:
            async with asyncio.timeout(session.patience):
                await self._rounds.keep_alive(turn, [session])
        except (Lost, TimeoutError) as error:
            self.members.leave(turn, str(error) or "a lease was not renewed in time")
            raise Lost(str(error)) from error

    async def revoke(self, number: int, within: float) -> None:
        """Revoke a lease, with everything under it."""
        request = wire.lease(number)
        try:
            await self._repeat(lambda: self.call(wire.LEASE_REVOKE, request, self.patience), within)
        except Refused as refused:
            if not refused.no_lease:
                raise self.failure(refused, None) from refused

    def name(self, path: str, name: str) -> Name:
        """The keys of a semaphore, whose name has been checked."""
        found = self.names.get((path, name))
        if found is None:
            if len(self.names) >= _NAMES:
                del self.names[next(iter(self.names))]
            found = self.names[path, name] = self.keys.name(path, name)
        return found


class EtcdAttempts:
    """Repeated calls, until there is an answer or they have taken too long.

    Args:
        within: seconds.
    """

    def __init__(self, engine: EtcdCluster, node: str | None, within: float) -> None:
        """Start the first attempt now; none begins after `within` seconds."""
        self._engine = engine
        self._node = node
        self._within = within
        self._until = engine.clock.now() + within
        self._pauses = pauses()

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority. Raises `Refused`, `EngineError`."""
        while True:
            answer = await self.txn(wire.txn((), parts))
            if answer is not None:
                return answer

    async def txn(self, request: bytes) -> answers.Answer | None:
        """Send a transaction; ``None``, after a pause, if it was not answered."""
        try:
            return await self._engine.txn(request, self._engine.patience)
        except Lost as lost:
            await self.again(lost)
            return None

    async def again(self, lost: Lost) -> None:
        """Wait a moment; raises `EngineError` if it has taken too long."""
        pause = next(self._pauses)
        if self._engine.clock.now() + pause >= self._until:
            raise self.error(lost) from lost
        await asyncio.sleep(pause)

    def error(self, lost: Lost) -> TenureError:
        """Make the error for calls that have taken too long."""
        return EngineError(f"{self._engine.url} did not answer ({lost})", node=self._node)


def no_node(path: str) -> NodeNotFound:
    """The error for a path without a node."""
    return NodeNotFound(
        f"there is no node {path}; create it with client.create_node({path!r}) or "
        f"'tenure node create {path}'",
        node=path,
    )


def not_found(name: str, path: str) -> SemaphoreNotFound:
    """The error for a name that no semaphore has."""
    return SemaphoreNotFound(
        f"there is no semaphore {name!r} on {path}; create it first", node=path, name=name
    )
