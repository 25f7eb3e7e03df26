"""Guarded session: a layer between a listener and the store's session, in both directions.

Rules:

* Changes need the access ``hold`` to the node, reads ``read``, and deletion by force
  ``administer``. Access is determined again after a reload.
* A session may change, withdraw and release its existing requests with any access.
* A request is counted before it is sent, until it is rejected, withdrawn or removed, or its session
  has ended.
* Cancelling the wait for an answer changes nothing in the store: the request stays counted, and
  after a change of its data with the larger size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from tenure.engines.contract import (
    Answer,
    EngineSession,
    Enqueued,
    Place,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.errors import SessionExpired, TenureError
from tenure.model import UNCHANGED, Recovered, SemaphoreDescription, Unchanged
from tenure.server.auth.accounts import Account
from tenure.server.auth.identity import Access
from tenure.server.auth.tallies import Tallies, Tally

_HOLD = Access.HOLD  # module globals, for speed
_REFUSED = Place.REFUSED


class SessionGuard(Protocol):
    """The part of the server's guard that its sessions need."""

    @property
    def tallies(self) -> Tallies:
        """The tallies of the server's sessions."""
        ...

    def now(self) -> float:
        """Read the store's clock."""
        ...

    def refusal(
        self, account: Account, node: str, least: Access, name: str | None = None
    ) -> TenureError:
        """Return the error for an identity with too little access."""
        ...

    async def write(
        self,
        account: Account,
        node: str,
        name: str,
        size: int,
        work: Callable[[], Awaitable[None]],
        *,
        keeps: bool = False,
    ) -> None:
        """Write or delete a semaphore's data through `work`, and count it."""


