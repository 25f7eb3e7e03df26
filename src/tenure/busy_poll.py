"""Adaptive busy polling.

Waking a sleeping process takes tens of microseconds; on a virtual machine that is about as long as
the rest of a round trip. So while data is expected soon, the loop polls for a short time before it
sleeps, as a hypervisor polls before it halts a processor. A client expects a reply to its request;
a server expects more data after some has arrived. Rules:

* Polling speeds up a program that sends one request after the other. For longer waits it is wasted.
  So after each unsuccessful poll, twice as many occasions are skipped as before, up to
  `_MOST_SKIPPED`; after a successful poll none is skipped.
* Other processes and threads on this core run first (`os.sched_yield`). If yielding takes long, the
  core is busy, and the scheduler does not favour a process that never sleeps. This counts as many
  unsuccessful polls.
* Other work in the loop is not affected. A busy loop never sleeps anyway: polling then adds one
  reading of the clock to each iteration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

USUAL, LONGEST = 200, 10_000
"""Default and longest polling time, in microseconds."""

_MOST_SKIPPED = 64

_sched_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class BusyPoll:
    """Busy poller of one event loop.

    Args:
        soon: schedules a call in the loop's next iteration (`call_soon`).
        longest: seconds to poll when nothing arrives; 0 disables polling.
        now: returns the time, in seconds.
        step_back: yields the core to other processes and threads.
    """

    def __init__(
        self,
        soon: Callable[[Callable[[], None]], object],
        longest: float,
        now: Callable[[], float] = time.monotonic,
        step_back: Callable[[], object] = _sched_yield,
    ) -> None:
        self._soon = soon
        self._longest = longest
        self._now = now
        self._step_back = step_back
        self._polling = False
        self._scheduled = False  # `_poll` will be called
        self._until = 0.0
        self._to_skip = 0
        self._skipped = 0

    def expect(self) -> None:
        """Expect data from now on, and poll for it unless this occasion is skipped."""
        if not self._polling:
            if not self._longest:
                return
            if self._skipped < self._to_skip:
                self._skipped += 1
                return
            self._polling = True
            if not self._scheduled:
                self._scheduled = True
                self._soon(self._poll)
        self._until = self._now() + self._longest

    def came(self, *, more: bool) -> None:
        """Record that data has arrived. If `more` is true, more is expected as before."""
        if self._polling:
            self._to_skip = 0
            self._polling = more

    def arrived(self) -> None:
        """Record that data has arrived, and expect more from now on."""
        if self._polling:
            self._to_skip = 0
        self.expect()

    def _poll(self) -> None:
        """Keep the loop iterating: it polls its sockets in each iteration."""
        if not self._polling:
            self._scheduled = False
            return
        now = self._now()
        if now >= self._until:
            self._sleep(min(2 * self._to_skip or 1, _MOST_SKIPPED))
            return
        self._step_back()
        if self._now() - now < self._longest:
            self._soon(self._poll)
        else:
            self._sleep(_MOST_SKIPPED)

    def _sleep(self, to_skip: int) -> None:
        self._polling = self._scheduled = False
        self._skipped = 0
        self._to_skip = to_skip
