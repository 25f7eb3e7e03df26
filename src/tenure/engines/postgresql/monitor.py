"""Observation by the PostgreSQL engine: heartbeats, watches, expired sessions, silent servers.

**The monitor** (`PostgresMonitor`) looks when a waiter's time is over, or the session of an owner
would expire. Events report everything else; a look from time to time is the net below them. Behind
a pooler no event arrives, and the monitor polls.

A server that does not answer is abandoned, unless another connection shows that it executes the
statement. Then the statement waits for a lock or a standby, and a new connection gains nothing.

**Watches** (`PostgresWatches`) use notifications, and counters where those cannot be received. Each
queue counts its changes. The counters are compared when a watch begins, after a reconnect, and from
time to time, so that no change is missed: the store notifies of a queue for a limited time after a
look at it. A change that was notified is not reported again.

**The heartbeat thread** (`PostgresHeartbeat`) renews sessions over a connection of its own. The
connection is a direct one, if the URL names the database's own address. So leases last while the
transactions of others use up the pool of a pooler.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import psycopg
from psycopg import pq

from tenure.background import BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.engines._kit.commands.pipeline import HANDED, OWNS, WAITING, Statement
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.watchers import LocalWatches
from tenure.engines.postgresql import values
from tenure.engines.postgresql.connecting import (
    MIXED_UP,
    SETTINGS,
    connect_blocking,
    cut,
    new_mark,
    repeats,
)
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.polling import WaiterPolling
from tenure.engines.postgresql.session import PostgresSession, alive_in
from tenure.engines.postgresql.statements import Arguments, Call, Refusal, session_call
from tenure.engines.postgresql.url import PostgresUrl

_TIMEOUT = 2
_ACTIVITY = b"""
    SELECT CASE WHEN wait_event_type = 'Lock' THEN 'a lock of process '
            || coalesce(array_to_string(pg_blocking_pids(pid), ', '), '?')
        WHEN wait_event = 'SyncRep' THEN 'a synchronous standby'
        ELSE coalesce('the server (' || wait_event || ')', 'the server') END
    FROM pg_stat_activity
    WHERE pid = $1 AND state = 'active' AND wait_event_type IS DISTINCT FROM 'Client'"""
_RENEW = """
    SELECT {}.renew($1, $2, $4), $5::text FROM set_config('lock_timeout', '150ms', true)
    WHERE $1 OR NOT EXISTS (
        SELECT FROM pg_stat_activity WHERE usename = session_user AND wait_event = 'SyncRep'
            AND (pid = $3 OR clock_timestamp() - query_start > interval '1 s'))"""
"""Renews no session while commits wait for a synchronous standby: the renewal would wait too.

It waits for a lock no longer, because the thread examines the connection between two attempts.
"""
_LOCKED = b"55P03"


class PostgresHeartbeat(HeartbeatThread[PostgresSession]):
    """The heartbeat thread of one engine.

    Attributes:
        backend: number of the server's process for the engine's connection, or 0.
        epoch: of the store, at which the engine attached its sessions.
    """

    expected = (OSError, psycopg.Error)

    def __init__(
        self, address: PostgresUrl, clock: Clock, examined: Callable[[int, str], None]
    ) -> None:
        """Start without a thread and without a connection.

        Args:
            address: of the store.
            clock: of the engine.
            examined: called on the loop with a backend that executes a statement, and what the
                statement waits for.
        """
        super().__init__("tenure-postgresql-heartbeat", clock.now, f"heartbeats to {address.url}")
        self._address = address
        self._examined = examined
        self.backend = 0
        self.epoch = ""
        self._connection: psycopg.Connection[Any] | None = None

    def renew_now(self, requested: dict[PostgresSession, float]) -> None:
        """Renew these sessions, in the thread."""
        sessions = {each.id: each for each in requested if not each.over}
        if requested and not sessions:
            return
        if self._connection is None:
            self._connection = connect_blocking(self._address.direct, _TIMEOUT)
            pid = self._connection.pgconn.backend_pid
            self._connection.execute(SETTINGS, (pid,))
        connection = self._connection.pgconn
        backend = b"%d" % self.backend
        result = self._execute(connection, _ACTIVITY, [backend])
        if result.ntuples:
            waits_for = result.get_value(0, 0).decode()
            self._loop.call_soon_threadsafe(self._examined, int(backend), waits_for)
        if not sessions:
            return
        at, epoch = self._now(), self.epoch.encode()
        who = json.dumps([(each.id, each.token, each.held()) for each in sessions.values()])
        relaxed = b"t" if self._address.relaxed else b"f"
        sql = _RENEW.format(self._address.schema).encode()
        try:
            mark = new_mark()
            result = self._execute(connection, sql, [relaxed, who.encode(), backend, epoch, mark])
        except psycopg.errors.LockNotAvailable:
            for each in sessions.values():
                # At once: the lock may end just before the sessions do. A program that lives has
                # requested another renewal within half a window.
                if at - requested[each] < each.window / 2:
                    self.renew_again(each, requested[each])
            return
        if not result.ntuples:
            return
        if not repeats(result, mark):
            raise psycopg.OperationalError(MIXED_UP)
        alive = result.get_value(0, 0)
        if alive is None:
            raise psycopg.OperationalError("the store has lost data: the sessions are reattached")
        for number, missing in map(alive_in, json.loads(alive)):
            if not missing and not sessions[number].over:
                sessions[number].prove(at)

    def _execute(self, connection: Any, sql: bytes, parameters: list[bytes]) -> Any:
        """Run a statement that returns rows; a server that does not answer is an error."""
        connection.send_query_params(sql, parameters)
        connection.flush()
        found: Any = None
        while True:
            while connection.is_busy():
                if not select.select([connection.socket], [], [], _TIMEOUT)[0]:
                    raise TimeoutError("the server does not answer")
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                if found.error_field(pq.DiagnosticField.SQLSTATE) == _LOCKED:
                    raise psycopg.errors.LockNotAvailable(found.get_error_message())
                if found.status != pq.ExecStatus.TUPLES_OK:
                    raise psycopg.OperationalError(found.get_error_message())
                return found
            found = result

    def interrupt(self) -> None:
        """End what the connection reads."""
        connection = self._connection
        if connection is not None:
            cut(connection)

    def disconnect(self) -> None:
        """Close the connection of the thread."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


