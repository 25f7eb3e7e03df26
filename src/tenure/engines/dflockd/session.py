"""One session: what one program holds and waits for, and the proof that it lives.

dflockd knows no sessions. This one lives as long as it is renewed within its window, which is also
the lease of everything that is held through it, in whole seconds. Its proof is that of the
request that was proven first; while it holds nothing, there is nothing that could expire.

A server also closes a connection that is silent for its read timeout. So a proof is worth no more
than that timeout, however long the window is: it counts as older by the difference.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import Answer, Attach, Enqueued, SessionEvents, Withdrawn
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.heartbeat import HeartbeatReader
from tenure.engines.dflockd.request import HELD, PROVING, DflockdRequest
from tenure.engines.dflockd.semaphores import DeclaredSemaphores, check_name
from tenure.engines.dflockd.shard import Shard, cannot
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import (
    LeaseReleased,
    SessionExpired,
    TenureError,
)
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire.lines.replies import Reply

__all__ = ["DflockdSession"]


class SessionEngine(Protocol):
    """Engine of a session."""

    clock: Clock
    loop: asyncio.AbstractEventLoop
    address: DflockdUrl
    heartbeat: HeartbeatReader
    semaphores: DeclaredSemaphores

    def is_in_loop(self) -> bool:
        """Return true on the thread of the loop."""

    def shard_of(self, name: str) -> Shard:
        """Return the server that has a key."""

    def forget(self, session: DflockdSession) -> None:
        """Forget a session that is over."""


class DflockdSession:
    """The `EngineSession` of dflockd servers.

    Attributes:
        requests: its requests that are not over.
        lease: seconds for which the servers give it what it asks for.
    """

    attach_number = 1

    def __init__(
        self, engine: SessionEngine, how: Attach, events: SessionEvents, number: int, at: float
    ) -> None:
        """Start without requests, proven at `at`."""
        self.id = number
        self.node = how.node
        self.window = how.recovery_window
        self.lease = math.ceil(how.recovery_window)
        self.events = events
        self.clock = engine.clock
        self.loop = engine.loop
        self.requests: dict[int, DflockdRequest] = {}
        self.over = False
        self._why_over: TenureError | None = None
        self._engine = engine
        self._proved = at  # when it was last proven, as if there were no read timeout
        self._asked = at
        self._older = max(0.0, self.window - engine.address.read_timeout)
        self._detached = False
        self._in_contact = True
        self._again: asyncio.TimerHandle | None = None
        self._closing: list[asyncio.Future[Withdrawn]] | None = None

    def __repr__(self) -> str:
        """Return the id, and whether the session is over, for people."""
        return f"<session {self.id}{' (over)' if self.over else ''}>"

    # Proof

    def tell_proof(self, at: float) -> None:
        """It was proven, by what was sent then. From any thread."""
        self._proved = max(self._proved, at)
        if not self.over:
            self.events.proven(at - self._older)

    def covers(self, sent: float) -> bool:
        """Return true if a grant in answer to a request of that time is as fresh as the proof."""
        return sent >= self._asked and self.clock.now() - sent < self.window / 6

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if self.over or self._detached:
            return
        engine = self._engine
        if engine.is_in_loop():
            self._renew()
            if engine.address.renew_ratio is not None:
                self._renew_again_at(self._asked + self.window / 2)
        else:
            engine.heartbeat.listen(self._renew())

    def _renew(self) -> list[DflockdConnection]:
        """Send what proves; returns over which connections."""
        self._asked = at = self.clock.now()
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
            heard = partial(renewal.heard, request, token)
            connection.ask(request.renewal(token), heard, any_thread=True)
        if not held:
            self.tell_proof(at)
        return used

    def _renew_again_at(self, until: float) -> None:
        """Renew more often than one is asked to, as the URL says; not for ever."""
        ratio = self._engine.address.renew_ratio
        assert ratio is not None

        def again() -> None:
            if not self.over and not self._detached and self.clock.now() < until:
                self._renew()
                self._renew_again_at(until)

        if self._again is not None:
            self._again.cancel()
        self._again = self.loop.call_later(ratio * self.lease, again)

    @property
    def expires_at(self) -> float:
        """Time at which it expires unless it is renewed."""
        return self._proved + self.window

    def expire(self) -> None:
        """It was not renewed."""
        self._end(
            SessionExpired(
                f"the session on {self.node} is over: it was not renewed within its window of "
                f"{self.window:g} s",
                node=self.node,
            )
        )

    # Contact

    def contact(self, trouble: TenureError | None) -> None:
        """Report whether all servers can be reached, with the cause if not."""
        if self._in_contact == (trouble is None) or self.over or self._detached:
            return
        self._in_contact = trouble is None
        if trouble is None:
            self.events.attached()
        else:
            self.events.detached(trouble)

    # The end

    async def close(self) -> None:
        """End the session, and wait until its requests have left their queues."""
        left = self._leave()
        if left:
            await asyncio.wait(left)

    async def detach(self) -> None:
        """It keeps what it has until its window is over, or the engine is closed."""
        if not self.over and not self._detached:
            self._renew()
            self._detached = True
            self._proved = self.clock.now()

    def _leave(self) -> list[asyncio.Future[Withdrawn]]:
        """Give everything back; what the servers do not answer is cut off."""
        if self._closing is None:
            self.over = True
            self._engine.forget(self)
            if self._again is not None:
                self._again.cancel()
            leaving = [request.withdraw() for request in list(self.requests.values())]
            self._closing = [each for each in leaving if isinstance(each, asyncio.Future)]
            if self._closing:
                cutting = self.loop.call_later(self._engine.address.patience, self._cut_off)
                waiting = asyncio.gather(*self._closing)
                waiting.add_done_callback(lambda _: cutting.cancel())
        return [each for each in self._closing if not each.done()]

    def _cut_off(self) -> None:
        for request in list(self.requests.values()):
            if request.connection is not None:
                request.connection.lose("the server did not answer when a session was closed")

    def _end(self, error: SessionExpired) -> None:
        if not self.over:
            self._why_over = error
            self._leave()
            if not self._detached:
                self.events.ended(error)

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.over:
            raise self._why_over or SessionExpired(
                f"the session on {self.node} is over", node=self.node
            )

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Declare the limit of a key; it cannot have data."""
        self._check(name)
        rules.check_limit(limit, self.node, name)
        self._check_data("give a semaphore data", data, name)
        await self._engine.semaphores.create(self.node, name, limit, exist_ok=exist_ok)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Raise `Unsupported`: a key has no data."""
        self._check(name)
        rules.check_data(data, self.node, name)
        raise cannot("give a semaphore data", self.node, name)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Forget the limit of a key; by force it is unsupported."""
        self._check(name)
        if force:
            raise cannot("take a semaphore from those who hold it", self.node, name)
        await self._engine.semaphores.delete(self.node, name)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a key, without owners and waiters."""
        self._check(name)
        if owners or waiters:
            raise cannot("name holders and waiters", self.node, name)
        return await self._engine.semaphores.describe(self.node, name)

    def _check(self, name: str) -> None:
        self.check()
        check_name(name, self.node)

    def _check_data(self, what: str, data: bytes, name: str) -> None:
        """Check that there are no data: dflockd cannot do this with them."""
        if data != b"":
            rules.check_data(data, self.node, name)
            raise cannot(what, self.node, name)

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
            rules.check_timeout(timeout, self.node, name)
        check_name(name, self.node)
        self._check_data("carry a request's data", data, name)
        limit = self._engine.semaphores.limit_for(self.node, name, count, ephemeral=ephemeral)
        asked = DflockdRequest(self, self._engine.shard_of(name), request_id, name, limit, timeout)
        self.requests[request_id] = asked
        asked.begin()
        return asked.answers.place

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
        asked = self.requests.get(request_id)
        if asked is None or asked.is_leaving:
            raise LeaseReleased(f"the request on {self.node} is over", node=self.node)
        if data is not None:
            self._check_data("carry a request's data", data, asked.name)
        if count is not None:
            self._engine.semaphores.check_shrink(self.node, asked.name, count)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, self.node, asked.name)
            asked.wait_no_longer_than(timeout)
        return None

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        self.check()
        asked = self.requests.get(request_id)
        return Withdrawn.MISSING if asked is None else asked.withdraw()

    def forget(self, request_id: int) -> None:
        """Forget a request that is over."""
        self.requests.pop(request_id, None)

    def token_of(self, request_id: int) -> str:
        """The token of what is held; empty when it is not."""
        held = self.requests.get(request_id)
        return "" if held is None else held.token

    def watch(
        self,
        name: str,
        *,
        data: bool,  # noqa: ARG002  it cannot, whatever is asked for
        owners: bool,  # noqa: ARG002
        changed: Callable[[], None],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Raise `Unsupported`: the servers report no changes."""
        raise cannot("tell of changes", self.node, name)


class _Renewal:
    """Renewals sent at one time to prove a session, with the number of missing answers."""

    def __init__(self, session: DflockdSession, at: float, unanswered: int) -> None:
        self._session = session
        self._at = at
        self._unanswered = unanswered
        self._lock = threading.Lock()

    def heard(self, request: DflockdRequest, token: str, reply: Reply) -> None:
        """Process a server's answer about one request, or a lost connection. From any thread."""
        if reply.status.startswith("error"):
            self._session.loop.call_soon_threadsafe(request.forgotten, token)
        self.answered()

    def answered(self) -> None:
        """One less."""
        with self._lock:
            self._unanswered -= 1
            is_last = self._unanswered == 0
        if is_last:
            self._session.tell_proof(self._at)
