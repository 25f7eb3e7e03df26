"""What a run comes to, in figures, from its history and its list of faults.

* *Unavailable* is a name for as long as somebody waits for it and nothing is granted, whoever has
  it; so a holder that is stopped counts, for its window.
* A loss is *noticed* when its program knows: counted from the deadline or, if the process was
  stopped then, from its going on; and where an administrator took it away, from his act.
* A mutex is *taken over* when somebody who waited for what a killed or a stopped process held is
  told of the grant: counted from the kill or the stop.
* That is *too late* if it takes `LATEST` seconds in which no server was out of order and another
  process waited. It shows a lock that is never passed on, such as that of a dead program whose
  session somebody else renews.
* A deadlock lasts from the last of its waits and leases until it is reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.faults import everywhere, resizing
from chaos.work import ELECTION, MUTEXES
from tenure.testing.history import (
    Called,
    Continued,
    Crashed,
    Deadlocked,
    Gone,
    Granted,
    History,
    Leaves,
    Observed,
    Paused,
    Record,
    Requested,
    Revokes,
    Took,
)

ENOUGH = 50.0
"""Acquisitions a second below which a run does not count."""


LATEST = 20.0
"""Seconds after which what a dead or stopped process held has been passed on.

Windows are 2.5 seconds at the most. An engine may add its grace period, and the next in the queue
may die, too.
"""

_PASSED_ON = frozenset({*MUTEXES, ELECTION})
"""Held in sessions that nobody resumes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How many measurements there were, and how they lie, in seconds."""

    number: int
    p50: float
    p99: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """``None`` of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(len(ordered), ordered[last // 2], ordered[round(last * 0.99)], ordered[last])


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a name was waited for and not granted.

    Attributes:
        seconds: how long.
        since: when it began, in seconds from the first fault on.
        node, name: of what.
        during: the faults that were inflicted then.
    """

    seconds: float
    since: float
    node: str
    name: str
    during: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in figures; times in seconds.

    A request for tokens of a key is part of one for tokens of all, and does not count.
    """

    duration: float
    requests: int
    acquisitions: int
    takes: int
    calls: int
    observations: int
    processes: int
    losses: int
    noticed: Spread | None
    taken_over: Spread | None
    from_stopped: Spread | None
    deadlocks: Spread | None
    too_late: tuple[str, ...]
    unavailable: Gap | None
    faults: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Acquisitions a second."""
        return self.acquisitions / self.duration if self.duration > 0 else 0.0

    @property
    def operations(self) -> int:
        """Requests, takes of rates, calls on data, and what watches showed."""
        return self.requests + self.takes + self.calls + self.observations


@dataclass(slots=True)
class _Request:
    asked: Requested
    granted: float | None = None
    over: float | None = None


Key = tuple[str, str]


def measure(
    history: History, begun: float, ended: float, faults: Sequence[tuple[str, float, float, bool]]
) -> Figures:
    """Return the figures between two instants.

    Args:
        history: all records of the run.
        begun: the first instant.
        ended: the last instant.
        faults: name, beginning, end, and whether it could be inflicted.
    """
    records = [record for record in history.records if begun <= record.at <= ended]
    of_keys = {each.key for each in records if isinstance(each, Requested) and each.key}
    counted = Counter(type(record) for record in records)
    noticed = _noticed(history.records)
    handovers = _Handovers(faults)
    handovers.follow([each for each in history.records if each.at <= ended])
    handovers.end(ended)
    return Figures(
        duration=ended - begun,
        requests=counted[Requested] - len(of_keys),
        acquisitions=sum(
            isinstance(each, Granted) and each.request not in of_keys for each in records
        ),
        takes=sum(isinstance(each, Took) and each.granted is not None for each in records),
        calls=counted[Called],
        observations=counted[Observed],
        processes=len({each.process for each in history.records if isinstance(each, Requested)}),
        losses=len(noticed),
        noticed=Spread.of(noticed),
        taken_over=Spread.of(handovers.delays["killed"]),
        from_stopped=Spread.of(handovers.delays["stopped"]),
        deadlocks=Spread.of(_deadlocks(history.records)),
        too_late=tuple(handovers.too_late),
        unavailable=_longest_gap(records, begun, ended, faults),
        faults=dict(Counter(name for name, _, _, done in faults if done)),
        missed=dict(Counter(name for name, _, _, done in faults if not done)),
    )


def _noticed(records: Sequence[Record]) -> list[float]:
    """How long each loss took to be noticed."""
    asked: dict[str, Requested] = {}
    going_on: dict[str, list[float]] = defaultdict(list)
    acts: list[Revokes] = []
    delays: list[float] = []
    for record in records:
        match record:
            case Requested():
                asked[record.request] = record
            case Continued():
                going_on[record.process].append(record.at)
            case Revokes():
                acts.append(record)
            case Gone(why="lost", deadline=deadline) if record.request in asked:
                request = asked[record.request]
                late = deadline is not None and deadline <= record.at
                reasons = [act.at for act in acts if _concerns(act, request)]
                since = deadline if late else max(reasons, default=None)
                if since is not None:
                    woken = [at for at in going_on[request.process][-1:] if at > since]
                    delays.append(record.at - max([since, *woken]))
    return delays


def _deadlocks(records: Sequence[Record]) -> list[float]:
    """How long each deadlock lasted until it was reported."""
    asked: dict[str, float] = {}
    granted: dict[int | None, float] = {}
    lasted: list[float] = []
    for record in records:
        match record:
            case Requested():
                asked[record.request] = record.at
            case Granted():
                granted[record.order_id] = record.at
            case Deadlocked():
                began = [asked[each] for each in record.waits if each in asked]
                began += [granted[each] for each in record.inside if each in granted]
                lasted.append(record.at - max(began, default=record.at))
    return lasted


def _concerns(act: Revokes, request: Requested) -> bool:
    """Whether an administrator took that request away."""
    return (
        act.at >= request.at
        and act.request in {None, request.request}
        and act.session_of in {None, request.process}
        and act.node in {None, request.node}
        and act.name in {None, request.name}
    )


@dataclass(slots=True)
class _Queue:
    """One name: who has it, who waits, and since when a dead or stopped process keeps it from them.

    Attributes:
        orphaned: when its last holder was killed or stopped, with the process and how.
        since: when that began to keep somebody waiting.
    """

    holders: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    orphaned: tuple[float, str, str] | None = None
    since: float | None = None


class _Handovers:
    """How long it took to pass on what killed and stopped processes held."""

    def __init__(self, faults: Sequence[tuple[str, float, float, bool]]) -> None:
        ours = {fault.name for fault in (*everywhere(), *resizing())}
        self._outages = sorted(
            (start, end) for name, start, end, done in faults if done and name not in ours
        )
        self._queues: dict[Key, _Queue] = defaultdict(_Queue)
        self._keys: dict[str, Key] = {}
        self._stopped: set[str] = set()
        self.delays: dict[str, list[float]] = {"killed": [], "stopped": []}
        self.too_late: list[str] = []

    def follow(self, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case Requested() if record.name in _PASSED_ON:
                    key = self._keys[record.request] = (record.node, record.name)
                    self._queues[key].waiting[record.request] = record.process
                    self._look(key, record.at)
                case Granted() if record.request in self._keys:
                    self._granted(record.request, record.at)
                case Leaves() | Gone() if record.request in self._keys:
                    self._forget(record.request, record.at)
                case Crashed():
                    self._stopped.discard(record.process)
                    self._orphan(record.process, "killed", record.at)
                case Paused():
                    self._stopped.add(record.process)
                    self._orphan(record.process, "stopped", record.at)
                case Continued():
                    self._stopped.discard(record.process)
                    for key, queue in self._queues.items():
                        if queue.orphaned and queue.orphaned[1:] == (record.process, "stopped"):
                            self._end(key, record.at)

    def end(self, at: float) -> None:
        """Judge what has not been passed on at the end."""
        for key in self._queues:
            self._end(key, at)

    def _granted(self, request: str, at: float) -> None:
        key = self._keys[request]
        queue = self._queues[key]
        process = queue.waiting.pop(request, "")
        if queue.orphaned is not None:
            self._end(key, at, granted=True)
        queue.holders[request] = process

    def _forget(self, request: str, at: float) -> None:
        key = self._keys.pop(request)
        queue = self._queues[key]
        queue.holders.pop(request, None)
        queue.waiting.pop(request, None)
        self._look(key, at)

    def _orphan(self, process: str, how: str, at: float) -> None:
        for key, queue in self._queues.items():
            if how == "killed":
                queue.waiting = {k: each for k, each in queue.waiting.items() if each != process}
            if process in queue.holders.values():
                queue.holders = {k: each for k, each in queue.holders.items() if each != process}
                queue.orphaned = queue.orphaned or (at, process, how)
            self._look(key, at)

    def _look(self, key: Key, at: float) -> None:
        """Note since when a process that goes on waits for it."""
        queue = self._queues[key]
        waits = any(each not in self._stopped for each in queue.waiting.values())
        if queue.orphaned is None or not waits:
            queue.since = None
        elif queue.since is None:
            queue.since = at

    def _end(self, key: Key, at: float, *, granted: bool = False) -> None:
        queue = self._queues[key]
        orphaned, since = queue.orphaned, queue.since
        queue.orphaned = queue.since = None
        if orphaned is None or since is None:
            return
        begun, process, how = orphaned
        if granted and since == begun:
            self.delays[how].append(at - since)
        late = at - since - self._out_of_order(since, at)
        if late > LATEST:
            self.too_late.append(
                f"{key[1]!r} was not passed on within {late:.1f} s after its holder {process} was "
                f"{how}, though its store was in order and others waited"
            )

    def _out_of_order(self, since: float, until: float) -> float:
        """Seconds between the two in which a fault of the store was inflicted."""
        total, reached = 0.0, since
        for start, end in self._outages:
            begun, ended = max(start, reached), min(end, until)
            if begun < ended:
                total, reached = total + ended - begun, ended
        return total


def _longest_gap(
    records: Sequence[Record],
    begun: float,
    ended: float,
    faults: Sequence[tuple[str, float, float, bool]],
) -> Gap | None:
    """Return the longest time in which a name had waiters and nothing was granted."""
    waiting: dict[Key, dict[str, str]] = defaultdict(dict)
    keys: dict[str, Key] = {}
    since: dict[Key, float] = {}
    longest = (0.0, begun, ("", ""))

    def look(key: Key, at: float) -> None:
        nonlocal longest
        if key in since:
            longest = max(longest, (at - since.pop(key), at, key))
        if waiting[key]:
            since[key] = at

    for record in records:
        match record:
            case Requested():
                key = (record.node, record.name)
                keys[record.request] = key
                waiting[key][record.request] = record.process
                since.setdefault(key, record.at)
            case Granted() if record.request in keys:
                key = keys.pop(record.request)
                waiting[key].pop(record.request, None)
                look(key, record.at)
            case Leaves() | Gone() if record.request in keys:
                key = keys.pop(record.request)
                waiting[key].pop(record.request, None)
                if not waiting[key]:
                    look(key, record.at)
            case Crashed():
                for key, who in waiting.items():
                    for label in [
                        each for each, process in who.items() if process == record.process
                    ]:
                        del who[label]
                        keys.pop(label, None)
                    if not who:
                        look(key, record.at)
    for key in list(since):
        look(key, ended)
    seconds, at, (node, name) = longest
    if not seconds:
        return None
    during = {
        fault for fault, start, end, done in faults if done and start < at and end > at - seconds
    }
    return Gap(seconds, at - seconds - begun, node, name, tuple(sorted(during)))
