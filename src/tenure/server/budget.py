"""Budgets of a server's connections: the time of each iteration of the loop, and bytes of input.

No input of a client may block the event loop. So a connection handles its input in small units, and
its `Share` says after each of them whether it may continue. The rest is queued, and the connection
is not read meanwhile. Rules:

* **Time.** All connections together use `ITERATION` seconds of an iteration, one connection
  `QUANTUM`, regardless of the number of reads. Each protocol bounds its units: a message, a few
  frames, a few kilobytes.
* **Light connections first.** A connection that has used little of the loop recently, such as one
  that only renews leases, is handled at once, or before all heavy ones. Credit accrues from the
  greeting, so that new connections do not circumvent this.
* **Strangers** are connections whose clients have not identified themselves. All of them together
  use `STRANGERS` seconds of an iteration, and none is handled on arrival.
* **Sources in turn.** The queue is a round robin of the sources (`tenure.server.admission`), and of
  the connections of each source. A source with many connections gets no more time than another one.
* **Bytes.** Input that is not carried out yet counts for its identity (`InputBudget`), that of all
  strangers together. Beyond the limits a connection that receives more is closed.
* **No cost while there is little to do.** A few short reads in a row are handled without reading
  the clock. Long reads, and reads of several units, are always measured.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable

from tenure.background import Failures
from tenure.server.limits import LimitReached, Limits

ITERATION = 0.010
"""Seconds of an iteration for queued connections."""

QUANTUM = 0.002
"""Seconds of an iteration for one connection, beyond its first unit."""

STRANGERS = 0.002
"""Seconds of an iteration for all connections whose clients have not identified themselves."""

FORGOTTEN = 64 * 1024
"""Bytes of a refused client that are read and dropped, so that the reason reaches it.

To close with unread input would reset the connection.
"""

_STRANGERS_QUANTUM = STRANGERS / 4
_AT_ONCE = 2 * ITERATION  # seconds of an iteration for input that is handled at once
_FREE = 64  # reads that are handled without a look at the clock
_SHORT = 1024  # bytes of the longest of these
_CREDIT = 0.005  # seconds that a light connection may use at a time
_ACCRUAL = 0.02  # seconds of credit in a second
_UNCOUNTED = 4096  # bytes of unread input of a connection that are not counted


def _nothing() -> None:
    """Do nothing: the connection is closed."""


class Share:
    """The share of one connection.

    Args:
        budget: the server's budget.
        source: the origin of the connection.
        work: handles more of the input; called by the budget.
        causes: seconds of the loop's time that a call of `work` causes after it has returned.
        stranger: the client has not identified itself; `greeted` ends that.

    Attributes:
        queued: whether `work` will be called.
        stranger: see above.
        now: the clock, in seconds.
    """

    __slots__ = (
        "_began",
        "_budget",
        "_closed",
        "_credit",
        "_credited_at",
        "_iteration",
        "_quantum",
        "_spent",
        "_work",
        "causes",
        "now",
        "queued",
        "source",
        "stranger",
    )

    def __init__(
        self,
        budget: LoopBudget,
        source: Hashable,
        work: Callable[[], None],
        causes: float = 0.0,
        *,
        stranger: bool = False,
    ) -> None:
        """Start without credit; `work` handles queued input."""
        self.source = source
        self.causes = causes
        self.stranger = stranger
        self._quantum = _STRANGERS_QUANTUM if stranger else QUANTUM
        self.queued = False
        self.now = budget.now
        self._budget = budget
        self._work = work
        self._began = 0.0  # start of the current work; 0 if it is not measured
        self._spent = 0.0  # seconds in `_iteration` for input handled on arrival
        self._iteration = 0
        self._credit = 0.0
        self._credited_at: float | None = None  # `None` before the greeting
        self._closed = False

    def greeted(self) -> None:
        """Let the connection accrue credit from now on: its client has identified itself."""
        if self._credited_at is None:
            self._credited_at = self.now()
            self._credit = _CREDIT
            self.stranger = False
            self._quantum = QUANTUM

    def begin(self, size: int) -> bool:
        """Begin to handle `size` bytes that have just arrived; false if they wait: see `queue`."""
        budget = self._budget
        self._began = 0.0
        if budget.free > 0 and size <= _SHORT and not self.stranger:
            budget.free -= 1
            return True
        return self._begin_crowded()

    def _begin_crowded(self) -> bool:
        budget = self._budget
        if self.queued or self.stranger or not budget.has_room(self):
            return False
        if self._iteration != budget.iteration:
            self._iteration = budget.iteration
            self._spent = 0.0
        elif self._spent >= QUANTUM:
            return False  # reads that follow each other, with no iteration in between
        self._began = self.now()
        return True

    @property
    def used_up(self) -> bool:
        """True if the connection has used its share; it continues in a later iteration."""
        now = self.now()
        if self._began:
            return now - self._began >= self._quantum
        self._began = now
        self._budget.free = 0  # its first unit was free, and it has more
        return False

    def end(self) -> None:
        """Record that the connection has handled what it may for now."""
        if self._began:
            took = self.now() - self._began
            self._charge(took)
            self._spent += took
            self._began = 0.0

    def queue(self) -> None:
        """Schedule `work` for a later iteration. Safe to call twice."""
        if not self.queued and not self._closed:
            self.queued = True
            self._budget.put(self)

    def close(self) -> None:
        """Cancel the scheduled `work`. Safe to call twice."""
        self.queued = False
        self._closed = True
        self._work = _nothing  # breaks a reference cycle

    def run(self) -> None:
        """Call `work`. Called by the budget."""
        self.queued = False
        self._began = self.now()
        try:
            self._work()
        finally:
            self.end()

    @property
    def light(self) -> bool:
        """True if the connection has used little of the loop recently."""
        self._accrue()
        return self._credit > 0.0

    def _accrue(self) -> None:
        if self._credited_at is not None:
            now = self.now()
            accrued = (now - self._credited_at) * _ACCRUAL
            self._credit = min(self._credit + accrued, _CREDIT)
            self._credited_at = now

    def _charge(self, seconds: float) -> None:
        self._accrue()
        if self._credited_at is not None:
            self._credit = max(self._credit - seconds, -_CREDIT)


class _RoundRobin:
    """Shares in the order of service: a round robin of the sources, and of each source's shares."""

    __slots__ = ("_sources", "length")

    def __init__(self) -> None:
        self._sources: dict[Hashable, deque[Share]] = {}
        self.length = 0

    def put(self, share: Share) -> None:
        self._sources.setdefault(share.source, deque()).append(share)
        self.length += 1

    def take(self) -> Share:
        """Remove and return the next share."""
        source = next(iter(self._sources))
        shares = self._sources.pop(source)
        share = shares.popleft()
        if shares:
            self._sources[source] = shares  # behind the others
        self.length -= 1
        return share


