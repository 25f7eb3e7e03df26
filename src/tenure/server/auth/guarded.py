"""The store as one identity may use it: a layer between a listener and the engine.

Rules for sessions (`GuardedSession`), whose events pass through the layer as well:

* Changes need the access ``hold`` to the node, reads ``read``, and deletion by force
  ``administer``. Access is determined again after a reload.
* A session may change, withdraw and release its existing requests with any access.
* A request is counted before it is sent, until it is rejected, withdrawn or removed, or its session
  has ended.
* Cancelling the wait for an answer changes nothing in the store: the request stays counted, and
  after a change of its data with the larger size.
* Requests, grants and ends are counted for the metrics as well (`tenure.server.meter`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tenure.clock import Clock
from tenure.core import rules
from tenure.core.rates import MICROSECONDS
from tenure.engines.contract import (
    Answer,
    Attach,
    EngineDefaults,
    EngineSession,
    Enqueued,
    Pages,
    Place,
    RateAnswer,
    RateCall,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
    rate_answered,
)
from tenure.errors import AuthenticationFailed, NodeNotFound, SessionExpired, TenureError
from tenure.model import (
    UNCHANGED,
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
    Unchanged,
)
from tenure.server.auth.guard import REFUSALS, Guard
from tenure.server.auth.identity import EVERYTHING, Access, Identity
from tenure.server.auth.tallies import Tally
from tenure.server.meter import RequestTimes, end_of

_HOLD = Access.HOLD  # module globals, for speed
_REFUSED = Place.REFUSED
_GRANTED = Place.GRANTED


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
        "_report_granted",
        "_report_removed",
        "_resumed",
        "_session",
        "_tally",
        "_times",
        "attached",
        "detached",
        "proven",
        "renew",
    )

    renew: Callable[[], None]

    def __init__(self, guard: Guard, node: str, tally: Tally, events: SessionEvents) -> None:
        self._guard = guard
        self._node = node
        self._tally = tally
        self._permissions = tally.account.permissions
        self._access = self._permissions.access(node)
        # Other attributes pass through without another call.
        self.attached: Callable[[], None] = events.attached
        self.detached: Callable[..., None] = events.detached
        self.proven: Callable[[float], None] = events.proven
        self._times = RequestTimes(guard.meter, node, guard.store.clock.now)
        self._report_granted = events.granted
        self._resumed = events.resumed
        self._report_removed = events.removed
        self._report_ended = events.ended
        self._session: EngineSession | None = None

    def use(self, session: EngineSession) -> None:
        """Use the session that the store has attached."""
        self._session = session
        self.renew = session.renew
        self._times.attached()

    def abandon(self) -> None:
        """Stop counting requests that were recovered by an attach that failed."""
        self._times.over("detached")

    @property
    def _inner(self) -> EngineSession:
        assert self._session is not None, "the session is not attached yet"
        return self._session

    # Events of the store

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Count the recovered requests, and forward the event."""
        for each in requests:
            self._tally.recover(each.request_id, len(each.data))
        self._times.recovered(requests)
        self._resumed(requests)

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Count the grant, and forward the event."""
        self._times.granted(request_id)
        self._report_granted(request_id, order_id)

    def removed(self, request_id: int, why: Removal) -> None:
        """Uncount the request, and forward the event."""
        self._tally.leave(request_id)
        self._times.removed(request_id, why)
        self._report_removed(request_id, why)

    def ended(self, error: SessionExpired) -> None:
        """Uncount the session, and forward the event."""
        if self._session is None:
            self._tally.end()
        else:
            self._guard.tallies.over(self._node, self._session.id, self._tally)
        self._times.over(*end_of(error))
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
        self._times.over("closed")

    async def detach(self) -> None:
        """Detach the session, which stays counted until it expires."""
        try:
            await self._inner.detach()
        finally:
            self._leave()

    def _leave(self) -> None:
        guard = self._guard
        guard.tallies.detached(self._node, self._inner.id, self._tally, guard.now())
        self._times.over("detached")

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

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change a semaphore's limit; it needs the permission to hold."""
        self._check(_HOLD, name)
        await self._inner.resize_semaphore(name, limit)

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
            place = answer.place
            if place is _GRANTED:
                self._times.granted_at_once(request_id)
            elif place is _REFUSED:
                tally.leave(request_id)
                self._times.refused_at_once()
            else:
                self._times.sent(request_id)
        else:
            assert isinstance(answer, asyncio.Future)
            self._times.sent(request_id)
            answer.add_done_callback(partial(_placed, tally, self._times, request_id))
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
        self._times.left(request_id)
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


