"""Counts of a server for its metrics: plain numbers, in the places where the events pass.

`tenure.server.http.metrics` exposes them; this module knows nothing of that. Rules:

* Counting an event takes well below a microsecond: an addition, a lookup, a reading of the clock.
  Whether anything reads the counts makes no difference. What a reader can add up is not counted:
  a grant within the call is one number, which is a request, a grant and a wait of no time.
* Counts never decrease, but for gauges, whose values are those of this moment.
* The memory is bounded. The first `nodes` nodes that clients open sessions on have counts of their
  own, until the server ends; all others share those of `OTHERS`.

**Waits and holds** (`RequestTimes`) are measured where a session's requests pass
(`tenure.server.auth.guarded`): from its `enqueue` to its grant, and from there to its end. A
request that is recovered with its session, after a restart for example, began at an unknown time:
it is counted as waiting or holding, and its duration is not observed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from tenure.engines.contract import Removal
from tenure.errors import SessionExpired
from tenure.model import Recovered

OTHERS: Final = "(others)"
"""Label of the nodes without counts of their own. A path begins with a slash."""

NODES: Final = 100
"""Number of nodes that have counts of their own, by default."""

WAITS: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0),
)
"""Bounds in seconds of the histograms of waits and holds."""

_FIRST = WAITS[0]

LAGS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds in seconds of the histograms of the loop's lag and the store's latency."""

_LOSSES = {
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
    Removal.CUT_OFF: "cut_off",
    Removal.LAPSED: "lapsed",
}
LOSSES: Final = (*_LOSSES.values(), "session_expired", "session_taken_over", "other")
"""Causes of a lost lease."""

OUTCOMES: Final = ("busy", "timed_out", "withdrawn", "removed", "session_ended")
"""Ends of a request that was not granted."""

ENDS: Final = ("closed", "expired", "taken_over", "detached")
"""Ends of a session's attachment to this server."""


