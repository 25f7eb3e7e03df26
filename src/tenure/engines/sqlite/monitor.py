"""Monitor of one engine: checks the waiters and those before them, and delivers the events.

A death is reported by the kernel (`ProcessWatch`) or by a socket without a receiver. A silent
session is detected only by a periodic check, the *tick*: twice a second while there are waiters or
watches here, once a second while there are sessions, else never. The tick also reads events whose
notification was lost, ends overdue waits, and notices missing files.

In portable mode there are no notifications: events are read every `POLL` seconds while there are
waiters, watches or takeovers here, and otherwise with the tick.

**Events** for the engine's sessions come from the file and from its own commits. All are delivered
on the loop, in order, and never from inside the operation that caused them. A grant may precede the
answer to its `enqueue`. Events of a session wait until its takeover is complete.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

from tenure.background import BackgroundQueue, BackgroundTimer, Failures
from tenure.engines.contract import Removal
from tenure.engines.sqlite import expiry, requests, schema, sessions
from tenure.engines.sqlite.expiry import Attachment, over_among, standing_before
from tenure.engines.sqlite.notifier import ProcessWatch
from tenure.engines.sqlite.participants import describe_quarantine, end_quarantine, reap
from tenure.engines.sqlite.session import SqliteSession
from tenure.engines.sqlite.store import Store, log
from tenure.engines.sqlite.transaction import (
    ACKNOWLEDGED,
    CHANGED_DATA,
    CHANGED_OWNERS,
    DATA,
    DELETED,
    ENDED,
    EVICTED,
    GRANTED,
    OWNERS,
    RESIZED,
    TAKEN_OVER,
    TIMED_OUT,
    Messages,
    Progress,
    Push,
    Transaction,
)
from tenure.engines.sqlite.watches import Name, SqliteWatches
from tenure.errors import EngineError, EngineUnavailable, TenureError

_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_KINDS = {CHANGED_DATA: DATA, CHANGED_OWNERS: OWNERS}


class EventDelivery:
    """Delivery of events to the sessions of one engine.

    Args:
        acknowledge: called with an attachment that was taken over, and has already ended here.
    """

    def __init__(
        self,
        store: Store,
        watches: SqliteWatches,
        acknowledge: Callable[[Attachment], None],
    ) -> None:
        self.sessions: dict[int, SqliteSession] = {}
        self._watches = watches
        self._store = store
        self._acknowledge = acknowledge
        self._pushes: BackgroundQueue[Push] = BackgroundQueue(
            store.loop,
            store.clock.now,
            self._deliver,
            Failures(f"delivering events of {store.address.url}", log),
        )
        self._last = 0

    def read(self, tx: Transaction) -> int:
        """Read the events that other participants have written for this engine; return how many."""
        if not tx.participant:
            return 0
        rows = tx.execute(
            "SELECT id, kind, session, hold, order_id, why, node, name FROM news "
            "WHERE participant = ? AND id > ? ORDER BY id",
            (tx.participant, self._last),
        ).fetchall()
        if rows:
            self.pass_on(
                [
                    (kind, session, request_id, order_id, why)
                    if name is None
                    else (kind, node, 0, None, name)
                    for _, kind, session, request_id, order_id, why, node, name in rows
                ]
            )
            self._last = self._store.tx.events_read = rows[-1][0]
        return len(rows)

    def pass_on(self, pushes: list[Push]) -> None:
        """Deliver events to the sessions, soon."""
        self._pushes.put(pushes)

    def _deliver(self, push: Push) -> None:
        kind, number, request_id, order_id, why = push
        if kind in _KINDS:
            self._watches.changed((number, why), _KINDS[kind])
            return
        session = self.sessions.get(number)
        if kind == TAKEN_OVER:
            self._supersede(session, (number, request_id))
        elif session is None:
            return
        elif kind == ENDED:
            session.end(why)
        elif kind == ACKNOWLEDGED:
            session.recheck.set()
        elif session.early is not None:
            session.early.append(partial(self.pass_on, [push]))
        elif request_id not in session.requests:
            return
        elif kind == GRANTED:
            session.granted(request_id, order_id)
        elif kind == RESIZED:
            assert order_id is not None
            session.removed(request_id, Removal.resized(order_id))
        else:
            session.removed(request_id, _REMOVALS[kind])

    def _supersede(self, session: SqliteSession | None, former: Attachment) -> None:
        if session is not None and session.attach_number <= former[1]:
            session.superseded()
        else:  # that attachment has already ended here
            self._acknowledge(former)


POLL = 0.02
"""Seconds between two readings of the events in portable mode."""

STALL = 1.0
"""Seconds after which a process that keeps the turn is reported."""

SLOW = 0.5
"""Seconds after which a wait for the turn is reported as the reason of a timeout."""

_TICK = 1.0
_TICK_WAITING = 0.5
_FIRST_LOOK = 0.02  # most waits have ended by then, and need no check
_NAMES = 64  # checked in one tick
_OTHERS = 0.1  # seconds that the program of an overdue waiter has for ending the wait itself
_REQUESTS = 256  # of each

_Waiter = tuple[int, int]  # a session, and a request of it


class Monitor:
    """The monitor of one engine, on its loop.

    Args:
        acknowledge: the function for the delivery.

    Attributes:
        takeovers: ids of the sessions that this engine is taking over.
    """

    def __init__(
        self, store: Store, watches: SqliteWatches, acknowledge: Callable[[Attachment], None]
    ) -> None:
        self.delivery = EventDelivery(store, watches, acknowledge)
        self._watches = watches
        self._store = store
        self._processes = ProcessWatch(store.loop, self._died)
        self._waiting: dict[_Waiter, tuple[Name, int]] = {}
        self._checks: dict[_Waiter, float] = {}  # when to check its deadline next
        self._deadlines: list[tuple[float, _Waiter]] = []
        self.takeovers: list[int] = []
        self._next_name = 0
        self._cursors: dict[Name, int] = {}
        self._reaping = False
        self._silence_due = float("-inf")
        self._failures = Failures(f"checking the waiters on {store.address.url}", log)
        self._timer = BackgroundTimer(store.loop, store.clock.now, self._tick, self._failures)
        reading = Failures(f"reading the events on {store.address.url}", log)
        self._reading = BackgroundTimer(store.loop, store.clock.now, self._read_events, reading)
        polling = Failures(f"polling for events on {store.address.url}", log)
        self._polling = BackgroundTimer(store.loop, store.clock.now, self._poll, polling)
        self._stall_reported: float | None = None
        self._marked_until = float("-inf")

    def stop(self) -> None:
        """End."""
        self._timer.cancel()
        self._reading.cancel()
        self._polling.cancel()
        self._waiting.clear()
        self._processes.clear()

    # Notifications

    def committed(self, messages: Messages) -> None:
        """Send the messages of a commit to sessions here and to other participants."""
        store = self._store
        self.delivery.pass_on(messages.pushes)
        with self._failures.contained():  # others read the file at their next tick
            self.notify(messages)
            if messages.recipients:
                store.loop.call_soon(self._reap_dead, messages.recipients)
        for participant in messages.removed:
            with self._failures.contained():
                store.lives.remove(participant)
                self._processes.forget(participant)

    def notify(self, messages: Messages) -> None:
        """Notify the recipients of a commit; those without a receiver remain. On any thread."""
        messages.recipients = set(self._store.notifier.notify(messages.recipients))

    def notified(self) -> None:
        """Read the events, after a notification."""
        self._reading.run()

    def _read_events(self) -> None:
        with self._store.reading() as tx:
            self.delivery.read(tx)

    def keep_polling(self) -> None:
        """Poll for events while there is something to wait for, in portable mode."""
        if self._store.place.portable and self._watches_others:
            self._polling.by(self._store.clock.now() + POLL)

    def _poll(self) -> None:
        self.keep_polling()
        self._read_events()

    def waits(
        self, session: int, request_id: int, name: Name, order_id: int, deadline: float | None
    ) -> None:
        """Add a waiting request."""
        if not self._waiting:
            self.tick_by(self._store.clock.now() + _FIRST_LOOK)
        self._waiting[session, request_id] = (name, order_id)
        self.keep_polling()
        if deadline is not None:
            self.waits_until(session, request_id, deadline)

    def waits_until(self, session: int, request_id: int, deadline: float) -> None:
        """Check a request at its possible deadline, if it waits; the store has the actual one.

        Only the next check is scheduled; that check schedules the following one.
        """
        waiter = (session, request_id)
        if waiter not in self._waiting or self._checks.get(waiter, math.inf) <= deadline:
            return
        self._checks[waiter] = deadline
        heappush(self._deadlines, (deadline, waiter))
        if len(self._deadlines) > 2 * len(self._checks) + 100:
            self._deadlines = [(when, each) for each, when in self._checks.items()]
            heapify(self._deadlines)
        self.tick_by(deadline)

    def waits_no_more(self, session: int, request_id: int) -> None:
        """Remove a request that no longer waits."""
        waited = self._waiting.pop((session, request_id), None) is not None
        self._checks.pop((session, request_id), None)
        if waited and not self._waiting:
            self._cursors.clear()
            self._deadlines.clear()
            if not self._watches_others:
                self._processes.clear()

    @property
    def _watches_others(self) -> bool:
        """True if the death of other participants matters here."""
        return bool(self._waiting or self._watches or self.takeovers)

    def remaining(self, session: SqliteSession) -> float:
        """Renew a session that is being taken over.

        Returns:
            The seconds for which a former attachment may still consider a lease held.
        """
        session.keep()
        self.keep_polling()
        with self._store.reading() as tx:
            until = sessions.held_until(tx, session.id, session.window, self._watch_process)
            return until - tx.now

    def adopt(self, session: SqliteSession) -> None:
        """Add an attachment, superseding one of the same session through this engine."""
        former = self.delivery.sessions.get(session.id)
        if former is not None:
            former.superseded()
        self.delivery.sessions[session.id] = session

    def forget(self, session: SqliteSession) -> None:
        """Remove an attachment that has ended."""
        if self.delivery.sessions.get(session.id) is session:
            del self.delivery.sessions[session.id]
            for request_id in session.requests:
                self.waits_no_more(session.id, request_id)

    # The tick

    def tick_by(self, due: float) -> None:
        """Tick at that time at the latest."""
        self._timer.by(due)

    def keep_ticking(self) -> None:
        """Tick soon, because an operation was deferred or a session attached."""
        if not self._timer.armed:
            self.tick_by(self._store.clock.now() + _TICK_WAITING)

    def _tick(self) -> None:
        store = self._store
        now = store.clock.now()
        try:
            self._check(now)
        except EngineError as error:
            if error.__cause__ is None or not schema.is_damage(error.__cause__):
                raise
            self._end_all(str(error), now)
        finally:
            busy = not store.committer.idle
            present = store.place.portable and store.life is not None
            if self.delivery.sessions or busy or store.marks.marked or present:
                waiting = self._waiting or self._watches or busy
                self.tick_by(now + (_TICK_WAITING if waiting else _TICK))
                if self._deadlines:
                    self.tick_by(max(now, self._deadlines[0][0]))
                if waiting and store.tx.quarantined_until > now:
                    self.tick_by(store.tx.quarantined_until)

    def _check(self, now: float) -> None:
        self._report_stall(now)
        if self._store.life is not None:
            with self._failures.contained():
                self._store.life.show_presence(now)
        if self._are_files_in_place() and self._store.tx.ready:  # else nothing waits for anything
            recorded = self._store.turn.recorded
            with self._store.reading() as tx:
                if missing := schema.missing(tx.connection):
                    why = f"{self._store.address.path} cannot be used: {missing}"
                    for session in list(self.delivery.sessions.values()):
                        session.end(why)
                    return
                if self._is_set_back(tx, recorded):
                    return
                if late := self.delivery.read(tx):
                    url = self._store.address.url
                    log.debug("events read without a notification: url=%s count=%d", url, late)
                participants, silent = self._find_suspects(tx, now)
                overdue = self._find_overdue(tx, now)
                self._compare(tx, now)
                damaged = self._find_damaged(tx, now)
            self._reap(participants, silent + self._own_silent(now))
            if overdue:
                self._do(requests.time_out)
            if damaged:
                self._do(requests.mend, damaged)
            if 0 < self._store.tx.quarantined_until <= now:
                self._do(end_quarantine)

    def _report_stall(self, now: float) -> None:
        since = self._store.committer.stalled_since
        if since is None or now - since < STALL or since == self._stall_reported:
            return
        self._stall_reported = since
        url = self._store.address.url
        log.warning("nothing is granted, no lease is lost: url=%s error=%s", url, self.stall(now))

    def stall(self, now: float) -> str:
        """Describe the process that keeps the turn; empty if there is no wait for the turn."""
        since = self._store.committer.stalled_since
        if since is None:
            return ""
        return (
            f"process {self._store.turn.holder or '(unknown)'} has kept the turn at "
            f"{self._store.address.path} "
            f"for {now - since:.1f} s (is it stopped? check its state with ps, continue it with "
            "kill -CONT, or end it)"
        )

    def trouble(self, now: float) -> TenureError | None:
        """Return the error for a stall that outlasts a commit, else for the quarantine."""
        since = self._store.committer.stalled_since
        if since is not None and now - since >= SLOW:
            return EngineUnavailable(self.stall(now))
        left = self._store.tx.quarantined_until - now
        return (
            EngineError(describe_quarantine(self._store.address.path, left)) if left > 0 else None
        )

    def _are_files_in_place(self) -> bool:
        """Return true if all files are in place; if not, end all sessions."""
        why = ""
        try:
            self._store.check_in_place()
        except EngineError as error:
            why = str(error)
            self._end_all(why, self._store.clock.now())
        return not why

    def _is_set_back(self, tx: Transaction, recorded: Progress | None) -> bool:
        """Return true if a backup was put over the store; if so, end all sessions."""
        found = schema.progress(tx.connection)
        if found is None or not self._store.tx.joined:
            return False
        try:
            tx.check_progress(found, recorded)
        except EngineError as error:
            self._end_all(str(error), self._store.clock.now())
            return True
        return False

    def _end_all(self, why: str, now: float) -> None:
        """End all sessions, and then let programs with other files join.

        A session of liveness ``window`` may belong to a client of a server, which considers its
        leases held until the window has passed.
        """
        sessions = list(self.delivery.sessions.values())
        if sessions:
            log.error("all sessions have ended: url=%s error=%s", self._store.address.url, why)
        for session in sessions:
            if session.survives_process:
                self._marked_until = max(self._marked_until, session.proven_until)
            session.end(why)
        self._store.stop_using_files(why)
        if self._marked_until <= now:
            self._store.clear_marks()

    def _find_overdue(self, tx: Transaction, now: float) -> bool:
        """Return true if a deadline has passed: of a waiter here, or one left to others."""
        first = expiry.earliest(tx)
        late = first is not None and first + _OTHERS <= now
        while self._deadlines and self._deadlines[0][0] <= now:
            noted, waiter = heappop(self._deadlines)
            if self._checks.get(waiter) != noted:
                continue
            del self._checks[waiter]
            deadline = expiry.deadline_of(tx, *waiter)
            if deadline is not None and deadline <= now:
                late, deadline = True, now + _TICK_WAITING  # in case the store fails
            if deadline is not None:
                self.waits_until(*waiter, deadline)
        return late

    def _compare(self, tx: Transaction, now: float) -> None:
        """Compare sessions with the store, each three times in its window.

        A heartbeat does not read the store. What has been deleted there by hand is reported after
        the events that have been read, which may have another reason for it.
        """
        for session in self.delivery.sessions.values():
            if now - session.looked_at >= session.window / 3 and session.early is None:
                session.looked_at = now
                found = expiry.requests_of(tx, session.me)
                if found is None:
                    why = "its record was deleted in the store"
                    self._store.loop.call_soon(session.end, why)
                elif missing := session.missing_in(found):
                    self._store.loop.call_soon(session.lapsed, missing)

    def _find_damaged(self, tx: Transaction, now: float) -> list[Name]:
        """Return the queues here of which records were deleted by hand."""
        if self._store.tx.quarantined_until > now:
            return []
        names = list({name for name, _ in self._waiting.values()})
        return [each for each in names[:_NAMES] if expiry.damage(tx, *each)]

    def _do(self, work: Any, *args: Any) -> asyncio.Future[Any] | None:
        answer = self._store.committer.do(work, *args)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(self._done)
            return answer
        return None

    def _done(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and isinstance(error := answer.exception(), Exception):
            self._failures.report(error)

    # Dead participants and silent sessions

    def _own_silent(self, now: float) -> list[int]:
        """Return the sessions of this engine that were not renewed in time."""
        if now < self._silence_due:
            return []
        found = []
        due = now + 60.0
        for session in self.delivery.sessions.values():
            until = session.proven_until
            if until < now:
                found.append(session.id)
            else:
                due = min(due, until)
        self._silence_due = due
        return found

    def expect_silence(self, at: float) -> None:
        """Check at that time for a silent session of this engine."""
        self._silence_due = min(self._silence_due, at)

    def _find_suspects(self, tx: Transaction, now: float) -> tuple[list[int], list[int]]:
        """Check the sessions before our waiters, and the owners of watched semaphores."""
        names: dict[Name, int] = {}
        for name, order_id in self._waiting.values():
            names.setdefault(name, order_id)
        for name in self._watches:
            if self._watches.kinds(name) & OWNERS:
                names.setdefault(name, expiry.END)
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
            deadline = expiry.unattended(tx, *name)
            if deadline is not None and deadline + _OTHERS > now:
                self.tick_by(deadline + _OTHERS)
        return over_among(tx, suspects)

    def _before(self, tx: Transaction, name: Name, order_id: int) -> list[tuple[Any, ...]]:
        """Return some sessions before a place: first the nearest, then those further away."""
        below = min(order_id, self._cursors.pop(name, order_id))
        rows = standing_before(tx, *name, below, _REQUESTS)
        if len(rows) == _REQUESTS:
            self._cursors[name] = rows[-1][0]
        return [row[1:] for row in rows if row[3] != tx.participant]

    def _watch_process(self, tx: Transaction, participant: int | None) -> None:
        """Watch a participant's process, if there is one."""
        if self._store.place.portable:  # a process id proves nothing there
            return
        if participant is not None and participant not in self._processes:
            row = tx.execute(
                "SELECT pid, started FROM participants WHERE id = ?", (participant,)
            ).fetchone()
            if row is not None:
                self._processes.watch(participant, *row)

    def _died(self, participant: int, pause: float = 0.005) -> None:
        """Check a participant whose process has ended; a child may keep its lock for a while."""
        if self._watches_others and not self._reap_dead([participant]) and pause < _TICK_WAITING:
            self._store.loop.call_later(pause, self._died, participant, 2 * pause)

    def _reap_dead(self, participants: Iterable[int]) -> bool:
        """End the dead ones; return true if there were any."""
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
            answer = self._do(reap, participants, silent)
            if answer is not None:
                self._reaping = True
                answer.add_done_callback(self._reaped)

    def _reaped(self, _answer: asyncio.Future[Any]) -> None:
        self._reaping = False