def _placed(
    tally: Tally, times: RequestTimes, request_id: int, answer: asyncio.Future[Enqueued]
) -> None:
    if answer.cancelled():
        return  # the operation continues
    error = answer.exception()
    place = None if error is not None else answer.result().place
    if isinstance(error, TenureError) or place is _REFUSED:
        tally.leave(request_id)
        times.not_granted(request_id, "busy" if place is _REFUSED else "removed")
    elif place is _GRANTED:
        times.granted(request_id)


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


class GuardedPages:
    """Lists in pages, restricted to nodes that the identity may read (`Pages`).

    Args:
        pages: the store's pages.
        check: raises unless the identity has at least that access to a node.
    """

    __slots__ = ("_check", "_pages")

    def __init__(self, pages: Pages, check: Callable[[str, Access], None]) -> None:
        """Show the pages of nodes that `check` allows."""
        self._pages = pages
        self._check = check

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node."""
        self._check(path, Access.READ)
        return await self._pages.sessions(path, after=after, most=most)

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores."""
        self._check(path, Access.READ)
        return await self._pages.names(path, after=after, most=most)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node."""
        self._check(path, Access.READ)
        return await self._pages.semaphores(
            path, owners=owners, waiters=waiters, after=after, most=most
        )

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Return the next owners or waiters of a semaphore."""
        self._check(path, Access.READ)
        return await self._pages.requests(path, name, waiters=waiters, after=after, most=most)


