"""Adaptive busy polling.

Waking a sleeping process takes tens of microseconds; on a virtual machine that is about as long as
the rest of a round trip. So while something is expected soon, the loop keeps turning for a moment
instead of sleeping, as a hypervisor polls before it halts a processor. A client expects a reply to
its request; a server expects more after something has arrived. Rules:

* Polling speeds up a program that sends one request after the other. Where the wait is longer, it
  is wasted. So after each fruitless poll twice as many occasions are skipped as the last time, up
  to `_MOST_PASSED_OVER`; after a successful poll none are.
* Other processes and threads on this core run first (`os.sched_yield`). If yielding takes long,
  the core is busy, and a process that does not sleep is not woken before others. This counts like
  many fruitless polls.
* Other work in the loop is done as usual. A busy loop never sleeps anyway: polling then adds one
  reading of the clock to each turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["LONGEST", "USUAL", "BusyPoll"]

USUAL, LONGEST = 200, 10_000
"""Microseconds that a loop stays awake: by default, and at the most."""

_MOST_PASSED_OVER = 64

_sched_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class BusyPoll:
    """Busy poller of one event loop.

    Args:
        soon: calls a function at the loop's next turn (`call_soon`).
        longest: seconds that the loop stays awake when nothing comes; 0 turns polling off.
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
        """Start asleep: the loop does not poll yet."""
        self._soon = soon
        self._longest = longest
        self._now = now
        self._step_back = step_back
        self._awake = False
        self._looking = False  # `_look` will be called
        self._until = 0.0
        self._pass_over = 0
        self._passed_over = 0

    def expect(self) -> None:
        """Expect something from now on, and poll for it unless this occasion is skipped."""
        if not self._awake:
            if not self._longest:
                return
            if self._passed_over < self._pass_over:
                self._passed_over += 1
                return
            self._awake = True
            if not self._looking:
                self._looking = True
                self._soon(self._look)
        self._until = self._now() + self._longest

    def came(self, *, more: bool) -> None:
        """Note that something has come. If `more` is true, more is expected as before."""
        if self._awake:
            self._pass_over = 0
            self._awake = more

    def arrived(self) -> None:
        """Note that something has come, and expect more from now on."""
        if self._awake:
            self._pass_over = 0
        self.expect()

    def _look(self) -> None:
        """Keep the loop turning: it looks at its sockets once a turn."""
        if not self._awake:
            self._looking = False
            return
        now = self._now()
        if now >= self._until:
            self._sleep(min(2 * self._pass_over or 1, _MOST_PASSED_OVER))
            return
        self._step_back()
        if self._now() - now < self._longest:
            self._soon(self._look)
        else:
            self._sleep(_MOST_PASSED_OVER)

    def _sleep(self, pass_over: int) -> None:
        self._awake = self._looking = False
        self._passed_over = 0
        self._pass_over = pass_over
