"""Renewing while the program's loop stands still: a thread that reads what the loop does not.

The keeper's thread sends the renewals (`DflockdSession.renew`), over the connections that hold
something: a renewal over another one would not keep a connection alive. This thread reads the
answers, which prove. It is started when it is first needed, and ends when nothing was asked for a
while; what it reads for others waits for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Iterable

from tenure.background import BackgroundThread, Failures
from tenure.clock import Clock
from tenure.engines.dflockd.connection import DflockdConnection

__all__ = ["HeartbeatReader"]

_log = logging.getLogger("tenure")

_LISTENING = 3.0
"""Seconds for which the thread listens after the last renewal that it was notified of."""

_POLL = 50
"""Milliseconds after which it looks for new connections, and for its end."""


class HeartbeatReader:
    """The thread, and what it listens to."""

    def __init__(self, clock: Clock) -> None:
        """Start without connections and without a thread."""
        self._clock = clock
        self._lock = threading.Lock()
        self._connections: dict[int, DflockdConnection] = {}
        self._until = 0.0
        self._failures = Failures("listening beside the loop", _log)
        self._thread: BackgroundThread | None = None
        self._closing = False

    def listen(self, connections: Iterable[DflockdConnection]) -> None:
        """Read what is answered there, for a while. From any thread; returns at once."""
        with self._lock:
            if self._closing:
                return
            self._until = self._clock.now() + _LISTENING
            self._connections.update({each.fileno(): each for each in connections})
            if self._thread is None or not self._thread.alive:
                thread = BackgroundThread("tenure-dflockd-heartbeat", self._run)
                with self._failures.contained():  # the next renewal tries again
                    thread.start()
                    self._thread = thread

    async def aclose(self) -> None:
        """Stop the thread. Safe to call twice."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing or self._clock.now() >= self._until:
                    self._connections.clear()
                    self._thread = None
                    return
                connections = dict(self._connections)
            poll = select.poll()
            for descriptor, connection in connections.items():
                if connection.lost:
                    with self._lock:
                        self._connections.pop(descriptor, None)
                else:
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(_POLL):
                with self._failures.contained():
                    connections[descriptor].receive_in_thread()
