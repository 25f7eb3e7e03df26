"""Attaching of new sessions, and taking over of existing ones, as functions in the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tenure.core import rules
from tenure.engines._kit.commands.attaching import AttachEngine, Attaching, TakenOver
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.postgresql import values
from tenure.engines.postgresql.session import PostgresSession, PostgresSessionEngine
from tenure.engines.postgresql.statements import Call

__all__ = ["PostgresAttachEngine", "PostgresAttaching"]


class PostgresAttachEngine(PostgresSessionEngine, AttachEngine, Protocol):
    """The engine, as `PostgresAttaching` uses it."""


class PostgresAttaching(Attaching[PostgresSession]):
    """The attaching of one engine."""

    _engine: PostgresAttachEngine

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        words = (
            *(how.node, token, self._engine.channel, how.recovery_window),
            *(values.to_text(how.description), how.liveness),
            *(how.key.hex(), rules.SESSIONS_PER_NODE),
        )
        self._engine.send(Call("attach", words, answered))

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take a session over."""
        window = how.recovery_window if how.adopt else None
        place = (how.node, number, secret, self._engine.channel, how.key.hex())
        self._engine.send(Call("take_over", (*place, window), answered))

    def read_take_over(self, number: int, reply: Any) -> TakenOver:
        """Decode the reply to a takeover that succeeded."""
        _, token, window, text, mine = reply
        if mine is not None:  # the former attachment is one of this engine
            self._engine.push_all([f"T {number} {mine}"])
        return TakenOver(token, window, values.from_text(text))

    def new_session(
        self, how: Attach, events: SessionEvents, number: int, token: str, window: float
    ) -> PostgresSession:
        """Create the session that was attached."""
        return PostgresSession(self._engine, how, events, number, token, window)