class LoopBudget:
    """The budget of one server, on one event loop.

    Args:
        now: the clock, in seconds.
        logger: the server's logger.

    Attributes:
        free: number of short reads that may be handled without reading the clock.
        iteration: the number of the current iteration, counting only busy ones.
    """

    __slots__ = (
        "_armed",
        "_ends",
        "_failures",
        "_heavy",
        "_light",
        "_strangers",
        "free",
        "iteration",
        "now",
    )

    def __init__(self, now: Callable[[], float], logger: logging.Logger) -> None:
        self.now = now
        self.free = _FREE
        self.iteration = 0
        self._light = _RoundRobin()
        self._heavy = _RoundRobin()
        self._strangers = _RoundRobin()
        # Whether `_iterate` will be called at the beginning of the next iteration.
        self._armed = False
        self._ends = 0.0  # when nothing more is handled at once in this iteration
        self._failures = Failures("carrying out a client's input", logger)

    @property
    def waiting(self) -> int:
        """Number of queued connections."""
        return self._light.length + self._heavy.length + self._strangers.length

    def put(self, share: Share) -> None:
        """Queue a share. Called by `Share.queue`."""
        if share.stranger:
            self._strangers.put(share)
        else:
            (self._light if share.light else self._heavy).put(share)
        self.free = 0
        self._arm()

    def has_room(self, share: Share) -> bool:
        """Return true if a connection may handle new input at once."""
        self._arm()
        if self.now() >= self._ends:
            return False
        if not self.waiting:
            self.free = _FREE // 4
            return True
        return share.light

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self.iteration += 1
            self._ends = self.now() + _AT_ONCE
            asyncio.get_running_loop().call_soon(self._iterate)

    def _iterate(self) -> None:
        """Handle queued connections, at the beginning of an iteration."""
        self._armed = False
        begun = self.now()
        caused = 0.0
        for _ in range(self._light.length):
            if self.now() - begun + caused >= ITERATION:
                break
            caused += self._run(self._light.take())
        for _ in range(self._heavy.length):  # at least one of them
            caused += self._run(self._heavy.take())
            if self.now() - begun + caused >= ITERATION:
                break
        self._serve_strangers()
        if self.waiting:
            self._arm()
            self._ends = begun + _AT_ONCE
        else:
            self.free = _FREE

    def _serve_strangers(self) -> None:
        ends = self.now() + STRANGERS
        for _ in range(self._strangers.length):  # at least one of them
            ends -= self._run(self._strangers.take())
            if self.now() >= ends:
                break

    def _run(self, share: Share) -> float:
        if not share.queued:
            return 0.0
        with self._failures.contained():
            share.run()
        return share.causes


class InputBudget:
    """Bytes of input that are received and not carried out, over all connections of a server."""

    __slots__ = ("_limits", "_of_owners", "_total")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._total = 0
        self._of_owners: dict[Hashable, int] = {}

    @property
    def total(self) -> int:
        """Counted bytes over all connections."""
        return self._total

    def change(self, owner: Hashable, more: int) -> None:
        """Change the number of an owner's bytes. Called by `UnreadInput`.

        Raises:
            LimitReached: they would exceed a limit; nothing is changed.
        """
        mine = self._of_owners.get(owner, 0) + more
        if more > 0:
            self._check("input_bytes", self._total + more)
            self._check("identity_input_bytes", mine)
        self._total += more
        if mine:
            self._of_owners[owner] = mine
        else:
            self._of_owners.pop(owner, None)

    def _check(self, limit: str, size: int) -> None:
        most = getattr(self._limits, limit)
        if size > most:
            raise LimitReached(
                f"too much input waits at this server, which has reached its limit {limit} = "
                f"{most}; send less at a time",
                limit,
            )


class UnreadInput:
    """Bytes of one connection's input that are not carried out. A stranger's until `greeted`."""

    __slots__ = ("_budget", "_owner", "size")

    def __init__(self, budget: InputBudget) -> None:
        self._budget = budget
        self._owner: Hashable = None  # of all strangers
        self.size = 0  # counted bytes

    def greeted(self, owner: Hashable) -> None:
        """Count for this owner from now on: the client's identity, or its source."""
        size = self.size
        self.set(0)
        self._owner = owner
        self.set(size)

    def set(self, size: int) -> None:
        """Record the number of bytes that the connection has now.

        Raises:
            LimitReached: they exceed a limit; the connection is to be closed.
        """
        if size <= _UNCOUNTED:
            size = 0
        if size != self.size:
            self._budget.change(self._owner, size - self.size)
            self.size = size
