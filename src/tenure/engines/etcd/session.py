"""A session of the etcd engine: the contract's methods, its events, and its end.

* etcd ends a session: its key is deleted, or belongs to another attachment. The program is
  notified, pending operations fail, and an attachment that was taken over deletes its claim.
* The program ends a session: no new operation is accepted. Pending operations are finished, or
  cancelled after a timeout. Then the session is detached or its lease revoked. A resumable session
  is first marked as detached, by a compare-and-swap on its key, so that the lease of another
  attachment is not revoked. A transaction without an answer is repeated for a window.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tenure.background import Ending
from tenure.core import refusals, rules
from tenure.engines.contract import Answer
from tenure.engines.etcd import semaphores, wire
from tenure.engines.etcd.answers import Lost, Refused, WatchEvent, pauses
from tenure.engines.etcd.attachment import WrittenAttachment
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import Queue, Record
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.requests import EtcdRequests
from tenure.engines.etcd.watch_cache import WatchCaches
from tenure.errors import SessionExpired, TenureError
from tenure.model import (
    EPHEMERAL_LIMIT,
    UNCHANGED,
    Recovered,
    SemaphoreDescription,
    Unchanged,
)

_log = logging.getLogger("tenure")


class EtcdSession(EtcdRequests):
    """The `EngineSession` of one attachment."""

    def __init__(
        self, engine: EtcdCluster, caches: WatchCaches, attached: WrittenAttachment
    ) -> None:
        super().__init__(engine, attached)
        self._in_contact = True
        self._ending: Ending | None = None
        self._caches = caches
        self._watch: Any = None

    def watch_key(self, revision: int) -> None:
        """Watch the session's keys after a revision."""
        self._watch = self.engine.watching.add(
            self.key, self.key + b"0", revision + 1, self._happened, self._missed
        )

    # Proof

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
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
                self.recheck.set()
            elif kv.key[len(self.key) :].startswith(b"/h/"):
                self._note(int(kv.key.rpartition(b"/")[2], 16), kv.value)

    def _note(self, request_id: int, why: bytes) -> None:
        """Process the note of a client that removed a request of this session."""
        if self.early is not None:
            self.early.append(partial(self._note, request_id, why))
            return
        self.taken_out(request_id, why)
        request = wire.txn((), (wire.delete(self.note(request_id)),))
        self.engine.spawn(self.engine.eventually(request, self.window, "delete a note"))

    def contact(self, there: bool, cause: TenureError | None = None) -> None:
        """Report the contact to the cluster, or the cause of its loss."""
        if there != self._in_contact and not (self.over or self.closing):
            self._in_contact = there
            if there:
                self.events.attached()
            else:
                self.events.detached(cause)

    def begin(self, found: Sequence[Queue], data: dict[bytes, bytes]) -> None:
        """Complete a takeover: report the requests, and then later events."""
        self.resume(self._recover(found, data))
        self._read_all()

    def _recover(self, queues: Sequence[Queue], data: dict[bytes, bytes]) -> list[Recovered]:
        """Restore the requests of the session, and return them by order id."""
        mine: list[EtcdRequest] = []
        for found in queues:
            name = self.name(found.name)
            for number, entry in enumerate(found.requests):
                if entry.session != self.id:
                    continue
                request = EtcdRequest(
                    self._waiting,
                    request_id=entry.request_id,
                    name=name,
                    key=entry.key,
                    count=entry.count,
                    data=data.get(name.data_of(entry.key), b""),
                    ephemeral=found.limit_kv is None,
                    timeout=entry.timeout,
                    limit=found.limit,
                    owns=number < found.owning,
                    marked=entry.marked,
                )
                self.joined(request, entry.created)
                self.requests[entry.request_id] = request
                if not request.owns:  # its timeout starts again
                    self._set_timer(request, entry.timeout)
                mine.append(request)
        return [
            Recovered(
                request_id=each.request_id,
                name=each.name.name,
                order_id=self.order_id(each),
                count=each.count,
                data=each.data,
                ephemeral=each.ephemeral,
                granted=each.owns,
            )
            for each in sorted(mine, key=lambda each: each.created)
        ]

    def _read_all(self) -> None:
        """Read the queues of all waiters after an interruption."""
        for request in self.requests.values():
            self._waiting.read_soon(request)

    def _missed(self) -> None:
        """Read the session's keys after an interruption."""
        if not self.over:
            self.engine.spawn(self._read_keys())

    async def _read_keys(self) -> None:
        try:
            range_ = wire.get(self.key, self.key + b"0")
            found = (await self.read(range_)).parts[0].found
        except (TenureError, Refused) as error:
            _log.debug("could not read the session: session=%d error=%s", self.id, error)
            return
        by_key = {kv.key: kv for kv in found}
        if self.judge(by_key.pop(self.key, None)):
            for key, kv in by_key.items():
                if key[len(self.key) :].startswith(b"/h/"):
                    self._note(int(key.rpartition(b"/")[2], 16), kv.value)
            self.recheck.set()
            self._read_all()

    # The end

    def abandon(self) -> None:
        """Undo an attach whose caller no longer waits for it."""
        self._begin_to_finish(detach=self.taken_over)

    async def close(self) -> None:
        """End the session."""
        await self._finish(detach=False)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._finish(detach=True)

    async def _finish(self, *, detach: bool) -> None:
        self._begin_to_finish(detach=detach)
        if self._ending is not None:
            await self._ending.wait()

    def _begin_to_finish(self, *, detach: bool) -> None:
        if self._ending is None and not self.over:
            self.closing = True
            self._ending = Ending(partial(self._leave_store, detach=detach), self.engine.spawn)

    async def _leave_store(self, *, detach: bool) -> None:
        """Detach or revoke what the store has not ended itself. Safe to repeat."""
        await self.operations.finish(self.timeout)
        if self.why_over is not None:
            return
        self._forget()
        if (detach or self.resumable) and not await self._mark_detached():
            return
        if not detach:
            await self.engine.revoke(self.id, self.window)

    async def _mark_detached(self) -> bool:
        """Mark the session as detached; false if another client has attached it meanwhile."""
        engine = self.engine
        detached = replace(self.record, attached=False)
        then = (wire.put(self.key, detached.value(), self.id), wire.delete(self.claim))
        until = engine.clock.now() + self.window
        pause = pauses()
        while engine.clock.now() < until:
            try:
                await engine.keep_alive(self)
                answer = await engine.txn(wire.txn((self.mine,), then, (self.get,)), self.timeout)
            except Lost:
                await asyncio.sleep(next(pause))
            except Refused as refused:
                if refused.no_lease:
                    return False
                raise engine.failure(refused, self.path) from refused
            else:
                if answer.ok:
                    return True
                kv = answer.parts[0].first
                if kv is None or not self.is_mine(kv):
                    await self._acknowledged()
                    return False
                if not Record.read(kv.value).attached:
                    return True  # an earlier attempt has done it
                self.became(kv.version)
        return False

    def _acknowledge(self) -> None:
        self.engine.spawn(self._acknowledged())

    async def _acknowledged(self) -> None:
        """Delete the claim, since this attachment no longer considers a lease held."""
        request = wire.txn((), (wire.delete(self.claim),))
        await self.engine.eventually(request, self.window, "delete a claim")

    def _forget(self) -> None:
        super()._forget()
        self.stop_requests()
        if self._watch is not None:
            self.engine.watching.remove(self._watch)
        self.engine.sessions.discard(self)
        self._caches.forget(self)
        ended_by_store = isinstance(self.why_over, SessionExpired)
        self.operations.cut_off(finish_leaving=ended_by_store)

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check_open()
        keys = self.name(name)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        await self.operations.take(
            name, lambda: semaphores.create(self, keys, limit, data, exist_ok=exist_ok)
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check_open()
        keys = self.name(name)
        rules.check_data(data, self.path, name)
        await self.operations.take(name, lambda: semaphores.update(self, keys, data))

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a semaphore."""
        self.check_open()
        keys = self.name(name)
        rules.check_new_limit(limit, self.path, name)
        await self.operations.take(name, lambda: semaphores.resize(self, keys, limit))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check_open()
        keys = self.name(name)
        await self.operations.take(name, lambda: semaphores.delete(self, keys, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check_open()
        keys = self.name(name)

        async def describe() -> SemaphoreDescription:
            await self.operations.ready()  # a watch that began before reports what changes later
            return await semaphores.describe(
                self, self.engine, keys, owners=owners, waiters=waiters
            )

        return await self.operations.take(name, describe)

    # Requests

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self.check_open()
        request = self.requests.get(request_id)
        if request is None:
            raise refusals.request_over(self.path)
        return self.operations.take(
            request.name.name, lambda: self._alter(request, count, data, timeout)
        )

    async def _alter(
        self,
        request: EtcdRequest,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> None:
        path, name = self.path, request.name.name
        if request.gone or request.request_id not in self.requests:
            raise refusals.request_over(self.path)
        if data is not None:
            rules.check_data(data, path, name)
        if count is not None:
            # The limit does not matter to a request that shrinks, and growing is always an error.
            grows = isinstance(count, int) and request.count < count <= EPHEMERAL_LIMIT
            limit = EPHEMERAL_LIMIT if grows and count <= rules.EXACT else request.count
            rules.check_shrink(count, request.count, limit, path, name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, path, name)
        shrinks = count is not None and count != request.count
        retimed = False
        if timeout is not UNCHANGED and timeout != 0 and not request.owns:
            request.timeout, retimed = timeout, True
            self._set_timer(request, None)  # the former timeout counts no more
        if shrinks or retimed or (data is not None and data != request.data):
            new = request.count if count is None else count
            answer, _ = await self.transact(partial(request.changing, self, new, data))
            if not answer.ok:
                raise refusals.request_over(self.path)
            request.count = new
            request.data = request.data if data is None else data
            if not request.owns and shrinks:
                self._waiting.unwatch(request)  # it watched with its former count
        if not request.owns and (shrinks or timeout == 0):
            await self._waiting.read(request, report=False)
            self.engine.loop.call_soon(self._report_if_granted, request)
        if timeout is not UNCHANGED:
            self._set_timer(request, timeout)

    def _report_if_granted(self, request: EtcdRequest) -> None:
        if request.owns and not (request.gone or self.over):
            self._waiting.granted(request)

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
        self.check_open()
        stop, in_place = self._caches.watch(self, self.name(name), data, owners, changed)
        self.operations.wait_for(in_place)
        return stop
