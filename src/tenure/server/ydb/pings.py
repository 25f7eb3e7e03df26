"""Pings of one session stream: their interval, and their timeout.

The server pings at least every two seconds, because a pong renews the session in the store. As in
YDB, the timeout of a ping is a third of the session's timeout, and at most 5 s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenure.server.ydb.core import Conversation

_EVERY = 2.0  # longest time between two pings, in seconds
_TIMEOUT = 5.0  # seconds without an answer, at the most


class Pings:
    """Drives the pings of a conversation.

    Args:
        conversation: the conversation to ping.
        may_miss_pong: whether a pong may have come unread, or the ping may not have been read.
        pump: sends the conversation's messages.
    """

    def __init__(
        self,
        conversation: Conversation,
        may_miss_pong: Callable[[], bool],
        pump: Callable[[], None],
    ) -> None:
        self._conversation = conversation
        self._may_miss_pong = may_miss_pong
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._every, self._timeout = _EVERY, _TIMEOUT
        self._sent = 0.0

    def start(self, timeout_millis: int) -> None:
        """Start, after the first ping was sent.

        Args:
            timeout_millis: the session's timeout.
        """
        third = max(1.0, timeout_millis / 1000) / 3
        self._every, self._timeout = min(_EVERY, third), min(_TIMEOUT, third)
        self._sent = self._loop.time()
        self._set_timer()

    def stop(self) -> None:
        """Stop pinging. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        now = self._loop.time()
        due, deadline = now + self._every, self._sent + self._timeout
        if self._conversation.waits_for_pong and deadline > now:
            due = min(due, deadline)
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        now = self._loop.time()
        late = now - due > self._every / 2
        try:
            if not self._conversation.waits_for_pong:
                self._sent = now
            elif late or now < self._sent + self._timeout:
                return  # it has time left, or may have answered in time
            elif self._may_miss_pong():
                self._sent = now  # it has time again after an answer
                return
            self._conversation.tick(new_opaque())
            self._pump()
        finally:
            if not self._conversation.over:
                self._set_timer()


def new_opaque() -> int:
    """Return a number for a ping, which its pong repeats: never zero."""
    return random.randrange(1, 2**64)
