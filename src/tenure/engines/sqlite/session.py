"""One attachment of a session, through one engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Place,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.sqlite import nodes, requests, sessions
from tenure.engines.sqlite.life import Life
from tenure.engines.sqlite.over import Attachment
from tenure.engines.sqlite.store import Store
from tenure.engines.sqlite.takeover import AttachedRow, Found
from tenure.engines.sqlite.transaction import DATA, OWNERS, Push
from tenure.engines.sqlite.watches import SqliteWatches
from tenure.errors import SessionExpired, TenureError
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

__all__ = ["SqliteSession"]

T = TypeVar("T")


class _Monitor(Protocol):
    """The monitor, as sessions use it."""

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

    def pass_on(self, pushes: list[Push], /) -> None: ...


class _Engine(Protocol):
    """The engine, as its sessions use it."""

    clock: Clock
    store: Store

    @property
    def monitor(self) -> _Monitor: ...

    async def wait(self, answer: Answer[T], /) -> T: ...

    def forget(self, session: SqliteSession, /) -> None: ...

    def acknowledge(
        self, former: Attachment, note: Callable[[bool | None], None] | None = None, /
    ) -> None: ...

    def do_unasked(
        self, work: Callable[..., bool], *args: Any, note: Callable[[bool | None], None]
    ) -> object: ...

    async def describe(
        self, session: SqliteSession, name: str, /, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription: ...

    @property
    def watches(self) -> SqliteWatches: ...


class SqliteSession(SessionDefaults):
    """Session of the SQLite engine: one attachment.

    Attributes:
        over: it has ended or been closed here; no further event is reported.
        asked: the holds of requests whose places are not known yet.
        me: as the store knows this attachment.
        look: set when something has happened that a take-over waits for.
        put_by: what was pushed while its take-over is not complete; ``None`` when it is.
        known: of a session that was taken over, the holds that it knows; a push for another is
            news from before. ``None`` of a new one, which knows them all.
    """

    def __init__(
        self,
        engine: _Engine,
        how: Attach,
        events: SessionEvents,
        attached: AttachedRow,
        life: Life,
        slot: int,
    ) -> None:
        """Start attached, from the row that the transaction has written."""
        self.id, self.node, self.attach_number, self.window = attached
        self.me = (self.id, self.attach_number)
        self.path = how.node
        self.events = events
        self.slot = slot
        self.over = False
        self.asked: set[int] = set()
        self.look = asyncio.Event()
        self.put_by: list[Push] | None = None if how.session_id is None else []
        self.known: set[int] | None = None if how.session_id is None else set()
        self._why_over: TenureError | None = None
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

        It is proof only if no participant can have considered the session silent before.
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
        except (OSError, ValueError):  # the folder is gone; or the engine is closed just now
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

    # Taking over

    def keep(self) -> float:
        """Keep it alive, while its take-over waits; returns what that proves.

        Raises:
            SessionExpired: it is over, or was taken over once more.
        """
        at = self.beat()
        if at is None:
            raise self._why_over or rules.not_there_to_resume(self.path, self.id)
        return at

    def begin(self, found: Sequence[Found]) -> None:
        """The take-over is complete: tell what was found, and then what has happened since."""
        if self.over:
            return
        requests, put_by = [each.request for each in found], self.put_by
        assert put_by is not None
        self.put_by = None
        self.known = {each.request_id for each in requests}
        for each, deadline in found:
            if not each.granted:
                where = (self.node, each.name)
                self._monitor.waits(self.id, each.request_id, where, each.order_id, deadline)
        self.events.resumed(requests)
        self._monitor.pass_on(put_by)

    def superseded(self) -> None:
        """End this attachment, as another has taken over, and acknowledge that to the store."""
        if self.over:
            return
        self._end(rules.taken_over(self.path))
        self._engine.acknowledge(self.me, self._left)

    def stop(self, error: TenureError) -> None:
        """The engine is being closed."""
        self.over = True
        self._why_over = error
        self.look.set()

    # The end

    async def close(self) -> None:
        """End the session."""
        if self.over:
            return
        self._forget()
        self._life.stop_beating(self.slot)  # if the store fails, other participants end it
        await self._leave(sessions.close, self.me)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        if self.over:
            return
        self.beat()  # its last contact is now
        contact = self.last_beat
        self._forget()
        await self._leave(sessions.detach, self.me, contact)

    async def _leave(self, work: Callable[..., bool], *args: Any) -> None:
        """Wait until the store has done it. A cancelled caller does not stop that."""
        answer = self._do(work, *args, note=self._left)
        if isinstance(answer, asyncio.Future):
            await asyncio.shield(answer)

    def _left(self, done: bool | None) -> None:
        if done:
            self._free_slot()

    def abandon(self) -> None:
        """End a session that no caller has received, or detach it again if it was taken over.

        The store is updated in the background.
        """
        if self.over:
            return
        self._forget()
        contact = self.last_beat
        if self.known is None:
            self._life.stop_beating(self.slot)
        with contextlib.suppress(TenureError):  # other participants end it, when it is silent
            if self.known is None:
                self._engine.do_unasked(sessions.close, self.me, note=self._left)
            else:
                self._engine.do_unasked(sessions.detach, self.me, contact, note=self._left)

    def end(self, why: str) -> None:
        """The store says that it is over."""
        self._end(SessionExpired(f"the session on {self.path} is over: {why}", node=self.path))
        self._free_slot()

    def _end(self, error: SessionExpired) -> None:
        self._why_over = error
        self._forget()
        self.events.ended(error)

    def _forget(self) -> None:
        self.over = True
        self.look.set()
        self._engine.forget(self)

    def _free_slot(self) -> None:
        with contextlib.suppress(ValueError):  # the engine has been closed meanwhile
            self._life.free_slot(self.slot)

    def _check(self) -> None:
        if self.over:
            raise self._why_over or SessionExpired(
                f"the session on {self.path} is over", node=self.path
            )

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._do(
                nodes.create_semaphore,
                *(self.me, self.node, self.path, name, limit, data, exist_ok),
            )
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._do(nodes.update_semaphore, self.me, self.node, self.path, name, data)
        )

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        self._check()
        rules.check_name(name, self.path)
        await self._engine.wait(
            self._do(nodes.delete_semaphore, self.me, self.node, self.path, name, force)
        )

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        self._check()
        rules.check_name(name, self.path)
        return await self._engine.describe(self, name, owners=owners, waiters=waiters)

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
        self._check()
        rules.check_name(name, self.path)
        if self.known is not None:
            self.known.add(request_id)
        answer = self._do(
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
        if isinstance(answer, asyncio.Future):
            self.asked.add(request_id)
        return answer

    def _placed(
        self, request_id: int, name: str, timeout: float | None, answer: Enqueued | None
    ) -> None:
        self.asked.discard(request_id)
        if answer is not None and answer.place is Place.WAITING and not self.over:
            assert answer.order_id is not None
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
        self._check()
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
        self._check()
        if self.known is not None:
            self.known.discard(request_id)
        self._monitor.waits_no_more(self.id, request_id)
        return self._do(requests.withdraw, self.me, self.path, request_id)

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; returns the function that ends the watch."""
        self._check()
        rules.check_name(name, self.path)
        kinds = data * DATA | owners * OWNERS
        return self._engine.watches.add(self, (self.node, name), kinds, changed)
