"""Both ends of one session: the operations of its program, and the events of the store."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    EngineSession,
    Enqueued,
    Removal,
    SessionDefaults,
    SessionEvents,
)
from tenure.errors import EngineUnavailable, SessionExpired
from tenure.model import UNCHANGED, Recovered, SemaphoreDescription, Unchanged
from tenure.testing.faults.answers import settle

if TYPE_CHECKING:
    from tenure.testing.faults.engine import FaultyEngine

__all__ = ["FaultySession", "out_of_reach"]


def out_of_reach() -> EngineUnavailable:
    """Return the error that reports a broken way."""
    return EngineUnavailable("the way to the store is broken")


class FaultySession(SessionDefaults):
    """Both ends of one session: the operations of its program, and the events of the store.

    Attributes:
        pending: the answers that have not arrived yet.
    """

    def __init__(self, engine: FaultyEngine, how: Attach, events: SessionEvents) -> None:
        self.engine = engine
        self.how = how
        self.inner: EngineSession | None = None
        self.pending: dict[asyncio.Future[Any], None] = {}
        self._way = engine.way
        self._told = events
        self._over: SessionExpired | None = None
        self._thread = threading.get_ident()
        self._attaching: asyncio.Task[Any] | None = None
        self._unwanted = False
        # For each renewal: its arrival on the store's clock, and its departure on the program's.
        self._asked = deque([(float("-inf"), engine.clock.now())])

    # The program's end

    @property
    def _store(self) -> EngineSession:
        assert self.inner is not None
        return self.inner

    @property
    def id(self) -> int:
        return self._store.id

    @property
    def attach_number(self) -> int:
        return self._store.attach_number

    def _operate(self, operation: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._over is not None:
            raise self._over
        answer = self.engine.operate(operation, self)
        answer.add_done_callback(self.pending.pop)
        return answer

    def renew(self) -> None:
        loop, message = self.engine.loop, partial(self._renew, self.engine.clock.now())
        if threading.get_ident() == self._thread:
            self._way.there.send(message)
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._way.there.send, message)

    def _renew(self, sent: float) -> None:
        self._asked.append((self.engine.inner.clock.now(), sent))
        self._store.renew()

    async def close(self) -> None:
        await self._leave(self._store.close)

    async def detach(self) -> None:
        await self._leave(self._store.detach)

    async def _leave(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._over is None:
            answer = self.engine.operate(leave)  # not pending: the session's end must not fail it
            self.engine.sessions.pop(self, None)
            await answer

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        create = self._store.create_semaphore
        await self._operate(partial(create, name, limit, data, exist_ok=exist_ok))

    async def update_semaphore(self, name: str, data: bytes) -> None:
        await self._operate(partial(self._store.update_semaphore, name, data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        await self._operate(partial(self._store.delete_semaphore, name, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        describe = self._store.describe_semaphore
        found: SemaphoreDescription = await self._operate(
            partial(describe, name, owners=owners, waiters=waiters)
        )
        return found

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        enqueue = self._store.enqueue
        return self._operate(
            partial(enqueue, hold, name, count, data, timeout=timeout, ephemeral=ephemeral)
        )

    def alter(
        self,
        hold: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        return self._operate(
            partial(self._store.alter, hold, count=count, data=data, timeout=timeout)
        )

    def withdraw(self, hold: int) -> Answer[bool]:
        return self._operate(partial(self._store.withdraw, hold))

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        rules.check_name(name, self.how.node)
        if self._over is not None:
            raise self._over
        watch = _Watch(self, changed)
        self._way.there.send(partial(watch.begin, name, data, owners))
        return watch.stop

    def contact(self, attached: bool) -> None:
        """Notify the program that the connection was dropped or re-established."""
        if self._over is None and self in self.engine.sessions:
            if attached:
                self._told.attached()
            else:
                self._told.detached(out_of_reach())

    def _end(self, error: SessionExpired) -> None:
        if self._over is not None:
            return
        self._over = error
        self.engine.sessions.pop(self, None)
        for answer in list(self.pending):
            settle(answer, None, error)
        self._told.ended(error)

    # The store's end

    async def attach(self) -> EngineSession:
        self._attaching = asyncio.current_task()
        inner = await self.engine.inner.attach(self.how, self)
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
            self.engine.at_store(self._drop(attaching.result()))

    async def _drop(self, inner: EngineSession) -> None:
        await (inner.detach() if self.how.session_id is not None else inner.close())

    def proven(self, at: float) -> None:
        while len(self._asked) > 1 and self._asked[1][0] <= at:
            self._asked.popleft()
        self._way.back.send(partial(self._told.proven, self._asked[0][1]))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.engine.tell(partial(self._told.resumed, requests))

    def granted(self, hold: int, order_id: int | None) -> None:
        self._tell_granted(hold, order_id)
        if self._way.repeats():
            self._tell_granted(hold, order_id)

    def _tell_granted(self, hold: int, order_id: int | None) -> None:
        self.engine.tell(partial(self._heard_granted, hold, order_id))

    def _heard_granted(self, hold: int, order_id: int | None) -> None:
        if self._over is None:
            self._told.granted(hold, order_id)

    def removed(self, hold: int, why: Removal) -> None:
        self.engine.tell(partial(self._told.removed, hold, why))

    def detached(self, cause: BaseException | None = None) -> None:
        self.engine.tell(partial(self._told.detached, cause))

    def attached(self) -> None:
        self.engine.tell(self._told.attached)

    def ended(self, error: SessionExpired) -> None:
        self.engine.tell(partial(self._end, error))


class _Watch:
    """Both ends of one watch. A change is merged with a notification that is in transit."""

    def __init__(self, session: FaultySession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._stopped = False
        self._on_its_way = False
        self._stop_inner: Callable[[], None] | None = None

    def begin(self, name: str, data: bool, owners: bool) -> None:
        try:
            self._stop_inner = self._session._store.watch(
                name, data=data, owners=owners, changed=self._happened
            )
        except SessionExpired:
            return  # the program is notified of the end anyway

    def _happened(self) -> None:
        if not self._on_its_way:
            self._on_its_way = True
            self._session.engine.tell(self._tell)

    def _tell(self) -> None:
        self._on_its_way = False
        if not self._stopped:
            self._changed()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._session._way.there.send(self._end)

    def _end(self) -> None:
        if self._stop_inner is not None:
            self._stop_inner()
