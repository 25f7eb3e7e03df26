"""What a run comes to, in figures, from its history and its list of faults.

* *Unavailable* is a name for as long as somebody waits for it and nothing is granted, whoever has
  it; so a holder that is stopped counts, for its window.
* A loss is *noticed* when its program knows: counted from the deadline or, if the process was
  stopped then, from its going on; and where an administrator took it away, from his act.
* A name is *taken over* when somebody who waited for what a killed process held is told of the
  grant: counted from the kill.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenure.testing.history import (
    Called,
    Continued,
    Crashed,
    Gone,
    Granted,
    History,
    Leaves,
    Observed,
    Record,
    Requested,
    Revokes,
)

__all__ = ["ENOUGH", "Figures", "Gap", "Spread", "measure"]

ENOUGH = 50.0
"""Acquisitions a second below which a run does not count."""


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
    """A run in figures; times in seconds."""

    duration: float
    requests: int
    acquisitions: int
    calls: int
    observations: int
    processes: int
    losses: int
    noticed: Spread | None
    taken_over: Spread | None
    unavailable: Gap | None
    faults: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Acquisitions a second."""
        return self.acquisitions / self.duration if self.duration > 0 else 0.0

    @property
    def operations(self) -> int:
        """Requests, calls on data, and what watches showed."""
        return self.requests + self.calls + self.observations


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
    counted = Counter(type(record) for record in records)
    noticed = _noticed(history.records)
    return Figures(
        duration=ended - begun,
        requests=counted[Requested],
        acquisitions=counted[Granted],
        calls=counted[Called],
        observations=counted[Observed],
        processes=len({each.process for each in history.records if isinstance(each, Requested)}),
        losses=len(noticed),
        noticed=Spread.of(noticed),
        taken_over=Spread.of(_taken_over(history.records)),
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


def _concerns(act: Revokes, request: Requested) -> bool:
    """Whether an administrator took that request away."""
    return (
        act.at >= request.at
        and act.request in {None, request.request}
        and act.session_of in {None, request.process}
        and act.node in {None, request.node}
        and act.name in {None, request.name}
    )


def _taken_over(records: Sequence[Record]) -> list[float]:
    """How long after a kill somebody who waited had what the dead process held."""
    requests: dict[str, _Request] = {}
    waiting_for: dict[Key, float] = {}  # since which kill
    holding: dict[Key, set[str]] = defaultdict(set)
    delays: list[float] = []
    for record in records:
        match record:
            case Requested():
                requests[record.request] = _Request(record)
            case Granted() if record.request in requests:
                request = requests[record.request]
                key = (request.asked.node, request.asked.name)
                request.granted = record.at
                killed = waiting_for.pop(key, None)
                if killed is not None and request.asked.at < killed:
                    delays.append(record.at - killed)
                holding[key].add(record.request)
            case Leaves() | Gone() if record.request in requests:
                request = requests.pop(record.request)
                holding[request.asked.node, request.asked.name].discard(record.request)
            case Crashed():
                for key, held in holding.items():
                    dead = {each for each in held if requests[each].asked.process == record.process}
                    held.difference_update(dead)
                    if dead and not held:
                        waiting_for[key] = record.at
                for label in [
                    each for each, it in requests.items() if it.asked.process == record.process
                ]:
                    del requests[label]
    return delays


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
