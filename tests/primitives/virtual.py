"""Stand-in for tenure.testing.clock until it is there."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualClock:
    virtual = True

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._wall = 1.7e9

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._wall += seconds


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    clock: VirtualClock

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits")
        if not ready and timeout and timeout > 0:
            self.clock.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        selector = _Selector()
        selector.clock = clock
        super().__init__(selector)

    def time(self) -> float:
        return self.clock.now()
