"""Simulated network between a program and a store: two directions with delays and outages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Message = Callable[[], object]


class _Line:
    """One direction of a way: first in, first out, with each message delivered once."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # the receiver's loop
        self._delay = delay
        self._open = True
        self._queue: deque[Message] = deque()
        self._timers: deque[asyncio.TimerHandle] = deque()
        self._last = 0.0

    def send(self, message: Message) -> None:
        self._queue.append(message)
        if self._open:
            self._launch()

    def _launch(self) -> None:
        loop = self.loop
        assert loop is not None
        due = loop.time() + self._delay()
        if due < self._last:  # noqa: PLR1730  a call costs more
            due = self._last
        self._last = due
        self._timers.append(loop.call_at(due, self._arrive))

    def _arrive(self) -> None:
        self._timers.popleft()
        self._queue.popleft()()

    def cut(self) -> None:
        """Lose the messages in transit; they are sent again after `mend`."""
        self._open = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def mend(self) -> None:
        if not self._open:
            self._open = True
            for _ in self._queue:
                self._launch()

    def clear(self) -> None:
        self.cut()
        self._queue.clear()


class Way:
    """Simulated network between one program and the store.

    Args:
        delay: called for each message; returns its delay in seconds.
        repeats: called for each grant; returns true if the grant is reported twice.
    """

    def __init__(
        self, delay: Callable[[], float] = lambda: 0.0, repeats: Callable[[], bool] = lambda: False
    ) -> None:
        self.there = _Line(delay)
        self.back = _Line(delay)
        self.repeats = repeats
        self.lost = False
        self.changed: Callable[[bool], None] = lambda _: None

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """Stop all messages in one direction or both, without notifying the sessions."""
        if there:
            self.there.cut()
        if back:
            self.back.cut()

    def lose(self) -> None:
        """Break the connection in both directions, and notify the sessions."""
        self.cut()
        if not self.lost:
            self.lost = True
            self.changed(False)

    def mend(self) -> None:
        """Deliver waiting and future messages again. Does nothing if the way is not broken."""
        self.there.mend()
        self.back.mend()
        if self.lost:
            self.lost = False
            self.changed(True)
