"""One session attached through one engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.contract import Answer, Attach, Enqueued, Place, SessionEvents
from tenure.engines.sqlite import nodes, requests, sessions
from tenure.engines.sqlite.life import Life
from tenure.engines.sqlite.transaction import DATA, OWNERS
from tenure.errors import SessionExpired
from tenure.model import SemaphoreDescription

if TYPE_CHECKING:
    from tenure.engines.sqlite.engine import SqliteEngine

__all__ = ["SqliteSession"]


class SqliteSession:
    """What the contract calls a session.

    Attributes:
        over: it has ended or been closed here; nothing is told about it any more.
        asked: the holds of requests whose places are not known yet.
    """

    attach_number = 1

    def __init__(
        self,
        engine: SqliteEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        node: int,
        life: Life,
        slot: int,
    ) -> None:
        self.id = number
        self.node = node
        self.path = how.node
        self.window = how.recovery_window
        self.events = events
        self.slot = slot
        self.over = False
        self.asked: set[int] = set()
        self._engine = engine
        self._commit = engine.store.committer.do_and_note
        self._now = engine.clock.now
        self._life = life
        self._lookout = engine.lookout
        self._renewing = threading.Lock()

    # Proof

    def renew(self) -> None:
        """Write the heartbeat. It is proof only if nobody can have missed it before."""
        if self.over or not self._renewing.acquire(blocking=False):
            return
        try:
            life, slot = self._life, self.slot
            last = life.last_beat(slot)
            at = self._now()
            if at - last > self.window or not life.in_place:
                return
            life.beat(slot, at)
            if self._now() - last > self.window:
                life.stop_beating(slot)
                return
        except (OSError, ValueError):  # the folder is gone; or the engine is closed just now
            return
        finally:
            self._renewing.release()
        self.events.proven(at)

    @property
    def proven_until(self) -> float:
        """Until when nobody takes it for silent."""
        return self._life.last_beat(self.slot) + self.window

    # The end

    async def close(self) -> None:
        if self.over:
            return
        self._forget()
        self._life.stop_beating(self.slot)  # should the store fail: whoever meets it ends it
        await self._engine.wait(self._commit(None, sessions.end, self.id, None, None))
        self._free_slot()

    async def detach(self) -> None:
        if self.over:
            return
        contact = self._life.last_beat(self.slot)
        self._forget()
        await self._engine.wait(self._commit(None, sessions.detach, self.id, contact))
        self._free_slot()

    def end(self, why: str) -> None:
        """The store says that it is over."""
        self._forget()
        self._free_slot()
        self.events.ended(
            SessionExpired(f"the session on {self.path} is over: {why}", node=self.path)
        )

    def _forget(self) -> None:
        self.over = True
        self._engine.forget(self)

    def _free_slot(self) -> None:
        with contextlib.suppress(ValueError):  # the engine has been closed meanwhile
            self._life.free_slot(self.slot)

    def _check(self) -> None:
        if self.over:
            raise SessionExpired(f"the session on {self.path} is over", node=self.path)

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._commit(
                None,
                nodes.create_semaphore,
                *(self.id, self.node, self.path, name, limit, data, exist_ok),
            )
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._commit(None, nodes.update_semaphore, self.id, self.node, self.path, name, data)
        )

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._commit(None, nodes.delete_semaphore, self.id, self.node, self.path, name, force)
        )

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        self._check()
        rules.check_name(name, self.path)
        return await self._engine.describe(self, name, owners=owners, waiters=waiters)

    # Requests

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
        self._check()
        rules.check_name(name, self.path)
        answer = self._commit(
            partial(self._placed, hold, name, timeout),
            requests.enqueue,
            *(self.id, self.path, hold, name, count, data, timeout, ephemeral),
        )
        if isinstance(answer, Enqueued):
            if answer.place is Place.WAITING:
                self._placed(hold, name, timeout, answer)
        else:
            self.asked.add(hold)
            self._lookout.keep_ticking()
        return answer

    def _placed(self, hold: int, name: str, timeout: float | None, answer: Enqueued | None) -> None:
        self.asked.discard(hold)
        if answer is not None and answer.place is Place.WAITING and not self.over:
            assert answer.order_id is not None
            deadline = None if timeout is None else self._now() + timeout
            self._lookout.waits(self.id, hold, (self.node, name), answer.order_id, deadline)

    def alter(self, hold: int, *, count: int | None, data: bytes | None) -> Answer[None]:
        self._check()
        answer = self._commit(None, requests.alter, self.id, self.path, hold, count, data)
        if answer is not None:
            self._lookout.keep_ticking()
        return answer

    def withdraw(self, hold: int) -> Answer[None]:
        if self.over:
            return None
        self._lookout.waits_no_more(self.id, hold)
        answer = self._commit(None, requests.withdraw, self.id, hold)
        if answer is not None:
            self._lookout.keep_ticking()
        return answer

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        self._check()
        rules.check_name(name, self.path)
        return self._engine.watch(self, name, data * DATA | owners * OWNERS, changed)
