"""Monitor of one engine: it looks after the waiters, and after the sessions before them.

A death is reported by the kernel (`Deathwatch`) or shows as an unanswered bell. A silent session
can only be found by looking. So there is a tick: twice a second while something waits here or is
watched, once while there are sessions, and none otherwise. It is the net under everything: it
reads the news, ends the waits that have lasted long enough, and notices when the files are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from tenure.background import BackgroundTimer, Failures
from tenure.engines.sqlite import over, quarantine, requests, sessions, takeover
from tenure.engines.sqlite.bell import Deathwatch
from tenure.engines.sqlite.news import Newsroom
from tenure.engines.sqlite.over import Attachment, over_among, standing_before
from tenure.engines.sqlite.session import SqliteSession
from tenure.engines.sqlite.store import Store, log
from tenure.engines.sqlite.transaction import OWNERS, Push, Told, Transaction
from tenure.engines.sqlite.watches import Name, SqliteWatches
from tenure.errors import EngineError, EngineUnavailable, TenureError

__all__ = ["STALL", "Monitor"]

STALL = 1.0
"""Seconds after which a process has kept the turn for too long."""

SLOW = 0.5
"""Seconds after which a wait for the turn is the reason that nothing was granted in time."""

_TICK = 1.0
_TICK_WAITING = 0.5
_FIRST_LOOK = 0.02  # most waits are over by then, and need no look
_NAMES = 64  # looked at in one go
_OTHERS = 0.1  # seconds that the program of an overdue waiter has for ending the wait itself
_REQUESTS = 256  # of each
_BELIEF = 0.5
"""Seconds between two looks at former attachments, at the most."""


_Waiter = tuple[int, int]  # a session, and a request of it


class Monitor:
    """The monitor of one engine, on its loop.

    Args:
        acknowledge: the newsroom's.
    """

    def __init__(
        self, store: Store, watches: SqliteWatches, acknowledge: Callable[[Attachment], None]
    ) -> None:
        """Start without waiters."""
        self.newsroom = Newsroom(store, watches, self.waits_no_more, acknowledge)
        self._watches = watches
        self._store = store
        self._deathwatch = Deathwatch(store.loop, self._died)
        self._waiting: dict[_Waiter, tuple[Name, int]] = {}
        self._waiting_of: dict[int, set[int]] = {}  # the holds of a session that wait
        self._looked_at: dict[_Waiter, float] = {}  # whose time may be over, and when next
        self._deadlines: list[tuple[float, _Waiter]] = []
        self._taking_over: set[SqliteSession] = set()
        self._next_name = 0
        self._cursors: dict[Name, int] = {}
        self._reaping = False
        self._silence_due = float("-inf")
        self._failures = Failures(f"looking after the waiters on {store.address.url}", log)
        self._timer = BackgroundTimer(store.loop, store.clock.now, self._tick, self._failures)
        self._news = BackgroundTimer(store.loop, store.clock.now, self._read_news, self._failures)
        self._stall_reported: float | None = None

    def stop(self) -> None:
        """End."""
        self._timer.cancel()
        self._news.cancel()
        self._waiting.clear()
        self._waiting_of.clear()
        self._deathwatch.clear()

    # What it is told

    def tell(self, told: Told) -> None:
        """Pass on the messages of a commit, here and to other participants."""
        store = self._store
        self.newsroom.pass_on(told.pushes)
        with self._failures.contained():  # others read the file at their next tick
            unanswered = store.bell.ring(told.rings)
            if unanswered:
                store.loop.call_soon(self._look_at, unanswered)
        for participant in told.buried:
            with self._failures.contained():
                store.lives.remove(participant)
                self._deathwatch.forget(participant)

    def answered(self) -> None:
        """Deliver the messages that have waited for the answers before them."""
        self.newsroom.answered()

    def pass_on(self, pushes: list[Push]) -> None:
        """Deliver what was pushed to the sessions, soon."""
        self.newsroom.pass_on(pushes)

    def rung(self) -> None:
        """Read the news, after a notification."""
        self._news.run()

    def _read_news(self) -> None:
        with self._store.reading() as tx:
            self.newsroom.read(tx)

    def waits(
        self, session: int, request_id: int, name: Name, order_id: int, deadline: float | None
    ) -> None:
        """A request waits."""
        if not self._waiting:
            self.tick_by(self._store.clock.now() + _FIRST_LOOK)
        self._waiting[session, request_id] = (name, order_id)
        self._waiting_of.setdefault(session, set()).add(request_id)
        if deadline is not None:
            self.waits_until(session, request_id, deadline)

    def waits_until(self, session: int, request_id: int, deadline: float) -> None:
        """A request may have been given a time, if it waits. The store knows whether it was.

        Only the next look is noted, and that finds out about the one after it.
        """
        waiter = (session, request_id)
        if waiter not in self._waiting or self._looked_at.get(waiter, math.inf) <= deadline:
            return
        self._looked_at[waiter] = deadline
        heappush(self._deadlines, (deadline, waiter))
        if len(self._deadlines) > 2 * len(self._looked_at) + 100:
            self._deadlines = [(when, each) for each, when in self._looked_at.items()]
            heapify(self._deadlines)
        self.tick_by(deadline)

    def waits_no_more(self, session: int, request_id: int) -> None:
        """A request waits no more, if it did."""
        waited = self._waiting.pop((session, request_id), None) is not None
        self._looked_at.pop((session, request_id), None)
        if waited:
            holds = self._waiting_of[session]
            holds.remove(request_id)
            if not holds:
                del self._waiting_of[session]
        if waited and not self._waiting:
            self._cursors.clear()
            self._deadlines.clear()
            if not self._looks:
                self._deathwatch.clear()

    @property
    def _looks(self) -> bool:
        """True if the death of other participants matters here."""
        return bool(self._waiting or self._watches or self._taking_over)

    async def wait_for_former(self, session: SqliteSession) -> None:
        """Return when no attachment before this one can still consider anything held.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        self._taking_over.add(session)
        try:
            while True:
                session.keep()
                session.look.clear()
                with self._store.reading() as tx:
                    where = (session.id, session.window)
                    wait = takeover.believed_until(tx, *where, self._watch_process) - tx.now
                if wait < 0:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait + 0.001, _BELIEF, session.window / 3)):
                        await session.look.wait()
        finally:
            self._taking_over.discard(session)

    def adopt(self, session: SqliteSession) -> None:
        """An attachment; one of the same session through this very engine is superseded."""
        former = self.newsroom.sessions.get(session.id)
        if former is not None:
            former.superseded()
        self.newsroom.sessions[session.id] = session

    def forget(self, session: SqliteSession) -> None:
        """An attachment is over."""
        if self.newsroom.sessions.get(session.id) is session:
            del self.newsroom.sessions[session.id]
            for request_id in tuple(self._waiting_of.get(session.id, ())):
                self.waits_no_more(session.id, request_id)

    # The tick

    def tick_by(self, due: float) -> None:
        """See to it that the next tick is not later than that."""
        self._timer.by(due)

    def keep_ticking(self) -> None:
        """Something is under way."""
        if not self._timer.armed:
            self.tick_by(self._store.clock.now() + _TICK_WAITING)

    def _tick(self) -> None:
        store = self._store
        now = store.clock.now()
        try:
            self._look(now)
        finally:
            busy = not store.committer.idle
            if self.newsroom.sessions or busy:
                waiting = self._waiting or self._watches or busy
                self.tick_by(now + (_TICK_WAITING if waiting else _TICK))
                if self._deadlines:
                    self.tick_by(max(now, self._deadlines[0][0]))
                if waiting and store.tx.quarantined_until > now:
                    self.tick_by(store.tx.quarantined_until)

    def _look(self, now: float) -> None:
        self._report_stall(now)
        if self._are_files_in_place():
            with self._store.reading() as tx:
                self.newsroom.read(tx)
                participants, silent = self._look_around(tx, now)
                somebody_is_late = self._look_at_deadlines(tx, now)
            self._reap(participants, silent + self._own_silent(now))
            if somebody_is_late:
                self._do(requests.time_out)
            if 0 < self._store.tx.quarantined_until <= now:
                self._do(quarantine.end)

    def _report_stall(self, now: float) -> None:
        since = self._store.committer.stalled_since
        if since is None or now - since < STALL or since == self._stall_reported:
            return
        self._stall_reported = since
        log.warning("%s; nothing is granted meanwhile, and no lease is lost", self.stall(now))

    def stall(self, now: float) -> str:
        """Describe the process that keeps the turn; empty if there is no wait for the turn."""
        since = self._store.committer.stalled_since
        if since is None:
            return ""
        return (
            f"process {self._store.turn.holder} has kept the turn at {self._store.address.path} "
            f"for {now - since:.1f} s (is it stopped? see its state with ps, continue it with "
            "kill -CONT, or end it)"
        )

    def trouble(self, now: float) -> TenureError | None:
        """The stall, when it has lasted for longer than a commit takes; or else the quarantine."""
        since = self._store.committer.stalled_since
        if since is not None and now - since >= SLOW:
            return EngineUnavailable(self.stall(now))
        left = self._store.tx.quarantined_until - now
        return (
            EngineError(quarantine.describe(self._store.address.path, left)) if left > 0 else None
        )

    def _are_files_in_place(self) -> bool:
        """Return whether database and liveness file are in place; if not, end all sessions."""
        why = ""
        try:
            self._store.tx.check_in_place()
        except EngineError as error:
            why = str(error)
        life = self._store.life
        if not why and life is not None and not life.in_place:
            why = f"{life.path} was removed while in use"
        if why:
            for session in list(self.newsroom.sessions.values()):
                session.end(why)
        return not why

    def _look_at_deadlines(self, tx: Transaction, now: float) -> bool:
        """Return whether a deadline has passed: of a waiter here, or one left to others."""
        first = over.earliest(tx)
        late = first is not None and first + _OTHERS <= now
        while self._deadlines and self._deadlines[0][0] <= now:
            noted, waiter = heappop(self._deadlines)
            if self._looked_at.get(waiter) != noted:
                continue
            del self._looked_at[waiter]
            deadline = over.deadline_of(tx, *waiter)
            if deadline is not None and deadline <= now:
                late, deadline = True, now + _TICK_WAITING  # should the store fail
            if deadline is not None:
                self.waits_until(*waiter, deadline)
        return late

    def _do(self, work: Any, *args: Any) -> asyncio.Future[Any] | None:
        answer = self._store.committer.do(work, *args)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(self._done)
            return answer
        return None

    def _done(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and isinstance(error := answer.exception(), Exception):
            self._failures.report(error)

    # The dead and the silent

    def _own_silent(self, now: float) -> list[int]:
        """Those of this engine's sessions that were not renewed in time."""
        if now < self._silence_due:
            return []
        found = []
        due = now + 60.0
        for session in self.newsroom.sessions.values():
            until = session.proven_until
            if until < now:
                found.append(session.id)
            else:
                due = min(due, until)
        self._silence_due = due
        return found

    def expect_silence(self, at: float) -> None:
        """A session that may be silent at that time."""
        self._silence_due = min(self._silence_due, at)

    def _look_around(self, tx: Transaction, now: float) -> tuple[list[int], list[int]]:
        """Look at those who stand before our waiters, and at the owners of what we watch."""
        names: dict[Name, int] = {}
        for name, order_id in self._waiting.values():
            names.setdefault(name, order_id)
        for name in self._watches:
            if self._watches.kinds(name) & OWNERS:
                names.setdefault(name, over.END)
        chosen = list(names.items())
        if len(chosen) > _NAMES:
            first = self._next_name % len(chosen)
            self._next_name = first + _NAMES
            chosen = (chosen + chosen)[first : first + _NAMES]
        suspects = {
            suspect for name, order_id in chosen for suspect in self._before(tx, name, order_id)
        }
        for suspect in suspects:
            self._watch_process(tx, suspect[2])
        for name, _ in chosen:
            deadline = over.unattended(tx, *name)
            if deadline is not None and deadline + _OTHERS > now:
                self.tick_by(deadline + _OTHERS)
        return over_among(tx, suspects)

    def _before(self, tx: Transaction, name: Name, order_id: int) -> list[tuple[Any, ...]]:
        """Some of the sessions before a place: the nearest, and the next time those farther off."""
        below = min(order_id, self._cursors.pop(name, order_id))
        rows = standing_before(tx, *name, below, _REQUESTS)
        if len(rows) == _REQUESTS:
            self._cursors[name] = rows[-1][0]
        return [row[1:] for row in rows if row[3] != tx.participant]

    def _watch_process(self, tx: Transaction, participant: int | None) -> None:
        """Hear of a participant's death, if there is one."""
        if participant is not None and participant not in self._deathwatch:
            row = tx.execute(
                "SELECT pid, started FROM participants WHERE id = ?", (participant,)
            ).fetchone()
            if row is not None:
                self._deathwatch.watch(participant, *row)

    def _died(self, participant: int, pause: float = 0.005) -> None:
        """A process has ended; what it started may still keep its lock, for a little while."""
        if self._looks and not self._look_at([participant]) and pause < _TICK_WAITING:
            self._store.loop.call_later(pause, self._died, participant, 2 * pause)

    def _look_at(self, participants: Iterable[int]) -> bool:
        """End those who are dead, if any is."""
        dead: list[int] = []
        with self._failures.contained():
            try:
                dead = [each for each in participants if self._store.lives.is_dead(each)]
                self._reap(dead, [])
            except Exception:
                self.keep_ticking()
                raise
        return bool(dead)

    def _reap(self, participants: list[int], silent: list[int]) -> None:
        if (participants or silent) and not self._reaping:
            answer = self._do(sessions.reap, participants, silent)
            if answer is not None:
                self._reaping = True
                answer.add_done_callback(self._reaped)

    def _reaped(self, _answer: asyncio.Future[Any]) -> None:
        self._reaping = False
