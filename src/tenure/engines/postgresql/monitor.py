"""Monitor of the PostgreSQL engine: what has expired, what was missed, and a server that is silent.

A waiter's engine looks when its time is over, or the session of an owner would expire. Events
report everything else; a look from time to time is the net below them. Behind a pooler no event
arrives, and the monitor polls.

A server that does not answer is abandoned, unless another connection shows that it executes the
statement. Then the statement waits for a lock or a standby, and a new connection gains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tenure.background import BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.engines._kit.commands.operations import HANDED, OWNS, WAITING
from tenure.engines._kit.commands.polling import WaiterPolling
from tenure.engines._kit.commands.statements import Statement
from tenure.engines.postgresql import values
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.heartbeat import PostgresHeartbeat
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import Arguments, Call, Refusal
from tenure.engines.postgresql.watches import PostgresWatches

_TURN = 0.5
"""Seconds between two checks of the connection, at the most; they cost no statement."""
_SOON = 0.3
"""Seconds from a request that waits to the look that finds when it may be time for it."""
_NET = 10.0
"""Seconds between two looks at what an event should have reported."""
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
            self._engine.send(Call("tick", words, partial(self._looked, ())))

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
        self._engine.send(Call("tick", words, partial(self._looked, channels)))

    def _looked(self, channels: tuple[str, ...], reply: Any) -> None:
        if not isinstance(reply, dict):
            return
        self._engine.ticked(reply)
        if reply["due"] is not None:
            due: float = reply["due"]
            self.look_in(due + 0.01 if due > 0 else _GUARDED_PAUSE)
        if reply["pollers"]:
            self._polling.note_load(*reply["pollers"])
        self._watches.compare(channels, reply["seen"] or [])