class GuardedEngine(EngineDefaults):
    """The store as one identity may use it (`Engine`). The server opens and closes the store.

    Args:
        guard: the server's guard.
        identity: the identity.

    Attributes:
        account: the identity's account.
    """

    __slots__ = ("_engine", "_guard", "account")

    def __init__(self, guard: Guard, identity: Identity) -> None:
        """Show the guarded store as `identity` may use it."""
        self._guard = guard
        self._engine = guard.store
        self.account = guard.accounts.of(identity)

    @property
    def url(self) -> str:
        """URL of the engine."""
        return self._engine.url

    @property
    def clock(self) -> Clock:
        """Clock of the engine."""
        return self._engine.clock

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine."""
        return self._engine.capabilities

    async def open(self) -> None:
        """Do nothing: the server has opened the store."""

    async def aclose(self) -> None:
        """Do nothing: the server closes the store."""

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the trouble of the engine."""
        return self._engine.trouble(name)

    async def store_time(self) -> float:
        """Read the store's wall clock."""
        return await self._engine.store_time()

    def check(self, node: str, least: Access) -> None:
        """Check the access to a node.

        Raises:
            NodeNotFound: the identity has no access.
            AuthenticationFailed: it has less access.
        """
        if not self.allows(node, least):
            raise self._guard.refusal(self.account, node, least)

    def allows(self, node: str, least: Access) -> bool:
        """Return true if the identity has at least that access to a node."""
        return self.account.permissions.access(node) >= least

    def owns(self, node: str, number: int) -> bool:
        """Return true unless a session is known to belong to another identity."""
        tally = self._guard.tallies.find(node, number)
        return tally is None or tally.account is self.account

    def check_session(self, node: str, number: int) -> None:
        """Check that the identity may attach a session, before anything else about the session.

        Raises:
            NodeNotFound: the identity has no access to the node.
            AuthenticationFailed: the session belongs to another identity.
        """
        self.check(node, Access.READ)
        if not self.owns(node, number):
            raise AuthenticationFailed(
                f"session {number} on {node} belongs to another identity than "
                f"{self.account.identity}",
                node=node,
            )

    async def attach(self, how: Attach, events: SessionEvents) -> EngineSession:
        """Attach a session that is counted against the account."""
        node, number, account = how.node, how.session_id, self.account
        tallies = self._guard.tallies
        tallies.expire(self._guard.now())
        if number is None:
            self.check(node, Access.READ)
        else:
            self.check_session(node, number)
        window = how.recovery_window
        former = None if number is None else tallies.find(node, number)
        requests = {} if former is None else former.requests
        if number is None:
            account.sessions.take(node=node)
        else:
            if former is not None:
                window = max(window, former.window)
            account.sessions.take_anyway()
        tally = Tally(account, window)
        session = GuardedSession(self._guard, node, tally, events)
        try:
            attached = await self._engine.attach(how, session)
        except BaseException as error:
            over = isinstance(error, SessionExpired | NodeNotFound)
            if number is not None and former is not None and former.over and not over:
                # The takeover has ended the former attachment, and the session survives detached.
                tally.resume(requests)
                tallies.attached(node, number, tally)
                tallies.detached(node, number, tally, self._guard.now())
            else:
                tally.end()
            session.abandon()
            raise
        session.use(attached)
        tallies.attached(node, attached.id, tally)
        return session

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node; it needs the permission to administer."""
        if self.account.permissions.access(path) < Access.ADMINISTER:
            # The same error whether or not the node exists.
            raise self._guard.refusal(self.account, path, Access.ADMINISTER, hidden=False)
        await self._guard.create_node(self.account, path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node; it needs the permission to administer."""
        self.check(path, Access.ADMINISTER)
        await self._engine.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node; it needs the permission to administer."""
        self.check(path, Access.ADMINISTER)
        await self._engine.drop_node(path, force=force)
        self._guard.stored.dropped(path)
        self._guard.tallies.dropped(path)
        self._guard.rates.dropped(path)

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node; it needs the permission to read."""
        self.check(path, Access.READ)
        return await self._engine.describe_node(path)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of the nodes that the identity may read."""
        found = await self._engine.list_nodes()
        permissions = self.account.permissions
        if permissions is EVERYTHING:
            return found
        return [each for each in found if permissions.access(each)]

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node; it needs the permission to read."""
        self.check(path, Access.READ)
        return await self._engine.list_semaphores(path, owners=owners, waiters=waiters)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore; it needs the permission to read."""
        self.check(path, Access.READ)
        return await self._engine.describe_semaphore(path, name, owners=owners, waiters=waiters)

    async def rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Carry out an operation on a rate; but for a peek, it needs the permission to hold."""
        self.check(path, Access.READ if call.kind == "peek" else Access.HOLD)
        if call.kind == "take":
            return await self._take(path, name, call)
        answer = await rate_answered(self._engine.rate(path, name, call))
        if call.kind == "resize":
            until = self._guard.now() + call.rule.window / MICROSECONDS
            self._guard.rates.extend(path, name, until)
        return answer

    async def _take(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Take tokens of a rate, which is counted."""
        rules.check_name(name, path)
        guard, window = self._guard, call.rule.window
        guard.rates.begin(self.account, path, name, guard.now())
        left = window  # in microseconds, if the outcome is not known
        try:
            answer = await rate_answered(self._engine.rate(path, name, call))
            left = answer.wait + window if answer.granted else 0
        except REFUSALS:
            left = 0
            raise
        finally:
            guard.rates.end(path, name, guard.now() + left / MICROSECONDS)
        return answer

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node; it needs the permission to read."""
        self.check(path, Access.READ)
        return await self._engine.list_sessions(path)

    def pages(self) -> Pages | None:
        """Return the lists in pages, with the same permissions."""
        pages = self._engine.pages()
        return None if pages is None else GuardedPages(pages, self.check)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; one of another identity needs the permission to administer."""
        tally = self._guard.tallies.find(path, session_id)
        mine = tally is not None and tally.account is self.account
        self.check(path, Access.HOLD if mine else Access.ADMINISTER)
        ended = await self._engine.end_session(path, session_id)
        self._guard.tallies.over(path, session_id)
        return ended

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request; it needs the permission to administer."""
        self.check(path, Access.ADMINISTER)
        return await self._engine.evict(path, name, order_id)
