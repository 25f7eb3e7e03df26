"""One attachment of a session, through one engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Place,
    Removal,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.sqlite import nodes, requests, sessions
from tenure.engines.sqlite.descriptions import SqliteDescriptions
from tenure.engines.sqlite.expiry import Attachment
from tenure.engines.sqlite.liveness import LivenessFile
from tenure.engines.sqlite.sessions import AttachedRow, Found
from tenure.engines.sqlite.store import Store, answered
from tenure.engines.sqlite.transaction import DATA, OWNERS
from tenure.engines.sqlite.watches import SqliteWatches
from tenure.errors import TenureError
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

T = TypeVar("T")


class _Monitor(Protocol):
    """The monitor, as seen by sessions."""

    def waits(
        self,
        session: int,
        request_id: int,
        name: tuple[int, str],
        order_id: int,
        deadline: float | None,
        /,
    ) -> None: ...

    def waits_until(self, session: int, request_id: int, deadline: float, /) -> None: ...

    def waits_no_more(self, session: int, request_id: int, /) -> None: ...


class _Engine(Protocol):
    """The engine, as seen by its sessions."""

    clock: Clock
    store: Store

    @property
    def monitor(self) -> _Monitor: ...

    def forget(self, session: SqliteSession, /) -> None: ...

    def acknowledge(
        self, former: Attachment, note: Callable[[bool | None], None] | None = None, /
    ) -> None: ...

    def do_in_background(
        self, work: Callable[..., bool], *args: Any, note: Callable[[bool | None], None]
    ) -> object: ...

    @property
    def watches(self) -> SqliteWatches: ...

    @property
    def descriptions(self) -> SqliteDescriptions: ...


class Standing(Enum):
    """State of a request, as far as known."""

    SENT = 0
    WAITING = 1
    OWNED = 2


SENT, WAITING, OWNED = Standing


class SqliteSession(SessionBase):
    """Session of the SQLite engine: one attachment.

    Attributes:
        me: its id and attach number, which identify this attachment in the store.
        survives_process: whether the session outlives this program.
        requests: its requests with their states, as far as known. Events of others are older:
            of requests that were withdrawn, or removed before a takeover.
        looked_at: when the store was last read for them.
    """

    check_every = 0.5

    def __init__(
        self,
        engine: _Engine,
        how: Attach,
        events: SessionEvents,
        attached: AttachedRow,
        life: LivenessFile,
        slot: int,
    ) -> None:
        number, self.node, self.attach_number, window = attached
        super().__init__(how, events, number, window)
        self.me = (number, self.attach_number)
        self.slot = slot
        self.survives_process = how.liveness == "window"
        self.requests: dict[int, Standing] = {}
        self.looked_at = engine.clock.now()
        self._engine = engine
        self._do = engine.store.committer.do
        self._now = engine.clock.now
        self._life = life
        self._monitor = engine.monitor
        self._renewing = threading.Lock()

    # Proof

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        at = self.beat()
        if at is not None:
            self.events.proven(at)

    def beat(self) -> float | None:
        """Write the heartbeat; return its time, or ``None`` if it does not prove the session.

        It is proof only if no participant can have found the session silent before.
        """
        if self.over or not self._renewing.acquire(blocking=False):
            return None
        try:
            life, slot = self._life, self.slot
            last = life.last_beat(slot)
            at = self._now()
            if at - last > self.window or not life.in_place:
                return None
            life.beat(slot, at)
            if self._now() - last > self.window:
                life.stop_beating(slot)
                return None
            return at
        except (OSError, ValueError):  # the folder was removed, or the engine is just being closed
            return None
        finally:
            self._renewing.release()

    @property
    def last_beat(self) -> float:
        """Time of the last heartbeat."""
        return self._life.last_beat(self.slot)

    @property
    def proven_until(self) -> float:
        """Time until which no participant considers it silent."""
        return self.last_beat + self.window

    # Takeover

    def keep(self) -> float:
        """Renew the session during its takeover; return the time that this proves.

        Raises:
            SessionExpired: it has ended, or was taken over again.
        """
        at = self.beat()
        if at is None:
            self.check()
            raise rules.not_there_to_resume(self.path, self.id)
        return at

    def begin(self, found: Sequence[Found] | None) -> None:
        """Complete the takeover with the requests in the store; ``None`` after a failure."""
        if found is None or self.over:
            return
        requests = [each.request for each in found]
        for each, deadline in found:
            self.requests[each.request_id] = OWNED if each.granted else WAITING
            if not each.granted:
                where = (self.node, each.name)
                self._monitor.waits(self.id, each.request_id, where, each.order_id, deadline)
        self.resume(requests)

    def _acknowledge(self) -> None:
        self._engine.acknowledge(self.me, self._left)

    # The end

    async def close(self) -> None:
        """End the session."""
        if not self.over:
            self._forget()
            self._life.stop_beating(self.slot)  # if the store fails, other participants end it
            await self._leave(sessions.close, self.me)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        if not self.over:
            self.beat()  # its last contact is now
            contact = self.last_beat
            self._forget()
            await self._leave(sessions.detach, self.me, contact)

    async def _leave(self, work: Callable[..., bool], *args: Any) -> None:
        """Wait until the store has done it. A cancelled caller does not stop that."""
        answer = self._do(work, *args, note=self._left)
        if isinstance(answer, asyncio.Future):
            await asyncio.shield(answer)

    def abandon(self) -> None:
        """Leave a session that no caller has received; the store is updated in the background."""
        if self.over:
            return
        self._forget()
        do = self._engine.do_in_background
        with contextlib.suppress(TenureError):  # other participants end it when it is silent
            if self.taken_over:
                do(sessions.detach, self.me, self.last_beat, note=self._left)
            else:
                self._life.stop_beating(self.slot)
                do(sessions.close, self.me, note=self._left)

    def end(self, why: str) -> None:
        """Report that the store has ended the session."""
        if not self.over:
            super().end(why)
            self._free_slot()

    def missing_in(self, found: Mapping[int, bool]) -> Collection[int]:
        """Return the requests that this program knows, and the store does not.

        Args:
            found: the requests of the session in the store, and whether it owns them.
        """
        return [
            each
            for each, standing in self.requests.items()
            if (standing is OWNED and not found.get(each))
            or (standing is WAITING and each not in found)
        ]

    def lapsed(self, requests: Collection[int]) -> None:
        """Report requests that were deleted by hand, unless events have had another reason."""
        for request_id in requests:
            if request_id in self.requests and not self.over:
                self.removed(request_id, Removal.LAPSED)

    def _forget(self) -> None:
        super()._forget()
        self._engine.forget(self)

    def _left(self, done: bool | None) -> None:
        if done:
            self._free_slot()

    def _free_slot(self) -> None:
        with contextlib.suppress(ValueError):  # the engine has been closed meanwhile
            self._life.free_slot(self.slot)

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self.check()
        await answered(
            self._do(
                nodes.create_semaphore,
                *(self.me, self.node, self.path, name, limit, data, exist_ok),
            )
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self.check()
        await answered(self._do(nodes.update_semaphore, self.me, self.node, self.path, name, data))

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change the limit of a semaphore."""
        self.check()
        await answered(self._do(nodes.resize_semaphore, self.me, self.node, self.path, name, limit))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self.check()
        await answered(self._do(nodes.delete_semaphore, self.me, self.node, self.path, name, force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self.check()
        rules.check_name(name, self.path)
        return await self._engine.descriptions.semaphore_for(
            self.me, self.node, self.path, name, owners, waiters
        )

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
        if self.over:
            self.check()
        self.requests[request_id] = SENT
        return self._do(
            requests.enqueue,
            self.me,
            self.path,
            request_id,
            name,
            count,
            data,
            timeout,
            ephemeral,
            note=partial(self._placed, request_id, name, timeout),
        )

    def _placed(
        self, request_id: int, name: str, timeout: float | None, answer: Enqueued | None
    ) -> None:
        if self.requests.get(request_id) is not SENT:
            return  # withdrawn meanwhile, or an event has come before
        if answer is None or answer.place is Place.REFUSED:
            del self.requests[request_id]
        elif answer.place is Place.GRANTED:
            self.requests[request_id] = OWNED
        elif not self.over:
            assert answer.order_id is not None
            self.requests[request_id] = WAITING
            deadline = None if timeout is None else self._now() + timeout
            self._monitor.waits(self.id, request_id, (self.node, name), answer.order_id, deadline)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self.check()
        return self._do(
            requests.alter,
            *(self.me, self.path, request_id, count, data, timeout),
            note=partial(self._retimed, request_id, timeout),
        )

    def _retimed(self, request_id: int, timeout: float | Unchanged | None, _: None = None) -> None:
        if timeout is not None and timeout is not UNCHANGED:
            self._monitor.waits_until(self.id, request_id, self._now() + timeout)

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        if self.over:
            self.check()
        self._drop(request_id)
        return self._do(requests.withdraw, self.me, self.path, request_id)

    def _drop(self, request_id: int) -> None:
        self.requests.pop(request_id, None)
        self._monitor.waits_no_more(self.id, request_id)

    # Events of requests

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Report that a request is now an owner."""
        self._monitor.waits_no_more(self.id, request_id)
        self.requests[request_id] = OWNED
        self.events.granted(request_id, order_id)

    def removed(self, request_id: int, why: Removal) -> None:
        """Report that a request has left its queue."""
        self.events.removed(request_id, why)
        self._drop(request_id)  # afterwards: an event that could not be reported comes again

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
        self.check()
        rules.check_name(name, self.path)
        kinds = data * DATA | owners * OWNERS
        return self._engine.watches.add(self, (self.node, name), kinds, changed)
