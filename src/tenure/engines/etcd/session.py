"""A session of the etcd engine: the contract's methods, what a watch tells, and the end.

The end comes once. By etcd's word: the key is gone, or another attachment has it; then the program
is notified, pending operations fail, and a taken-over attachment acknowledges that it is over. By
the program: no new operation is accepted, those under way are finished or cancelled within the
engine's patience, and then the session is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, SessionDefaults, SessionEvents, Withdrawn
from tenure.engines.etcd import semaphores, wire
from tenure.engines.etcd.answers import WatchEvent
from tenure.engines.etcd.attachment import Attachment
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import Queue, Record
from tenure.engines.etcd.members import Refused
from tenure.engines.etcd.requests import EtcdRequests
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.errors import SessionExpired, TenureError
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

__all__ = ["EtcdSession"]

_log = logging.getLogger("tenure")


class EtcdSession(Attachment, SessionDefaults):
    """The `EngineSession` of one attachment.

    Attributes:
        look: set when something has happened that a take-over waits for.
        put_by: the notes that came while its take-over is not complete; ``None`` when it is.
    """

    def __init__(
        self,
        engine: EtcdCluster,
        caches: WatchCaches,
        path: str,
        number: int,
        record: Record,
        version: int,
        events: SessionEvents,
        *,
        taken_over: bool = False,
    ) -> None:
        super().__init__(engine, path, number, record, version, events)
        self.look = asyncio.Event()
        self.put_by: list[tuple[int, bytes]] | None = [] if taken_over else None
        self._was_taken_over = taken_over
        self.requests = EtcdRequests(self)
        self._in_contact = True
        self._leaving: asyncio.Task[None] | None = None
        self._caches = caches
        self._watch: Any = None

    def listen(self, revision: int) -> None:
        """Hear of what happens to it after that revision."""
        self._watch = self.engine.watching.add(
            self.key, self.key + b"0", revision + 1, self._happened, self._missed
        )

    # Proof

    def renew(self) -> None:
        if not self.over:
            self.engine.renew(self)

    # Events

    def _happened(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            if self.over:
                return
            kv = event.kv
            if kv.key == self.key:
                self.judge(None if event.deleted else kv)
            elif event.deleted:
                self.look.set()
            elif kv.key[len(self.key) :].startswith(b"/h/"):
                self._note(int(kv.key.rpartition(b"/")[2], 16), kv.value)

    def _note(self, hold: int, why: bytes) -> None:
        """Act on the note of a client that took out one of its requests."""
        if self.put_by is not None:
            self.put_by.append((hold, why))
            return
        self.requests.taken_out(hold, why)
        key = self.key + b"/h/%x" % hold
        self.engine.spawn(
            self.engine.eventually(wire.txn((), (wire.delete(key),)), self.window, "a note")
        )

    def contact(self, there: bool, cause: TenureError | None = None) -> None:
        """Report to the program that a member is reached, or why none is."""
        if there != self._in_contact and not (self.over or self._closing):
            self._in_contact = there
            if there:
                self.events.attached()
            else:
                self.events.detached(cause)

    def begin(self, found: Sequence[Queue], data: dict[bytes, bytes]) -> None:
        """The take-over is complete: tell what was found, and then what has happened since."""
        self.events.resumed(self.requests.recover(found, data))
        put_by, self.put_by = self.put_by or [], None
        for note in put_by:
            self._note(*note)
        self.requests.look_at_all()

    def _missed(self) -> None:
        """Look the session up after a gap."""
        if not self.over:
            self.engine.spawn(self._look_up())

    async def _look_up(self) -> None:
        try:
            range_ = wire.get(wire.range_(self.key, self.key + b"0"))
            found = (await self.read(range_)).parts[0].found
        except (TenureError, Refused) as error:
            _log.debug("looking session %d up: %s", self.id, error)
            return
        by_key = {kv.key: kv for kv in found}
        if self.judge(by_key.pop(self.key, None)):
            for key, kv in by_key.items():
                if key[len(self.key) :].startswith(b"/h/"):
                    self._note(int(key.rpartition(b"/")[2], 16), kv.value)
            self.look.set()
            self.requests.look_at_all()

    # The end

    async def abandon(self) -> None:
        """End a session that no caller has; detach it again if it was taken over."""
        await self._leave(detach=self._was_taken_over)

    async def close(self) -> None:
        await self._leave(detach=False)

    async def detach(self) -> None:
        await self._leave(detach=True)

    async def _leave(self, *, detach: bool) -> None:
        if self._leaving is None:
            if self.over:
                return
            self._closing = True
            self._leaving = self.engine.spawn(self._left(detach=detach))
        await asyncio.shield(self._leaving)

    async def _left(self, *, detach: bool) -> None:
        await self.turns.finish(self.patience)
        if not self.over:
            self._forget()
            if (detach or self.resumable) and not await self.give_back():
                return
            if not detach:
                await self.engine.revoke(self.id, self.window)

    def end(self, why: str) -> None:
        """The store says that it is over."""
        self._end(SessionExpired(f"the session on {self.path} is over: {why}", node=self.path))

    def superseded(self) -> None:
        """End it: another attachment has taken over. The store gets the acknowledgement then."""
        if not self.over:
            self._end(rules.taken_over(self.path))
            self.engine.spawn(self.acknowledge())

    def stop(self, error: TenureError) -> None:
        """The engine is being closed."""
        if not self.over:
            self._why_over = error
            self._forget()

    def _end(self, error: SessionExpired) -> None:
        if not self.over:
            self._why_over = error
            self._forget(finish_leaving=True)
            if not self._closing:
                self.events.ended(error)

    def _forget(self, *, finish_leaving: bool = False) -> None:
        self.over = True
        self.look.set()
        self.requests.stop()
        if self._watch is not None:
            self.engine.watching.remove(self._watch)
        self.engine.sessions.discard(self)
        self._caches.forget(self)
        self.turns.cut_off(finish_leaving=finish_leaving)

    def _open(self) -> None:
        if self.over or self._closing:
            raise self._why_over or self._gone()

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        self._open()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        await self.turns.take(
            name,
            lambda: semaphores.create(self, self.name(name), limit, data, exist_ok=exist_ok),
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        self._open()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self.turns.take(name, lambda: semaphores.update(self, self.name(name), data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        self._open()
        rules.check_name(name, self.path)
        await self.turns.take(name, lambda: semaphores.delete(self, self.name(name), force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        self._open()
        rules.check_name(name, self.path)
        return await self.turns.take(
            name,
            lambda: semaphores.describe(
                self, self.engine, self.name(name), owners=owners, waiters=waiters
            ),
        )

    # EtcdRequests

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
        if self.over or self._closing:
            self._open()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        rules.check_name(name, self.path)
        return self.requests.enqueue(hold, self.name(name), count, data, timeout, ephemeral)

    def alter(
        self,
        hold: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        self._open()
        return self.requests.alter(hold, count, data, timeout)

    def withdraw(self, hold: int) -> Answer[Withdrawn]:
        self._open()
        return self.requests.withdraw(hold)

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        self._open()
        rules.check_name(name, self.path)
        stop, in_place = self._caches.watch(self, self.name(name), data, owners, changed)
        self.turns.wait_for(in_place)
        return stop
