"""Services for all sessions of an engine: members, watches, renewals, retries and tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from tenure.clock import Clock
from tenure.engines._kit.session import ClosableSession
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.errors import Lost, Refused, failure, pauses
from tenure.engines.etcd.keys import Keys, Name
from tenure.engines.etcd.late import LateWaiters
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.renewing import EtcdHeartbeat, Renewable, Rounds
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.url import EtcdUrl
from tenure.engines.etcd.watching import Watching
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    TenureError,
)

T = TypeVar("T")
_log = logging.getLogger("tenure")

_NAMES = 4096
"""Maximum number of names with cached keys."""


class EndableSession(Renewable, ClosableSession, Protocol):
    """A session, as closed by its engine."""

    def contact(self, there: bool, cause: TenureError | None = None) -> None:
        """Report to the program that a member is reached, or why none is reached."""


class EtcdCluster:
    """Services for the sessions of one engine.

    Attributes:
        keys: the keys of the store.
        base: an order id is a create revision plus this number.
        sessions: the attached sessions.
        local: the requests of all sessions of this engine, by key.
        names: the keys of semaphores, by node and name.
        members: the members of the cluster.
        tasks: the tasks that `aclose` waits for.
        is_open: whether it can be used.
        timeout: longest time in seconds after which an unanswered call is sent to another member.
    """

    loop: asyncio.AbstractEventLoop
    watching: Watching

    def __init__(self, address: EtcdUrl, clock: Clock, members: Members | None = None) -> None:
        self.url = address.url
        self.clock = clock
        self.keys = Keys(address.prefix)
        self.base = 0
        self.timeout = address.timeout
        self.address = address
        self.is_open = False
        self.sessions: set[EndableSession] = set()
        self.local: dict[bytes, EtcdRequest] = {}
        self.late = LateWaiters(self.keys, clock, self.local, self.txn, self.timeout)
        self.members = Members(address) if members is None else members
        self._thread = 0
        self.names: dict[tuple[str, str], Name] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if it is not open."""
        if not self.is_open:
            raise EngineUnavailable(f"{self.url} is not open. Open the client first")

    def _open_services(self) -> None:
        """Open the services on the running loop."""
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.members.open()
        self._rounds = Rounds(self.members, self.clock, self.spawn)
        self._heartbeat = EtcdHeartbeat(self.address, self.clock)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `aclose` waits for."""
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Calls

    async def txn(self, request: bytes, timeout: float) -> answers.Answer:
        """Send a transaction. Raises `Lost`, `Refused`, `AuthenticationFailed`."""
        return answers.read_answer(await self.members.call(wire.TXN, request, timeout))

    def reader(self, node: str | None) -> EtcdAttempts:
        """Return a reader that repeats its calls until a timeout."""
        return EtcdAttempts(self, node, self.address.connect_timeout + self.timeout)

    def failure(self, refused: Refused, node: str | None, name: str | None = None) -> TenureError:
        """Return the program's error for a rejection."""
        return failure(self.url, refused, node=node, name=name)

    async def eventually(self, request: bytes, within: float, what: str) -> None:
        """Repeat an idempotent write until it is answered; log a failure."""
        try:
            await self._repeat(lambda: self.txn(request, self.timeout), within)
        except (Refused, TenureError) as error:
            _log.debug("write failed: operation=%s url=%s error=%s", what, self.url, error)

    async def _repeat(self, call: Callable[[], Awaitable[object]], within: float) -> None:
        """Repeat a call until it is answered, or until the timeout."""
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
        """Renew a session's lease. From any thread."""
        if threading.get_ident() == self._thread:
            self._rounds.renew(session)
            session.look_up_soon()
        else:
            self._heartbeat.renew(session)

    async def keep_alive(self, session: Renewable) -> None:
        """Renew a lease, for a detach or a takeover. Raises `Lost`."""
        turn = self.members.turn
        try:
            async with asyncio.timeout(session.timeout):
                await self._rounds.keep_alive(turn, [session])
        except (Lost, TimeoutError) as error:
            self.members.leave(turn, str(error) or "a lease was not renewed in time")
            raise Lost(str(error)) from error

    async def revoke(self, number: int, within: float) -> None:
        """Revoke a lease, with everything under it."""
        call = partial(self.members.call, wire.LEASE_REVOKE, wire.lease(number), self.timeout)
        try:
            await self._repeat(call, within)
        except Refused as refused:
            if not refused.no_lease:
                raise self.failure(refused, None) from refused

    async def silent_for(self, number: int) -> float | None:
        """Return the minimum number of seconds since a lease was renewed, if known."""
        try:
            answer = await self.members.call(wire.TIME_TO_LIVE, wire.lease(number), self.timeout)
        except (Lost, Refused):
            return None
        lease = answers.read_lease(answer)  # in whole seconds
        return max(0.0, lease.granted - lease.left - 1.0) if lease.left >= 0 else None

    def name(self, path: str, name: str) -> Name:
        """Return the keys of a semaphore, whose name has been checked."""
        found = self.names.get((path, name))
        if found is None:
            if len(self.names) >= _NAMES:
                del self.names[next(iter(self.names))]
            found = self.names[path, name] = self.keys.name(path, name)
        return found


class EtcdAttempts:
    """Calls that are repeated until they are answered or have timed out."""

    def __init__(self, cluster: EtcdCluster, node: str | None, within: float) -> None:
        """Allow attempts for `within` seconds from now."""
        self._cluster = cluster
        self._node = node
        self._within = within
        self._until = cluster.clock.now() + within
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
            return await self._cluster.txn(request, self._cluster.timeout)
        except Lost as lost:
            await self.again(lost)
            return None

    async def again(self, lost: Lost) -> None:
        """Wait before the next attempt; raise `error` after the timeout."""
        pause = next(self._pauses)
        if self._cluster.clock.now() + pause >= self._until:
            raise self.error(lost) from lost
        await asyncio.sleep(pause)

    def error(self, lost: Lost) -> TenureError:
        """Return the error for calls that have timed out."""
        return EngineError(
            f"{self._cluster.url} did not answer within {self._within:g} s ({lost})",
            node=self._node,
        )
