"""Health of a server: the lag of its event loop, and whether its store answers.

* **Lag** (`LoopWatch`): a timer that is late by as much as the loop was busy. It is observed
  `EVERY` seconds, which costs nothing. The largest lag of the last `RECENT` seconds is kept.
* **Store** (`StoreProbe`): one small read with a bound. Any number of callers share a reading that
  is not older than `FRESH` seconds; without callers the store is not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from tenure.background import Failures
from tenure.engines.contract import Engine
from tenure.errors import TenureError
from tenure.model import DEFAULT_NODE
from tenure.server.context import Context
from tenure.server.meter import LAGS, Histogram

EVERY: Final = 0.1
"""Seconds between two observations of the loop's lag."""

RECENT: Final = 10.0
"""Seconds for which the largest lag is kept."""

FRESH: Final = 1.0
"""Seconds for which a reading of the store is shared."""

BOUND: Final = 2.0
"""Seconds in which the store must answer."""


class LoopWatch:
    """Lag of the running event loop, by the loop's clock.

    Attributes:
        lags: seconds by which the timer was late.
        latest: the latest of them.
    """

    def __init__(self) -> None:
        self.lags = Histogram(LAGS)
        self.latest = 0.0
        self._loop = asyncio.get_running_loop()
        self._recent: deque[tuple[float, float]] = deque()  # times, and lags that fall
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to observe."""
        self._arm(self._loop.time())

    def stop(self) -> None:
        """End it. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, now: float) -> None:
        self._timer = self._loop.call_at(now + EVERY, self._observe, now + EVERY)

    def _observe(self, due: float) -> None:
        now = self._loop.time()
        self.latest = lag = max(0.0, now - due)
        self.lags.observe(lag)
        recent = self._recent
        while recent and recent[-1][1] <= lag:
            recent.pop()
        recent.append((now, lag))
        self._forget(now)
        self._arm(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RECENT:
            self._recent.popleft()

    @property
    def largest(self) -> float:
        """Largest lag of the last `RECENT` seconds."""
        self._forget(self._loop.time())
        return self._recent[0][1] if self._recent else 0.0


class StoreProbe:
    """Readings of the store, shared by all callers.

    Args:
        engine: the store.
        failures: logs unexpected errors.

    Attributes:
        latencies: seconds in which the store has answered.
        failed: the number of readings without an answer.
        reason: why the latest reading failed; ``None`` if it did not.
    """

    def __init__(self, engine: Engine, failures: Failures) -> None:
        self.latencies = Histogram(LAGS)
        self.failed = 0
        self.reason: str | None = None
        self._engine = engine
        self._failures = failures
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._is_closed = False

    async def read(self) -> str | None:
        """Return why the store cannot be used; ``None`` if it answers.

        A cancelled call changes nothing: the reading continues for the others.
        """
        if self._engine.clock.now() - self._read_at >= FRESH and not self._is_closed:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self._read())
            await asyncio.shield(self._reading)
        return self.reason

    async def aclose(self) -> None:
        """End a reading in progress, and begin none. Safe to call twice."""
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        clock = self._engine.clock
        began = clock.now()
        self.reason = await self._trouble()
        self._read_at = clock.now()
        if self.reason is None:
            self.latencies.observe(self._read_at - began)
        else:
            self.failed += 1

    async def _trouble(self) -> str | None:
        """Read from the store, and return why that failed."""
        try:
            async with asyncio.timeout(BOUND):
                await self._engine.describe_node(DEFAULT_NODE)
        except TimeoutError:
            known = self._engine.trouble()
            return f"no answer within {BOUND:g} s" + (f": {known}" if known is not None else "")
        except TenureError as error:
            return str(error)
        except Exception as error:
            self._failures.report(error)
            return f"unexpected error: {type(error).__name__}"
        known = self._engine.trouble()
        return None if known is None else str(known)


class Health:
    """Health of one server, shared by its HTTP listeners.

    Attributes:
        loop: the lag of the event loop.
        store: the readings of the store.
        draining: whether the server is being stopped.
    """

    def __init__(self, context: Context) -> None:
        self.loop = LoopWatch()
        self.store = StoreProbe(context.engine, Failures("reading the store", context.logger))
        self.draining = False
        self.loop.start()

    async def aclose(self) -> None:
        """End the observations. Safe to call twice."""
        self.loop.stop()
        await self.store.aclose()
