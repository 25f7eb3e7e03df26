"""Watches of a session, across all its connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tenure.engines.native.connection import NativeConnection
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire

POLLING = 1.0
"""Seconds between two notifications if the server rejects a watch."""

_log = logging.getLogger("tenure")


class _Watch:
    __slots__ = ("changed", "message", "polling")

    def __init__(self, message: wire.Watch, changed: Callable[[], None]) -> None:
        self.message = message
        self.changed = changed
        self.polling: asyncio.TimerHandle | None = None


class NativeWatches:
    """The watches of one session, on its channel."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._watches: dict[int, _Watch] = {}
        self._last = 0

    def add(
        self,
        connection: NativeConnection | None,
        name: str,
        changed: Callable[[], None],
        *,
        data: bool,
        owners: bool,
    ) -> int:
        """Begin a watch; return its number."""
        self._last += 1
        message = wire.Watch(self._channel, self._last, name, data, owners)
        self._watches[self._last] = _Watch(message, changed)
        if connection is not None:
            connection.send(message)
        return self._last

    def remove(self, connection: NativeConnection | None, number: int) -> None:
        """End a watch. Safe to call twice."""
        watch = self._watches.pop(number, None)
        if watch is None:
            return
        if watch.polling is not None:
            watch.polling.cancel()
        if connection is not None:
            connection.send(wire.Unwatch(self._channel, number))

    def clear(self, connection: NativeConnection | None) -> None:
        """End all watches."""
        for number in list(self._watches):
            self.remove(connection, number)

    def changed(self, number: int) -> None:
        """Notify the watcher of a change."""
        watch = self._watches.get(number)
        if watch is not None:
            watch.changed()

    def resume(self, connection: NativeConnection) -> None:
        """Watch again over a new connection, and notify all: changes may have been missed."""
        watches = list(self._watches.values())
        for watch in watches:
            if watch.polling is not None:
                watch.polling.cancel()
                watch.polling = None
            connection.send(watch.message)
        for watch in watches:
            watch.changed()

    def refused(self, push: wire.WatchRefused) -> None:
        """Poll, because the server rejects this watch."""
        watch = self._watches.get(push.number)
        if watch is not None:
            _log.warning(
                "watch rejected, polling instead: name=%r error=%s",
                watch.message.name,
                from_wire(push.error),
            )
            self._poll(watch)

    def _poll(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        watch.polling = loop.call_later(POLLING, self._poll, watch)
        watch.changed()
