"""Both ends of one session: the operations of its program, and the events of the store."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Engine,
    EngineSession,
    Enqueued,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.errors import EngineUnavailable, SessionExpired
from tenure.model import UNCHANGED, Recovered, SemaphoreDescription, Unchanged
from tenure.testing.faults.exchange import Exchange, settle


def out_of_reach() -> EngineUnavailable:
    """Return the error that reports a broken way."""
    return EngineUnavailable("the way to the store is broken")


class FaultySession(SessionDefaults):
    """Both ends of one session: the operations of its program, and the events of the store.

    Args:
        exchange: carries operations and messages.
        engine: the store's engine.
        clock: the program's clock.
        how, events: the arguments of the program's attach.
        living: the program's sessions, from which this one removes itself at its end.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        clock: Clock,
        how: Attach,
        events: SessionEvents,
        living: dict[FaultySession, None],
    ) -> None:
        """Start without a session at the store; `attach` creates it."""
        self.how = how
        self.inner: EngineSession | None = None
        self.exchange = exchange
        self.deliver = exchange.deliver
        self.way = exchange.way
        self._engine = engine
        self._clock = clock
        self._events = events
        self._living = living
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._over: SessionExpired | None = None
        self._thread = threading.get_ident()
        self._attaching: asyncio.Task[Any] | None = None
        self._unwanted = False
        # For each renewal: its arrival on the store's clock, and its departure on the program's
        self._renewals = deque([(float("-inf"), clock.now())])

    # The program's end

    @property
    def store(self) -> EngineSession:
        """The session at the store's end."""
        assert self.inner is not None
        return self.inner

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self.store.id

    @property
    def attach_number(self) -> int:
        """Attach number of the session in the store."""
        return self.store.attach_number

    def _operate(self, operation: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._over is not None:
            raise self._over
        return self.exchange.operate(operation, self._pending)

    def renew(self) -> None:
        """Send a renewal, from any thread."""
        loop, message = self.exchange.loop, partial(self._renew, self._clock.now())
        if threading.get_ident() == self._thread:
            self.way.there.send(message)
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.way.there.send, message)

    def _renew(self, sent: float) -> None:
        self._renewals.append((self._engine.clock.now(), sent))
        self.store.renew()

    async def close(self) -> None:
        """End the session, over the way."""
        await self._leave(self.store.close)

    async def detach(self) -> None:
        """Detach from the session, over the way."""
        await self._leave(self.store.detach)

    async def _leave(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._over is None:
            answer = self.exchange.operate(leave)  # not pending: the session's end must not fail it
            self._living.pop(self, None)
            await answer

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a semaphore, over the way."""
        create = self.store.create_semaphore
        await self._operate(partial(create, name, limit, data, exist_ok=exist_ok))

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace a semaphore's data, over the way."""
        await self._operate(partial(self.store.update_semaphore, name, data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore, over the way."""
        await self._operate(partial(self.store.delete_semaphore, name, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore, over the way."""
        describe = self.store.describe_semaphore
        found: SemaphoreDescription = await self._operate(
            partial(describe, name, owners=owners, waiters=waiters)
        )
        return found

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
        """Add a request to a queue, over the way."""
        enqueue = self.store.enqueue
        return self._operate(
            partial(enqueue, request_id, name, count, data, timeout=timeout, ephemeral=ephemeral)
        )

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place, over the way."""
        return self._operate(
            partial(self.store.alter, request_id, count=count, data=data, timeout=timeout)
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue, over the way."""
        return self._operate(partial(self.store.withdraw, request_id))

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name, over the way; return the function that ends the watch."""
        rules.check_name(name, self.how.node)
        if self._over is not None:
            raise self._over
        watch = _Watch(self, changed)
        self.way.there.send(partial(watch.begin, name, data, owners))
        return watch.stop

    def contact(self, attached: bool) -> None:
        """Notify the program that the connection was dropped or re-established."""
        if self._over is None and self in self._living:
            if attached:
                self._events.attached()
            else:
                self._events.detached(out_of_reach())

    def _end(self, error: SessionExpired) -> None:
        if self._over is not None:
            return
        self._over = error
        self._living.pop(self, None)
        for answer in list(self._pending):
            settle(answer, None, error)
        self._events.ended(error)

    # The store's end

    async def attach(self) -> EngineSession:
        """Attach the session at the store's end; drop it if the program no longer waits."""
        self._attaching = asyncio.current_task()
        inner = await self._engine.attach(self.how, self)
        if self._unwanted:
            await self._drop(inner)
        return inner

    def abandon(self) -> None:
        """Drop the session at the store, because the program no longer waits for its attach."""
        self._unwanted = True
        attaching = self._attaching
        if attaching is not None and not attaching.done():
            attaching.cancel()
        elif attaching is not None and not attaching.cancelled() and not attaching.exception():
            self.exchange.at_store(self._drop(attaching.result()))

    async def _drop(self, inner: EngineSession) -> None:
        await (inner.detach() if self.how.session_id is not None else inner.close())

    def proven(self, at: float) -> None:
        """Send the time of the newest renewal that a proof of `at` covers."""
        while len(self._renewals) > 1 and self._renewals[1][0] <= at:
            self._renewals.popleft()
        self.way.back.send(partial(self._events.proven, self._renewals[0][1]))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Report the recovered requests, over the way."""
        self.deliver(partial(self._events.resumed, requests))

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Report a grant, over the way; sometimes twice."""
        self._report_granted(request_id, order_id)
        if self.way.repeats():
            self._report_granted(request_id, order_id)

    def _report_granted(self, request_id: int, order_id: int | None) -> None:
        self.deliver(partial(self._deliver_granted, request_id, order_id))

    def _deliver_granted(self, request_id: int, order_id: int | None) -> None:
        if self._over is None:
            self._events.granted(request_id, order_id)

    def removed(self, request_id: int, why: Removal) -> None:
        """Report a removal, over the way."""
        self.deliver(partial(self._events.removed, request_id, why))

    def detached(self, cause: BaseException | None = None) -> None:
        """Report the loss of contact, over the way."""
        self.deliver(partial(self._events.detached, cause))

    def attached(self) -> None:
        """Report re-established contact, over the way."""
        self.deliver(self._events.attached)

    def ended(self, error: SessionExpired) -> None:
        """Report the end of the session, over the way."""
        self.deliver(partial(self._end, error))


class _Watch:
    """Both ends of one watch. A change is merged with a notification that is in transit."""

    def __init__(self, session: FaultySession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._stopped = False
        self._scheduled = False
        self._stop_inner: Callable[[], None] | None = None

    def begin(self, name: str, data: bool, owners: bool) -> None:
        try:
            self._stop_inner = self._session.store.watch(
                name, data=data, owners=owners, changed=self._happened
            )
        except SessionExpired:
            return  # the program is notified of the end in any case

    def _happened(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._session.deliver(self._notify)

    def _notify(self) -> None:
        self._scheduled = False
        if not self._stopped:
            self._changed()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._session.way.there.send(self._end)

    def _end(self) -> None:
        if self._stop_inner is not None:
            self._stop_inner()
