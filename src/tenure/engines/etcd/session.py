"""One attachment of a session: a lease, its key, and what is asked in its name.

Rules:

* **The attach number** is the version of the session's key. Every attachment puts the key, and
  every command compares the version, so that etcd refuses whatever an older attachment still
  sends.
* **Unknown outcomes.** What was not answered may have been done, or may be done yet. The session
  is attached anew first, under the next number: from then on what is still under way is refused.
  Then it is asked again, by an operation that knows that it may find its own traces.
* **Order**: see `turns`.
* **The end** comes once. By etcd's word: the key is gone, or another attachment has it; then the
  program is told, pending operations fail, and a taken-over attachment says that it does not
  believe any more. By the program: nothing new is taken, what is under way is finished or given up
  within the engine's patience, and then it is left: see `leaving`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tenure.core import rules
from tenure.engines.contract import Answer, Enqueued, SessionDefaults, SessionEvents
from tenure.engines.etcd import answers, leaving, semaphores, wire
from tenure.engines.etcd.answers import Event, KeyValue
from tenure.engines.etcd.keys import Name, Queue, Record
from tenure.engines.etcd.members import Lost, Refused, failure
from tenure.engines.etcd.requests import Requests
from tenure.engines.etcd.turns import Turns
from tenure.errors import SessionExpired, TenureError
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

if TYPE_CHECKING:
    from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.request import Request

__all__ = ["EtcdSession"]

_log = logging.getLogger("tenure")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_LEAST_PATIENCE = 0.5


class EtcdSession(SessionDefaults):
    """The `EngineSession` of one attachment.

    Attributes:
        key: the session's key.
        record: what stands there.
        version: of the key; the attach number.
        mine: what every command compares.
        window: seconds that it survives without contact.
        resumable: whether another program may take it over.
        proven_at: when the latest renewal that was answered was sent.
        over: it has ended, or been left; nothing is told about it any more.
        look: set when something has happened that a take-over waits for.
        turns: its operations.
        put_by: the notes that came while its take-over is not complete; ``None`` when it is.
    """

    def __init__(
        self,
        engine: EtcdEngine,
        path: str,
        number: int,
        record: Record,
        version: int,
        events: SessionEvents,
        *,
        taken_over: bool = False,
    ) -> None:
        self.engine = engine
        self.path = path
        self.id = number
        self.key = engine.keys.session(path, number)
        self.record = record
        self.window = record.window
        self.resumable = record.liveness == "window"
        self.events = events
        self.patience = min(engine.patience, max(record.window / 6, _LEAST_PATIENCE))
        self.get = wire.get(wire.range_(self.key))
        self.believes = self.key + b"/b/" + record.token.encode()
        self.proven_at = float("-inf")
        self.over = False
        self.look = asyncio.Event()
        self.put_by: list[tuple[int, bytes]] | None = [] if taken_over else None
        self._was_taken_over = taken_over
        self.turns = Turns(engine.spawn, self._told)
        self.requests = Requests(self)
        self.became(version)
        self._why_over: TenureError | None = None
        self._closing = False
        self._in_contact = True
        self._leaving: asyncio.Task[None] | None = None
        self._attaching = asyncio.Lock()
        self._watch: Any = None

    @property
    def attach_number(self) -> int:
        return self.version

    def became(self, version: int) -> None:
        """The number of the attachment is another one."""
        self.version = version
        self.mine = wire.version_is(self.key, version)

    def listen(self, revision: int) -> None:
        """Hear of what happens to it after that revision."""
        self._watch = self.engine.watching.add(
            self.key, self.key + b"0", revision + 1, self._happened, self._missed
        )

    # Proof

    def renew(self) -> None:
        if not self.over:
            self.engine.renew(self)

    def prove(self, at: float) -> None:
        """The lease was extended, in answer to what was sent then. From any thread."""
        if not self.over and not self._closing:
            self.proven_at = max(self.proven_at, at)
            self.events.proven(at)

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as it was read, names this attachment."""
        return kv is not None and Record.read(kv.value).token == self.record.token

    def judge(self, kv: KeyValue | None) -> bool:
        """Act on the session's key as it was read; whether the session goes on."""
        if kv is None:
            self.end("its window has passed in the store, or an administrator ended it")
        elif not self.is_mine(kv):
            self.superseded()
        elif kv.version > self.version:
            self.became(kv.version)
        return not self.over

    # Asking

    async def ask(
        self, build: Callable[[], bytes], leaving: Request | None = None
    ) -> tuple[answers.Answer, bool]:
        """Send a transaction; returns its answer, and whether it may have been carried out before.

        It compares `mine`, and reads the session's key first where something does not hold.

        Args:
            leaving: the request that the transaction deletes.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        again = False
        while True:
            self.check()
            version = self.version
            try:
                answer = await self.engine.txn(build(), self.patience)
            except Lost:
                again = True
                if leaving is not None:
                    leaving.perhaps_left = True
                await self.attach_anew(version)
                continue
            if answer.ok:
                return answer, again
            kv = answer.parts[0].first
            if kv is not None and kv.version == version and self.is_mine(kv):
                return answer, again
            self.judge(kv)

    def _told(self, error: Refused | asyncio.CancelledError, name: str) -> TenureError:
        """Make the caller's error of a refusal or a cancellation."""
        if isinstance(error, Refused):
            if not error.no_lease:
                return failure(self.engine.url, error, node=self.path, name=name)
            self.end("its lease has run out, or was revoked")
        return self._why_over or self._gone()

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority; repeated until it is answered.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        pause = _FIRST_PAUSE
        while True:
            self.check()
            try:
                return await self.engine.txn(wire.txn((), parts), self.patience)
            except Lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def attach_anew(self, version: int) -> None:
        """See to it that the number of the attachment is above that one."""
        async with self._attaching:
            pause = _FIRST_PAUSE
            while self.version == version:
                self.check()
                put = wire.put(self.key, self.record.value(), self.id)
                try:
                    answer = await self.engine.txn(
                        wire.txn((self.mine,), (put,), (self.get,)), self.patience
                    )
                except Lost:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                else:
                    if answer.ok:
                        self.became(version + 1)
                    else:
                        self.judge(answer.parts[0].first)

    # What is heard

    def _happened(self, events: Sequence[Event]) -> None:
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
            await leaving.leave(self, detach=detach)

    def end(self, why: str) -> None:
        """The store says that it is over."""
        self._end(SessionExpired(f"the session on {self.path} is over: {why}", node=self.path))

    def superseded(self) -> None:
        """Another attachment has taken over. It is told so, and the store then that it was."""
        if not self.over:
            self._end(rules.taken_over(self.path))
            self.engine.spawn(leaving.acknowledge(self))

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
        self.engine.forget(self)
        self.turns.cut_off(finish_leaving=finish_leaving)

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.over:
            raise self._why_over or self._gone()

    def expired(self) -> SessionExpired:
        """The error for a session whose window has passed without an answer."""
        path = self.path
        return SessionExpired(f"the session on {path} could not be renewed in time", node=path)

    def _gone(self) -> SessionExpired:
        return SessionExpired(f"the session on {self.path} is over", node=self.path)

    def _open(self) -> None:
        if self.over or self._closing:
            raise self._why_over or self._gone()

    # Semaphores

    def name(self, name: str) -> Name:
        """The keys of a semaphore on its node."""
        return self.engine.name(self.path, name)

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

    def withdraw(self, hold: int) -> Answer[bool]:
        self._open()
        return self.requests.withdraw(hold)

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        self._open()
        rules.check_name(name, self.path)
        return self.engine.look_out(self, self.name(name), data, owners, changed)
