"""One session: its requests, and the proof that all of them are still held.

dflockd has no sessions. This one lives while it is renewed within its window, which is also the
lease of everything that it holds, in whole seconds. Its proof is the oldest proof of its requests.
While it holds nothing, every renewal proves it.

A server also closes a connection that is silent for its read timeout. If the window is longer than
that, a proof counts as older by the difference.

**The heartbeat thread** reads the answers to renewals while the event loop is stuck. The client's
thread sends the renewals over the connections that hold locks, because a renewal over another
connection would not keep these alive. This thread reads the answers, which prove the session. Other
replies that it reads wait for the loop.
"""

from __future__ import annotations

import asyncio
import math
import select
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.session import PlainSession
from tenure.engines.contract import Answer, Attach, Enqueued, SessionEvents, Withdrawn
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.request import HELD, PROVING, DflockdRequest
from tenure.engines.dflockd.semaphores import DeclaredSemaphores, check_name
from tenure.engines.dflockd.shard import Shard, cannot
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import LeaseReleased, TenureError, Unsupported
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire.lines import Reply

_POLL = 50
"""Milliseconds between two checks for new connections, and for the thread's end."""


class DflockdHeartbeat(HeartbeatThread[DflockdConnection]):
    """The heartbeat thread of one engine; its table has the connections to read."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("tenure-dflockd-heartbeat", clock.now, "reading renewals")

    def renew_now(self, awaited: dict[DflockdConnection, float]) -> None:
        """Read the replies that have arrived; return the connections that still expect one."""
        reading = {each.fileno(): each for each in awaited if each.awaits_renewal}
        poll = select.poll()
        for descriptor in reading:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_POLL) if reading else ():
            with self._failures.contained():
                reading[descriptor].receive_in_thread()
        for connection in reading.values():
            self.renew(connection)

    def disconnect(self) -> None:
        """Do nothing: the connections belong to the loop."""


class SessionEngine(Protocol):
    """Engine of a session."""

    clock: Clock
    loop: asyncio.AbstractEventLoop
    address: DflockdUrl
    heartbeat: DflockdHeartbeat
    semaphores: DeclaredSemaphores

    def is_in_loop(self) -> bool:
        """Return true on the thread of the loop."""

    def shard_of(self, name: str) -> Shard:
        """Return the server of a key."""

    def forget(self, session: DflockdSession) -> None:
        """Forget a session that has ended."""


class DflockdSession(PlainSession):
    """The `EngineSession` of dflockd servers.

    Attributes:
        requests: its requests that have not ended.
        lease: duration of its leases in seconds.
    """

    attach_number = 1

    def __init__(
        self, engine: SessionEngine, how: Attach, events: SessionEvents, number: int, at: float
    ) -> None:
        """Start without requests, proven at `at`."""
        super().__init__(how, events, number, how.recovery_window)
        self.lease = math.ceil(how.recovery_window)
        self.clock = engine.clock
        self.loop = engine.loop
        self.requests: dict[int, DflockdRequest] = {}
        self._engine = engine
        self._proved = at  # the latest proof, regardless of the read timeout
        self._renewed_at = at
        self._older = max(0.0, self.window - engine.address.read_timeout)
        self._in_contact = True
        self._again: asyncio.TimerHandle | None = None
        self._leaving: list[asyncio.Future[Withdrawn]] = []

    def __repr__(self) -> str:
        """Return the id, and whether the session has ended."""
        return f"<session {self.id}{' (over)' if self.over else ''}>"

    # Proof

    def prove(self, at: float) -> None:
        """Report a proof by a request sent at `at`. From any thread."""
        self._proved = max(self._proved, at)
        if not self.over:
            self.events.proven(at - self._older)

    def covers(self, sent: float) -> bool:
        """Return true if a grant of a request sent at that time is as fresh as the proof."""
        return sent >= self._renewed_at and self.clock.now() - sent < self.window / 6

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if self.over or self.closing:
            return
        engine = self._engine
        if engine.is_in_loop():
            self._renew()
            if engine.address.renew_ratio is not None:
                self._renew_again_at(self._renewed_at + self.window / 2)
        else:
            for connection in self._renew():
                engine.heartbeat.renew(connection)

    def _renew(self) -> list[DflockdConnection]:
        """Send renewals that prove the session; return their connections."""
        self._renewed_at = at = self.clock.now()
        held = [
            (request, request.token, request.connection)
            for request in list(self.requests.values())
            if request.standing in {PROVING, HELD}
        ]
        renewal = _Renewal(self, at, len(held))
        used = []
        for request, token, connection in held:
            if connection is None or not token:
                renewal.answered()
                continue
            used.append(connection)
            replied = partial(renewal.replied, request, token)
            connection.send(request.renewal(token), replied, any_thread=True)
        if not held:
            self.prove(at)
        return used

    def _renew_again_at(self, until: float) -> None:
        """Renew with the URL's `renew_ratio` until that time."""
        ratio = self._engine.address.renew_ratio
        assert ratio is not None

        def again() -> None:
            if not self.over and not self.closing and self.clock.now() < until:
                self._renew()
                self._renew_again_at(until)

        if self._again is not None:
            self._again.cancel()
        self._again = self.loop.call_later(ratio * self.lease, again)

    @property
    def expires_at(self) -> float:
        """Time at which the session expires unless it is renewed."""
        return self._proved + self.window

    def expire(self) -> None:
        """End the session, which was not renewed."""
        self.end(f"it was not renewed within its window of {self.window:g} s")

    # Contact

    def contact(self, trouble: TenureError | None) -> None:
        """Report whether all servers can be reached, with the cause if not."""
        if self._in_contact == (trouble is None) or self.over or self.closing:
            return
        self._in_contact = trouble is None
        if trouble is None:
            self.events.attached()
        else:
            self.events.detached(trouble)

    # The end

    async def close(self) -> None:
        """End the session, and wait until its requests have left their queues."""
        if not self.over:
            self._forget()
        if left := [each for each in self._leaving if not each.done()]:
            await asyncio.wait(left)

    async def detach(self) -> None:
        """Keep its requests until its window has passed, or the engine is closed."""
        if not self.over and not self.closing:
            self._renew()
            self.closing = True
            self._proved = self.clock.now()

    def _forget(self) -> None:
        """Withdraw all requests; close the connections of those without an answer in time."""
        super()._forget()
        self._engine.forget(self)
        if self._again is not None:
            self._again.cancel()
        leaving = [request.withdraw() for request in list(self.requests.values())]
        self._leaving = [each for each in leaving if isinstance(each, asyncio.Future)]
        if self._leaving:
            limit = self._engine.address.answer_timeout
            cutting = self.loop.call_later(limit, self._cut_off)
            asyncio.gather(*self._leaving).add_done_callback(lambda _: cutting.cancel())

    def _cut_off(self) -> None:
        for request in list(self.requests.values()):
            if request.connection is not None:
                request.connection.lose("the server did not answer when a session was closed")

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Declare the limit of a key; it cannot have data."""
        self._check(name)
        rules.check_limit(limit, self.path, name)
        self._check_data("give a semaphore data", data, name)
        await self._engine.semaphores.create(self.path, name, limit, exist_ok=exist_ok)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Raise `Unsupported`: a key has no data."""
        self._check(name)
        rules.check_data(data, self.path, name)
        raise cannot("give a semaphore data", self.path, name)

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Raise `Unsupported`: a limit comes with each request."""
        self._check(name)
        rules.check_new_limit(limit, self.path, name)
        raise Unsupported(
            f"the limit of semaphore {name!r} on {self.path} cannot be changed: with dflockd, each "
            "request brings its limit; sqlite://, redis:// and tenure:// can. Stop all programs "
            f"that use the semaphore, and start them with limit {limit}",
            node=self.path,
            name=name,
        )

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Forget the limit of a key; by force it is unsupported."""
        self._check(name)
        if force:
            raise cannot("delete a semaphore by force", self.path, name)
        await self._engine.semaphores.delete(self.path, name)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a key, without owners and waiters."""
        self._check(name)
        if owners or waiters:
            raise cannot("name holders and waiters", self.path, name)
        return await self._engine.semaphores.describe(self.path, name)

    def _check(self, name: str) -> None:
        self.check()
        check_name(name, self.path)

    def _check_data(self, what: str, data: bytes, name: str) -> None:
        """Check that there is no data, which dflockd does not support."""
        if data != b"":
            rules.check_data(data, self.path, name)
            raise cannot(what, self.path, name)

    # Requests

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue."""
        self.check()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        check_name(name, self.path)
        self._check_data("carry a request's data", data, name)
        limit = self._engine.semaphores.limit_for(self.path, name, count, ephemeral=ephemeral)
        request = DflockdRequest(
            self, self._engine.shard_of(name), request_id, name, limit, timeout
        )
        self.requests[request_id] = request
        request.begin()
        return request.answers.place

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change how long a request waits; data is unsupported."""
        self.check()
        request = self.requests.get(request_id)
        if request is None or request.is_leaving:
            raise LeaseReleased(f"the request on {self.path} has ended", node=self.path)
        if data is not None:
            self._check_data("carry a request's data", data, request.name)
        if count is not None:
            self._engine.semaphores.check_shrink(self.path, request.name, count)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, self.path, request.name)
            request.wait_no_longer_than(timeout)
        return None

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        self.check()
        request = self.requests.get(request_id)
        return Withdrawn.MISSING if request is None else request.withdraw()

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self.requests.pop(request_id, None)

    def token_of(self, request_id: int) -> str:
        """Return the token of a lease; empty if nothing is held."""
        held = self.requests.get(request_id)
        return "" if held is None else held.token

    def watch(
        self,
        name: str,
        *,
        data: bool,  # noqa: ARG002
        owners: bool,  # noqa: ARG002
        changed: Callable[[], None],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Raise `Unsupported`: the servers report no changes."""
        raise cannot("report changes", self.path, name)


class _Renewal:
    """Renewals sent together to prove a session, with the number of missing answers."""

    def __init__(self, session: DflockdSession, at: float, unanswered: int) -> None:
        self._session = session
        self._at = at
        self._unanswered = unanswered
        self._lock = threading.Lock()

    def replied(self, request: DflockdRequest, token: str, reply: Reply) -> None:
        """Process a server's reply about one request, or a lost connection. From any thread."""
        if reply.status.startswith("error"):
            self._session.loop.call_soon_threadsafe(request.forgotten, token)
        self.answered()

    def answered(self) -> None:
        """Count an answer; the last one proves the session."""
        with self._lock:
            self._unanswered -= 1
            is_last = self._unanswered == 0
        if is_last:
            self._session.prove(self._at)
