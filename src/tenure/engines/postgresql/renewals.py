"""Renewals of the PostgreSQL engine: all that are due together are one statement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

from tenure.clock import Clock
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.heartbeat import PostgresHeartbeat
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import Argument, Call, Refusal, Statement

__all__ = ["Renewals"]

_log = logging.getLogger("tenure")

_EARLY = 6
"""Part of its recovery window after which a session is renewed with another one."""


class _Engine(Protocol):
    """The engine, as its renewals use it."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    relaxed: bool
    epoch: str
    connection: PostgresConnection | None
    heartbeat: PostgresHeartbeat

    @property
    def url(self) -> str: ...

    def send(self, statement: Statement) -> None: ...

    def lost_data(self) -> None: ...

    def all_sessions(self) -> Iterable[PostgresSession]: ...


class Renewal(Call):
    """Renewal of some sessions, as they are attached when this is sent."""

    __slots__ = ("_engine", "_sessions")

    def __init__(
        self,
        engine: _Engine,
        sessions: Collection[PostgresSession],
        answered: Callable[[Any], None],
    ) -> None:
        """Describe the call; `answered` receives the reply."""
        super().__init__("renew", (), answered)
        self._engine = engine
        self._sessions = sessions

    def args(self) -> tuple[Argument, ...]:
        """Return the arguments as of now."""
        who = [[each.id, each.token] for each in self._sessions]
        return self._engine.relaxed, who, self._engine.epoch


class Renewals:
    """The renewals of one engine."""

    def __init__(self, engine: _Engine) -> None:
        """Start with none that is due."""
        self._engine = engine
        self._due: dict[PostgresSession, float] = {}

    def add(self, session: PostgresSession) -> None:
        """Renew a session, with others that are added in this iteration of the loop.

        Without a connection, and while a statement cannot complete, the heartbeat thread renews it.
        """
        connection = self._engine.connection
        if connection is None or connection.trouble:
            self._engine.heartbeat.renew(session)
            return
        if not self._due:
            self._engine.loop.call_soon(self._send)
        self._due[session] = self._engine.clock.now()

    def _send(self) -> None:
        due, self._due = self._due, {}
        sessions = {each.id: each for each in due if not each.over}
        now = self._engine.clock.now()
        for each in self._engine.all_sessions():  # with those that are due soon, it is less often
            if not each.over and now - each.proven_at > each.window / _EARLY:
                sessions.setdefault(each.id, each)
        if sessions:
            answered = partial(self._answered, min(due.values()), sessions)
            self._engine.send(Renewal(self._engine, sessions.values(), answered))

    def _answered(self, at: float, sessions: dict[int, PostgresSession], reply: Any) -> None:
        if isinstance(reply, Refusal):
            _log.warning("sessions could not be renewed: url=%s error=%s", self._engine.url, reply)
            return
        if reply is None:
            self._engine.lost_data()
            return
        alive = set(reply)
        for number, session in sessions.items():
            if session.over:
                continue
            if number in alive:
                session.prove(at)
            else:
                session.probe()