WATCH_CHANNEL = "tenure_q"
"""Beginning of the names of the channels on which changes are notified."""


class PostgresWatches(LocalWatches[PostgresSession]):
    """The watches of one engine. Iterates over the channels on which changes are notified.

    Args:
        send: sends a statement.
        listen: runs ``LISTEN`` or ``UNLISTEN`` where notifications are received.
        schema: of the store; equal names in other schemas are others.
    """

    def __init__(
        self,
        send: Callable[[Statement], None],
        listen: Callable[..., None],
        schema: str,
        now: Callable[[], float],
    ) -> None:
        super().__init__(self.listen_to, self._unlisten)
        self._send = send
        self._listen = listen
        self._schema = schema
        self._now = now
        self._queues: dict[str, _WatchedQueue] = {}  # by channel

    def watched(self) -> list[list[str]]:
        """Return node, name and channel of each watched queue."""
        return [[*self._queues[channel].place, channel] for channel in self]

    def begin(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        place = f"{self._schema} {session.path} {name}"
        digest = hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()
        channel = f"{WATCH_CHANNEL}{digest}"
        if channel not in self:
            self._queues[channel] = _WatchedQueue([session.path, values.to_text(name)])
        end = self.watch(channel, session, kinds, changed)
        begun = partial(self._begun, channel, self._now())
        self._send(session_call("watch", session, (values.to_text(name), channel), begun))
        return end

    def _begun(self, channel: str, sent_at: float, reply: Any) -> None:
        if channel in self and isinstance(reply, list) and isinstance(reply[0], int):
            queue = self._queues[channel]
            queue.counters = queue.counters or reply
            queue.notified_until = sent_at + _WATCHED

    def listen_to(self, channel: str) -> None:
        """Receive a channel's notifications; report what may have changed before."""
        self._listen(f"LISTEN {channel}", partial(self.report, channel, "b"))

    def _unlisten(self, channel: str) -> None:
        del self._queues[channel]
        self._listen(f"UNLISTEN {channel}")

    def report(self, channel: str, kind: str) -> None:
        """Report a change of a kind to the watches of a channel."""
        if channel in self:
            self._queues[channel].reported.add(kind)
        super().report(channel, kind)

    def report_all(self) -> None:
        """Report changes to all watches, because some may have been missed."""
        for queue in self._queues.values():
            queue.notified_until = 0.0  # another server may know older watches
        super().report_all()

    def compare(
        self,
        channels: tuple[str, ...],
        counters: list[list[Any]],
        notifies: list[float] | None,
        sent_at: float,
    ) -> bool:
        """Report the changes that the counters of the queues show, and that were not notified.

        Args:
            channels: of the queues.
            counters: number of each queue, of its changes of data, and of owners.
            notifies: seconds for which the changes of each queue are notified; ``None`` if that is
                unknown, or notifications are not received.
            sent_at: when the statement that reads the counters was sent.

        Returns:
            True if a change seems to be missing. Its notification may be on its way: it is reported
            if the next comparison shows it too, which should come soon.
        """
        doubted = False
        for number, (channel, now) in enumerate(zip(channels, counters, strict=False)):
            if channel not in self:
                continue
            queue = self._queues[channel]
            changed = _changed(queue.counters, now)
            # Of a queue with a new row, the store sends notifications only from now on.
            known = notifies is not None and self._now() < queue.notified_until
            notified = known and "b" not in changed
            queue.notified_until = sent_at + notifies[number] if notifies else 0.0
            if notified and "b" in queue.reported:
                changed.clear()
            elif notified:
                changed -= queue.reported
            queue.doubted = notified and bool(changed) and not queue.doubted
            if queue.doubted:
                doubted = True
                continue
            if queue.counters != now:
                queue.counters = now
                queue.reported.clear()
            for kind in sorted(changed):
                super().report(channel, kind)
        return doubted


@dataclass(slots=True)
class _WatchedQueue:
    """A watched queue, as far as it is known.

    Attributes:
        place: its node and name.
        counters: its number, and the numbers of its changes of data and of owners, as last read.
        reported: the kinds of changes that were reported since.
        doubted: whether a change seemed to be missing in the last comparison.
        notified_until: until when the store notifies of its changes.
    """

    place: list[str]
    counters: list[Any] | None = None
    reported: set[str] = field(default_factory=set)
    doubted: bool = False
    notified_until: float = 0.0


def _changed(before: list[Any] | None, now: list[Any]) -> set[str]:
    """Return the kinds of the changes between two readings of a queue's counters."""
    if before is None or before[0] != now[0]:
        return {"b"}
    return {kind for kind, at in (("d", 1), ("o", 2)) if before[at] != now[at]}


_TURN = 0.5
"""Seconds between two checks of the connection, at the most; they cost no statement."""
_SOON = 0.3
"""Seconds from a request that waits to the look that finds when it may be time for it."""
_NET = 10.0
"""Seconds between two looks at what an event should have reported."""
_WATCHED = 90.0
"""Seconds for which changes of a queue are notified after a watch has begun, in `functions.sql`."""
_LONGEST_NET = 40.0
"""The same behind a pooler, where other polls look at the waiters."""
_SWEEP = 60.0
_WATCH_POLL = 1.0
_MARGIN = 0.05
_GUARDED_PAUSE = 0.25
"""Seconds until an owner that has expired is looked at again: a transaction guards its lease."""


def look(
    requests: dict[PostgresSession, dict[int, int]], done: Callable[[bool], None] | None = None
) -> Call:
    """Return a look at requests of some sessions, as they are attached when this is sent.

    Args:
        requests: the requests of each session, with their states as they are known here; without
            any, the session itself is looked at.
        done: called after the sessions; true if a request was granted.
    """

    def args() -> Arguments:
        return ([[each.id, each.token, list(ids)] for each, ids in requests.items()],)

    def answered(reply: Any) -> None:
        replies = [reply] * len(requests) if isinstance(reply, Refusal) else reply
        granted = False
        for (session, states), each in zip(requests.items(), replies, strict=True):
            granted |= session.found(states, each)
        if done is not None:
            done(granted)

    return Call("look", args, answered)


class _Engine(Protocol):
    """The engine, as its monitor uses it."""

    clock: Clock
    channel: str
    connection: PostgresConnection | None
    heartbeat: PostgresHeartbeat

    def all_sessions(self) -> list[PostgresSession]: ...

    def send(self, statement: Statement) -> None: ...

    def longest_silence(self, timeout: float) -> float: ...

    def expire(self, sessions: list[int]) -> Statement: ...

    def ticked(self, reply: dict[str, Any]) -> None: ...


class PostgresMonitor:
    """The timer of one engine, which is open on the running loop.

    Args:
        engine: to look after.
        watches: of the engine.
        silence: seconds after which a server that does not answer is abandoned, at the most.
        failures: logs unexpected errors.
    """

    def __init__(
        self, engine: _Engine, watches: PostgresWatches, silence: float, failures: Failures
    ) -> None:
        self._engine = engine
        self._watches = watches
        self._silence = silence
        self._now = engine.clock.now
        self._timer = BackgroundTimer(asyncio.get_running_loop(), self._now, self._turn, failures)
        self._polling = WaiterPolling[PostgresSession](
            lambda requests, done: engine.send(look(requests, done)),
            engine.all_sessions,
            self._now,
            self._timer.by,
        )
        self._look_at = self._check_at = self._now() + _NET
        self._sweep_at = self._now() + _SWEEP

    def begin(self) -> None:
        """Look after a session that is new."""
        self._timer.by(self._now() + _TURN)

    def cancel(self) -> None:
        """Stop."""
        self._timer.cancel()

    @property
    def _polls(self) -> bool:
        connection = self._engine.connection
        return connection is not None and connection.listener is None

    def look_in(self, seconds: float) -> None:
        """Look in that time, or earlier."""
        self._look_at = min(self._look_at, self._now() + seconds)
        self._timer.by(self._look_at)

    def note_watch(self) -> None:
        """Look after a watch that is new."""
        self.begin()
        if self._polls:
            self.look_in(_WATCH_POLL)

    def note_waiter(self) -> None:
        """Look soon when an owner's session expires, or a request that waits."""
        if self._polls:
            self._polling.note_waiter()
            self.look_in(max(_SOON, self._polling.pause_of_looks))
        else:
            self.look_in(_SOON)

    def note_ahead(self, ahead: int) -> None:
        """Look again when a request with so many ahead of it may have been granted."""
        if self._polls:
            self._polling.note_ahead(ahead)

    def _turn(self) -> None:
        sessions = self._engine.all_sessions()
        if not sessions and not self._watches:
            return
        now = self._now()
        connection = self._engine.connection
        silence = self._engine.longest_silence(self._silence)
        if connection is not None:
            silent = connection.silent_for
            if silent > silence:
                pooled = connection.listener is not connection
                who = "the pooler, or the server behind it," if pooled else "the server"
                connection.drop(f"{who} does not answer")
            elif silent > silence / 3:
                self._examine(connection, sessions)
            elif not (silent and connection.trouble):  # more would wait behind it
                self._look_after(sessions, now)
        self._timer.by(min(now + min(_TURN, silence / 3), max(self._next(), now + 0.01)))

    def _next(self) -> float:
        return min(self._look_at, self._polling.at) if self._polls else self._look_at

    def _examine(self, connection: PostgresConnection, sessions: list[PostgresSession]) -> None:
        """Find out on another connection if the server executes the statement.

        Renew the sessions there whose renewals may wait behind the statement.
        """
        heartbeat = self._engine.heartbeat
        heartbeat.backend = connection.backend
        heartbeat.wake()
        for session in sessions:
            if session.awaits_proof:
                heartbeat.renew_again(session, session.renewed_at)

    def examined(self, backend: int, waits_for: str) -> None:
        """Keep a connection whose statement the server executes, however long that takes."""
        connection = self._engine.connection
        if connection is not None and connection.backend == backend:
            connection.note_blocked(waits_for)

    def _look_after(self, sessions: list[PostgresSession], now: float) -> None:
        overdue = [each.id for each in sessions if now > each.proven_at + each.window + _MARGIN]
        if overdue:
            self._engine.send(self._engine.expire(overdue))
        # What was deleted in the database is found within a window.
        shortest = min((each.window for each in sessions), default=_LONGEST_NET)
        net = min(_NET, shortest / 2)
        if now >= self._look_at:
            self._look_at = now + (min(_LONGEST_NET, shortest) if self._polls else net)
            self._look(sessions)
        if now >= self._check_at:
            self._check_at = now + net
            missed = (WAITING, HANDED, OWNS) if self._polls else (WAITING,)
            for session in sessions:
                session.look_up(missed)
        elif self._polls and now >= self._polling.at:
            self._polling.poll()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP
            words = self._engine.channel, None, None
            self._engine.send(Call("tick", words, partial(self._looked, (), now)))

    def _look(self, sessions: list[PostgresSession]) -> None:
        places = [
            [session.path, values.to_text(name)]
            for session in sessions
            for name in session.waiting_names()
        ]
        channels, watched = tuple(self._watches), self._watches.watched()
        if channels and self._polls:
            self.look_in(_WATCH_POLL)
        if not places and not watched:
            return
        places += [each[:2] for each in watched]
        all_places = [list(each) for each in sorted({(*each,) for each in places})]
        words = (self._engine.channel, all_places, watched or None)
        looked = partial(self._looked, channels, self._now())
        self._engine.send(Call("tick", words, looked))

    def _looked(self, channels: tuple[str, ...], sent_at: float, reply: Any) -> None:
        if not isinstance(reply, dict):
            return
        self._engine.ticked(reply)
        if reply["due"] is not None:
            due: float = reply["due"]
            self.look_in(due + 0.01 if due > 0 else _GUARDED_PAUSE)
        if reply["pollers"]:
            self._polling.note_load(*reply["pollers"])
        counters = reply["seen"] or []
        notifies = None if self._polls else reply.get("notifies")
        if self._watches.compare(channels, counters, notifies, sent_at):
            self.look_in(_SOON)
