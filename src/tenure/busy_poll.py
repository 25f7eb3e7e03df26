"""Not going to sleep while what comes next is about to come.

To wake a sleeping process takes tens of microseconds, on a virtual machine about as long as all the
rest of a round trip. So where something is expected soon (by a client that has asked, by a server
after something has arrived) the loop goes on turning for a moment, as a hypervisor waits before it
halts a processor. Rules:

* A program that asks one thing after the other is faster for it; where what is expected takes
  longer it is waste. So each time that nothing came, twice as many occasions are passed over as the
  last time, up to `_MOST_PASSED_OVER`; and none any more when something did come.
* Whatever else wants to run on this core goes first (`os.sched_yield`). When that takes long the
  core is not to spare, and who does not sleep is not woken before others: it is as if nothing had
  come many times.
* Whatever else there is to do in the loop is done meanwhile as ever. A busy loop never sleeps
  anyway: then this adds a glance at the time to each turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["LONGEST", "USUAL", "BusyPoll"]

USUAL, LONGEST = 200, 10_000
"""Microseconds that a loop stays awake: where nobody says anything else, and at the most."""

_MOST_PASSED_OVER = 64

_sched_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class BusyPoll:
    """Keeps one event loop awake for a moment.

    Args:
        soon: has something called at the loop's next turn (`call_soon`).
        longest: seconds that it stays awake when nothing comes; 0: it never does.
        now: what tells the time, in seconds.
        step_back: lets others run that want this core.
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
        self._awake = False
        self._looking = False  # `_look` will be called
        self._until = 0.0
        self._pass_over = 0
        self._passed_over = 0

    def expect(self) -> None:
        """Something is expected from now on."""
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
        """Something has come; is more expected, as it was before?"""
        if self._awake:
            self._pass_over = 0
            self._awake = more

    def arrived(self) -> None:
        """Something has come, and more is expected from now on."""
        if self._awake:
            self._pass_over = 0
        self.expect()

    def _look(self) -> None:
        """The loop looks at its sockets once a turn, whatever there is to do in it."""
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
