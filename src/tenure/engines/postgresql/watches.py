"""Watches of the PostgreSQL engine: notifications, and counters where those cannot be received.

Each queue counts its changes. The counters are compared when a watch begins, after a reconnect, and
from time to time, so that no change is missed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from tenure.engines._kit.watchers import LocalWatch, Watchers
from tenure.engines.postgresql import values
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import SessionCall, Statement

__all__ = ["PostgresWatches"]


class _Engine(Protocol):
    """The engine, as its watches use it."""

    def send(self, statement: Statement) -> None: ...

    def listen(self, sql: str) -> None: ...


class PostgresWatches:
    """The watches of one engine.

    Args:
        engine: sends statements.
        schema: of the store; equal names in other schemas are others.
    """

    def __init__(self, engine: _Engine, schema: str) -> None:
        """Start without watches."""
        self._engine = engine
        self._schema = schema
        self._watchers: Watchers[str, PostgresSession, LocalWatch[PostgresSession]] = Watchers()
        self._places: dict[str, list[str]] = {}  # node and name of each channel
        self._counters: dict[str, Any] = {}

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels on which changes are notified."""
        return tuple(self._watchers)

    def watched(self) -> list[list[str]]:
        """Return node, name and channel of each watched queue."""
        return [[*self._places[channel], channel] for channel in self._watchers]

    def add(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        place = f"{self._schema} {session.path} {name}"
        digest = hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()
        channel = f"tenure_q{digest}"
        watch = LocalWatch(session, kinds, changed)
        if channel not in self._watchers:
            self._places[channel] = [session.path, values.to_text(name)]
            self._engine.listen(f"LISTEN {channel}")
        self._watchers.add(channel, session, watch)
        begun = partial(self._begun, channel)
        self._engine.send(SessionCall("watch", session, (values.to_text(name), channel), begun))
        return partial(self._end, channel, watch)

    def _begun(self, channel: str, reply: Any) -> None:
        if channel in self._watchers and isinstance(reply, list) and isinstance(reply[0], int):
            self._counters.setdefault(channel, reply)

    def changed(self, channel: str, kind: str) -> None:
        """Report a change: "d" of data, "o" of owners, "b" of both."""
        for watch in self._watchers.on(channel):
            watch.report(kind)

    def all_changed(self) -> None:
        """Report changes to all watches, because some may have been missed."""
        for channel in self.channels:
            self.changed(channel, "b")

    def compare(self, channels: tuple[str, ...], counters: list[Any]) -> None:
        """Report the changes that the counters of the queues show."""
        for channel, (queue, data, owners) in zip(channels, counters, strict=False):
            before = self._counters.get(channel)
            if channel not in self._watchers or before == [queue, data, owners]:
                continue
            self._counters[channel] = [queue, data, owners]
            if before is None or before[0] != queue:
                self.changed(channel, "b")
                continue
            if before[1] != data:
                self.changed(channel, "d")
            if before[2] != owners:
                self.changed(channel, "o")

    def forget(self, session: PostgresSession) -> None:
        """End the watches of a session."""
        for channel, watch in self._watchers.of(session):
            self._end(channel, watch)

    def _end(self, channel: str, watch: LocalWatch[PostgresSession]) -> None:
        removed = self._watchers.remove(channel, watch.session, watch)
        if removed and channel not in self._watchers:
            self._places.pop(channel, None)
            self._counters.pop(channel, None)
            self._engine.listen(f"UNLISTEN {channel}")

    def clear(self) -> None:
        """Drop all watches."""
        self._watchers.clear()
