"""Heartbeat thread: reads the answers to renewals while the event loop is stuck.

The client's thread sends the renewals over the connections that hold locks, because a renewal over
another connection would not keep these alive. This thread reads the answers, which prove the
session. Other replies that it reads wait for the loop.
"""

from __future__ import annotations

import select

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines.dflockd.connection import DflockdConnection

_POLL = 50
"""Milliseconds between two checks for new connections, and for the thread's end."""


class DflockdHeartbeat(HeartbeatThread[DflockdConnection]):
    """The heartbeat thread of one engine; its table has the connections to read."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("tenure-dflockd-heartbeat", clock.now, "reading renewals")

    def renew_now(self, awaited: dict[DflockdConnection, float]) -> None:
        """Read the replies that have arrived; return the connections that still expect one."""
        reading = {each.fileno(): each for each in awaited if each.awaits_renewal}
        poll = select.poll()
        for descriptor in reading:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_POLL) if reading else ():
            with self._failures.contained():
                reading[descriptor].receive_in_thread()
        for connection in reading.values():
            self.renew(connection)

    def disconnect(self) -> None:
        """Do nothing: the connections belong to the loop."""