class Histogram:
    """Numbers of values by size.

    Attributes:
        bounds: the upper bounds of the buckets, rising; one more bucket has the larger values.
        counts: the number of values in each bucket.
        sum: the sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class NodeMeter:
    """Counts of one node.

    Attributes:
        sessions: the sessions that are attached.
        opened: all sessions that were attached.
        ends: ended attachments, by `ENDS`.
        waiting: the requests that wait.
        at_once: all requests that were granted within their call.
        sent: all other requests.
        granted: all grants of those.
        recovered: all granted requests that were recovered with their session.
        released: the granted requests that have ended.
        outcomes: ended requests without a grant, by `OUTCOMES`.
        losses: leases that ended before their release, by `LOSSES`.
    """

    __slots__ = (
        "at_once",
        "ends",
        "granted",
        "losses",
        "opened",
        "outcomes",
        "recovered",
        "released",
        "sent",
        "sessions",
        "waiting",
    )

    def __init__(self) -> None:
        self.sessions = 0
        self.opened = 0
        self.waiting = 0
        self.at_once = 0
        self.sent = 0
        self.granted = 0
        self.recovered = 0
        self.released = 0
        self.ends: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()

    @property
    def requests(self) -> int:
        """All requests."""
        return self.at_once + self.sent

    @property
    def grants(self) -> int:
        """All requests that were granted."""
        return self.at_once + self.granted

    @property
    def held(self) -> int:
        """The granted requests that have not ended."""
        return self.grants + self.recovered - self.released


class Traffic:
    """Counts of one listener.

    Attributes:
        connections: the open connections, greetings included.
        opened: all connections that were accepted.
        received: bytes from clients, after decryption.
        sent: bytes to clients, before encryption.
    """

    __slots__ = ("connections", "opened", "received", "sent")

    def __init__(self) -> None:
        self.connections = 0
        self.opened = 0
        self.received = 0
        self.sent = 0


class Meter:
    """Counts of one server.

    Args:
        nodes: the number of nodes with counts of their own.

    Attributes:
        nodes: the counts of each node, those of `OTHERS` among them.
        listeners: the counts of each listener, by its URL.
        refusals: refused connections, sessions and operations, by the reason: a limit's name, or
            ``"login"``.
        later: seconds from a request to its grant, if it was not granted within its call.
        holds: seconds from a grant to the end of the lease.
    """

    def __init__(self, nodes: int = NODES) -> None:
        self._most = nodes
        self._others = NodeMeter()
        self.nodes: dict[str, NodeMeter] = {OTHERS: self._others}
        self.listeners: dict[str, Traffic] = {}
        self.refusals: Counter[str] = Counter()
        self.later = Histogram(WAITS)
        self.holds = Histogram(WAITS)

    @property
    def waits(self) -> Histogram:
        """Seconds from a request to its grant."""
        found = Histogram(WAITS)
        found.counts[:] = self.later.counts
        found.counts[0] += sum(node.at_once for node in self.nodes.values())
        found.sum = self.later.sum
        return found

    def node(self, path: str) -> NodeMeter:
        """Return the counts of a node."""
        found = self.nodes.get(path)
        if found is None:
            if len(self.nodes) > self._most:
                return self._others
            found = self.nodes[path] = NodeMeter()
        return found

    def listener(self, url: str) -> Traffic:
        """Return the counts of a listener."""
        return self.listeners.setdefault(url, Traffic())


class RequestTimes:
    """Requests of one session that wait, and those that are granted, with their times.

    Args:
        meter: the server's counts.
        node: the path of the session's node.
        now: the clock, in seconds.
    """

    __slots__ = ("_held", "_holds", "_later", "_node", "_now", "_over", "_waiting")

    def __init__(self, meter: Meter, node: str, now: Callable[[], float]) -> None:
        self._node = meter.node(node)
        self._later = meter.later
        self._holds = meter.holds
        self._now = now
        self._waiting: dict[int, float | None] = {}  # since when, by request; `None`: recovered
        self._held: dict[int, float | None] = {}
        self._over = True

    def attached(self) -> None:
        """Count the session, from now until `over`."""
        self._over = False
        self._node.sessions += 1
        self._node.opened += 1

    def over(self, end: str, loss: str | None = None) -> None:
        """Stop counting the session and its requests. Safe to call twice.

        Args:
            end: one of `ENDS`.
            loss: the cause, one of `LOSSES`, if it lost its leases by that.
        """
        node = self._node
        if not self._over:
            self._over = True
            node.sessions -= 1
            node.ends[end] += 1
        waiting, self._waiting = self._waiting, {}
        held, self._held = self._held, {}
        node.waiting -= len(waiting)
        node.released += len(held)
        if end == "detached":
            return  # they live on in the store
        if waiting:
            node.outcomes["session_ended"] += len(waiting)
        if held:
            now = self._now()
            for since in held.values():
                if since is not None:
                    self._holds.observe(now - since)
            if loss is not None:
                node.losses[loss] += len(held)

    def recovered(self, requests: Sequence[Recovered]) -> None:
        """Count requests that were in their queues already."""
        for each in requests:
            if each.request_id in self._held or each.request_id in self._waiting:
                continue
            if each.granted:
                self._held[each.request_id] = None
                self._node.recovered += 1
            else:
                self._waiting[each.request_id] = None
                self._node.waiting += 1

    def granted_at_once(self, request_id: int) -> None:
        """Count a request that was granted within its call."""
        self._node.at_once += 1
        self._held[request_id] = self._now()

    def refused_at_once(self) -> None:
        """Count a request that did not join the queue."""
        self._node.sent += 1
        self._node.outcomes["busy"] += 1

    def sent(self, request_id: int) -> None:
        """Count a request that waits, or whose answer is not known yet."""
        node = self._node
        node.sent += 1
        node.waiting += 1
        self._waiting[request_id] = self._now()

    def granted(self, request_id: int) -> None:
        """Count a grant, unless it is counted or the request has left its queue."""
        waiting = self._waiting
        if request_id in waiting:
            since = waiting.pop(request_id)
            now = self._now()
            node = self._node
            node.waiting -= 1
            node.granted += 1
            if since is not None:
                self._later.observe(now - since)
            self._held[request_id] = now

    def left(self, request_id: int) -> None:
        """Count a request that its client has released or withdrawn."""
        since = self._held.pop(request_id, -1.0)
        if since == -1.0:
            self.not_granted(request_id, "withdrawn")
            return
        self._node.released += 1
        if since is not None:
            held, holds = self._now() - since, self._holds
            holds.counts[0 if held <= _FIRST else bisect_left(WAITS, held)] += 1
            holds.sum += held

    def not_granted(self, request_id: int, outcome: str) -> None:
        """Count a waiting request that has ended, by `OUTCOMES`."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._node.waiting -= 1
            self._node.outcomes[outcome] += 1

    def removed(self, request_id: int, why: Removal) -> None:
        """Count a request that has left its queue without a call of its session."""
        if request_id in self._held:
            self.left(request_id)
            self._node.losses[_LOSSES.get(why, "other")] += 1
        else:
            timed_out = why is Removal.TIMED_OUT or why == Removal.TIMED_OUT
            self.not_granted(request_id, "timed_out" if timed_out else "removed")


def end_of(error: SessionExpired) -> tuple[str, str]:
    """Return how a session ended, one of `ENDS`, and the cause of its losses, one of `LOSSES`."""
    if error.taken_over:
        return "taken_over", "session_taken_over"
    return "expired", "session_expired"