class GuardedSession(SessionDefaults):
    """A session of one identity (`EngineSession`), which forwards the store's events.

    Args:
        guard: the server's guard.
        node: the path of its node.
        tally: the session's usage.
        events: receives the session's events.
    """

    __slots__ = (
        "_access",
        "_guard",
        "_node",
        "_permissions",
        "_report_ended",
        "_report_removed",
        "_resumed",
        "_session",
        "_tally",
        "attached",
        "detached",
        "granted",
        "proven",
        "renew",
    )

    renew: Callable[[], None]

    def __init__(self, guard: SessionGuard, node: str, tally: Tally, events: SessionEvents) -> None:
        self._guard = guard
        self._node = node
        self._tally = tally
        self._permissions = tally.account.permissions
        self._access = self._permissions.access(node)
        # Other attributes pass through without another call.
        self.attached: Callable[[], None] = events.attached
        self.detached: Callable[..., None] = events.detached
        self.granted: Callable[[int, int | None], None] = events.granted
        self.proven: Callable[[float], None] = events.proven
        self._resumed = events.resumed
        self._report_removed = events.removed
        self._report_ended = events.ended
        self._session: EngineSession | None = None

    def use(self, session: EngineSession) -> None:
        """Use the session that the store has attached."""
        self._session = session
        self.renew = session.renew

    @property
    def _inner(self) -> EngineSession:
        assert self._session is not None, "the session is not attached yet"
        return self._session

    # Events of the store

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Count the recovered requests, and forward the event."""
        for each in requests:
            self._tally.recover(each.request_id, len(each.data))
        self._resumed(requests)

    def removed(self, request_id: int, why: Removal) -> None:
        """Uncount the request, and forward the event."""
        self._tally.leave(request_id)
        self._report_removed(request_id, why)

    def ended(self, error: SessionExpired) -> None:
        """Uncount the session, and forward the event."""
        if self._session is None:
            self._tally.end()
        else:
            self._guard.tallies.over(self._node, self._session.id, self._tally)
        self._report_ended(error)

    # Operations of the listener

    @property
    def id(self) -> int:
        """Id of the store's session."""
        return self._inner.id

    @property
    def attach_number(self) -> int:
        """Attach number of the store's session."""
        return self._inner.attach_number

    async def close(self) -> None:
        """End the session, and uncount its requests."""
        try:
            await self._inner.close()
        except BaseException:
            self._leave()
            raise
        self._guard.tallies.over(self._node, self._inner.id, self._tally)

    async def detach(self) -> None:
        """Detach the session, which stays counted until it expires."""
        try:
            await self._inner.detach()
        finally:
            self._leave()

    def _leave(self) -> None:
        guard = self._guard
        guard.tallies.detached(self._node, self._inner.id, self._tally, guard.now())

    def _check(self, least: Access, name: str | None = None) -> None:
        account = self._tally.account
        if account.permissions is not self._permissions:
            self._permissions = account.permissions
            self._access = self._permissions.access(self._node)
        if self._access < least:
            raise self._guard.refusal(account, self._node, least, name)

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a semaphore; it needs the permission to hold, and counts its data."""
        self._check(_HOLD, name)
        work = partial(self._inner.create_semaphore, name, limit, data, exist_ok=exist_ok)
        await self._write(name, len(data), work, keeps=exist_ok)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace a semaphore's data; it needs the permission to hold, and is counted."""
        self._check(_HOLD, name)
        await self._write(name, len(data), partial(self._inner.update_semaphore, name, data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore; by force it needs the permission to administer."""
        self._check(Access.ADMINISTER if force else _HOLD, name)
        await self._write(name, 0, partial(self._inner.delete_semaphore, name, force=force))

    async def _write(
        self, name: str, size: int, work: Callable[[], Awaitable[None]], *, keeps: bool = False
    ) -> None:
        account = self._tally.account
        await self._guard.write(account, self._node, name, size, work, keeps=keeps)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore; it needs the permission to read."""
        self._check(Access.READ, name)
        return await self._inner.describe_semaphore(name, owners=owners, waiters=waiters)

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
        """Add a request to a queue; it needs the permission to hold, and is counted."""
        tally = self._tally
        if self._access < _HOLD or tally.account.permissions is not self._permissions:
            self._check(_HOLD, name)
        if request_id in tally.requests:  # the store rejects it, and the first one stays
            return self._inner.enqueue(
                request_id, name, count, data, timeout=timeout, ephemeral=ephemeral
            )
        tally.join(request_id, len(data), self._node, name)
        try:
            answer = self._session.enqueue(  # type: ignore[union-attr]  # attached: it has joined
                request_id, name, count, data, timeout=timeout, ephemeral=ephemeral
            )
        except TenureError:
            tally.leave(request_id)
            raise
        if type(answer) is Enqueued:
            if answer.place is _REFUSED:
                tally.leave(request_id)
        else:
            assert isinstance(answer, asyncio.Future)
            answer.add_done_callback(partial(_placed, tally, request_id))
        return answer

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place, and count its new data."""
        session, tally = self._inner, self._tally
        if data is None:
            return session.alter(request_id, count=count, data=data, timeout=timeout)
        before = tally.resize(request_id, len(data), self._node)
        if before is None or before == len(data):
            return session.alter(request_id, count=count, data=data, timeout=timeout)
        try:
            answer = session.alter(request_id, count=count, data=data, timeout=timeout)
        except Exception as error:
            _not_altered(tally, request_id, before, error)
            raise
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(_altered, tally, request_id, before))
        return answer

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue, and uncount it."""
        answer = self._session.withdraw(request_id)  # type: ignore[union-attr]  # attached, since it holds
        self._tally.leave(request_id)  # the store carries out a withdrawal that it has received
        return answer

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; it needs the permission to read, and is counted."""
        self._check(Access.READ, name)
        tally = self._tally
        tally.watch(self._node, name)
        try:
            stop = self._inner.watch(name, data=data, owners=owners, changed=changed)
        except BaseException:
            tally.unwatch()
            raise
        return _Watch(tally, stop)


class _Watch:
    """End a watch, and uncount it. Safe to call twice."""

    __slots__ = ("_stop", "_tally")

    def __init__(self, tally: Tally, stop: Callable[[], None]) -> None:
        self._tally = tally
        self._stop: Callable[[], None] | None = stop

    def __call__(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            self._tally.unwatch()
            stop()


def _placed(tally: Tally, request_id: int, answer: asyncio.Future[Enqueued]) -> None:
    if answer.cancelled():
        return  # the operation continues
    error = answer.exception()
    if isinstance(error, TenureError) or (error is None and answer.result().place is _REFUSED):
        tally.leave(request_id)


def _altered(tally: Tally, request_id: int, before: int, answer: asyncio.Future[None]) -> None:
    error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
    if error is not None:
        _not_altered(tally, request_id, before, error)


def _not_altered(tally: Tally, request_id: int, before: int, error: BaseException) -> None:
    """Count the data that a request may have after a change that failed, or has no answer."""
    if isinstance(error, TenureError):
        tally.restore(request_id, before)
    else:
        tally.enlarge(request_id, before)
