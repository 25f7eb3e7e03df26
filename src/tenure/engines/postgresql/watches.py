"""Watches of the PostgreSQL engine: notifications, and counters where those cannot be received.

Each queue counts its changes. The counters are compared when a watch begins, after a reconnect, and
from time to time, so that no change is missed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tenure.engines._kit.commands.statements import Statement
from tenure.engines._kit.watchers import LocalWatches
from tenure.engines.postgresql import values
from tenure.engines.postgresql.session import PostgresSession
from tenure.engines.postgresql.statements import session_call


class PostgresWatches(LocalWatches[PostgresSession]):
    """The watches of one engine. Iterates over the channels on which changes are notified.

    Args:
        send: sends a statement.
        listen: runs ``LISTEN`` or ``UNLISTEN`` where notifications are received.
        schema: of the store; equal names in other schemas are others.
    """

    def __init__(
        self, send: Callable[[Statement], None], listen: Callable[[str], None], schema: str
    ) -> None:
        super().__init__(lambda channel: listen(f"LISTEN {channel}"), self._unlisten)
        self._send = send
        self._listen = listen
        self._schema = schema
        self._places: dict[str, list[str]] = {}  # node and name of each channel
        self._counters: dict[str, Any] = {}

    def watched(self) -> list[list[str]]:
        """Return node, name and channel of each watched queue."""
        return [[*self._places[channel], channel] for channel in self]

    def begin(
        self, session: PostgresSession, name: str, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; returns what ends the watch."""
        place = f"{self._schema} {session.path} {name}"
        digest = hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()
        channel = f"tenure_q{digest}"
        self._places[channel] = [session.path, values.to_text(name)]
        end = self.watch(channel, session, kinds, changed)
        begun = partial(self._begun, channel)
        self._send(session_call("watch", session, (values.to_text(name), channel), begun))
        return end

    def _begun(self, channel: str, reply: Any) -> None:
        if channel in self and isinstance(reply, list) and isinstance(reply[0], int):
            self._counters.setdefault(channel, reply)

    def _unlisten(self, channel: str) -> None:
        self._places.pop(channel, None)
        self._counters.pop(channel, None)
        self._listen(f"UNLISTEN {channel}")

    def compare(self, channels: tuple[str, ...], counters: list[Any]) -> None:
        """Report the changes that the counters of the queues show."""
        for channel, (queue, data, owners) in zip(channels, counters, strict=False):
            before = self._counters.get(channel)
            if channel not in self or before == [queue, data, owners]:
                continue
            self._counters[channel] = [queue, data, owners]
            if before is None or before[0] != queue:
                self.report(channel, "b")
                continue
            if before[1] != data:
                self.report(channel, "d")
            if before[2] != owners:
                self.report(channel, "o")
