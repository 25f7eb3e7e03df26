"""Recorded history of a demo, and the checks of it.

Every process records what it does, with times on the boot-time clock, which all processes of a host
share. It records a grant after receiving it, and a release before sending it. So a recorded lease
is never longer than the real one, and an overlap in the record is a real overlap.

Each check is computed from the record alone and returns a `Finding`. A check without data fails.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

What = Literal["requested", "queued", "granted", "released", "killed", "written", "seen", "done"]


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """Something that a process did or observed.

    Attributes:
        at: seconds, on the boot-time clock.
        who: the process.
        what: ``queued`` means that the request was known to be in the queue by then; ``killed`` and
            ``written`` are recorded just before the signal or the write.
        name: the name of the mutex, semaphore or election.
        token: the fencing token, where known.
        count: number of tokens of the semaphore.
        data: the data written or seen.
    """

    at: float
    who: str
    what: What
    name: str
    token: int | None = None
    count: int = 1
    data: str = ""

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))


def parse(line: str | bytes) -> DemoEvent:
    """Return the event that `DemoEvent.to_json` has written."""
    return DemoEvent(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Look:
    """State of a queue at one instant: each owner and each waiter as (token, count)."""

    name: str
    limit: int
    owners: tuple[tuple[int, int], ...]
    waiters: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DemoHold:
    """One request: when it was sent, known to be queued, granted, and ended."""

    who: str
    token: int
    count: int
    requested: float
    queued: float
    granted: float
    ended: float
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; `figure` is a measured duration in seconds."""

    holds: bool
    text: str
    figure: float | None = None


class History:
    """The record of a demo."""

    def __init__(self) -> None:
        self.events: list[DemoEvent] = []
        self.looks: list[Look] = []

    def about(self, name: str, *what: What) -> list[DemoEvent]:
        """Return the events of some kinds about one name, ordered by time."""
        found = [each for each in self.events if each.name == name and each.what in what]
        return sorted(found, key=lambda each: each.at)

    def write(self, file: Path) -> None:
        """Keep the events, as JSON lines."""
        file.write_text("".join(each.to_json() + "\n" for each in self.events), encoding="utf-8")

    def holds(self, name: str) -> list[DemoHold]:
        """Every granted request, in the order of the grants."""
        killed = {each.who: each.at for each in self.events if each.what == "killed"}
        found: list[DemoHold] = []
        mine = self.about(name, "requested", "queued", "granted", "released")
        for who in sorted({each.who for each in mine}):
            requested = queued = None
            for event in (each for each in mine if each.who == who):
                if event.what == "requested":
                    requested, queued = event, None
                elif event.what == "queued":
                    queued = event
                elif event.what == "granted":
                    assert requested is not None, "a grant follows a request"
                    assert event.token is not None, "a grant has a token"
                    found.append(
                        DemoHold(
                            who,
                            event.token,
                            event.count,
                            requested.at,
                            event.at if queued is None else queued.at,
                            event.at,
                            killed.get(who, float("inf")),
                            killed=who in killed,
                        )
                    )
                else:
                    found.append(replace(found.pop(), ended=event.at, killed=False))
        return sorted(found, key=lambda each: each.granted)

    # The checks

    def check_limit(self, name: str, limit: int) -> Finding:
        """Check that never more than the limit was held."""
        holds = self.holds(name)
        # A request that ends in the instant in which another begins does not overlap it.
        steps = sorted(
            step
            for each in holds
            for step in ((each.granted, each.count), (each.ended, -each.count))
        )
        most = max(itertools.accumulate((count for _, count in steps)), default=0)
        what = "overlaps" if limit == 1 else f"more than {limit} at once"
        if not holds or most > limit:
            return Finding(False, f"{name}: {most} held at once, of {limit}")
        return Finding(True, f"{name}: {len(holds)} grants, at most {most} at once; {what}: none")

    def check_tokens(self, name: str, limit: int) -> Finding:
        """Check that a request granted after the end of another has a higher token.

        A process may record its grant late. So two requests that fit into the limit together are
        compared only if one ended before the other was sent.
        """
        holds = self.holds(name)
        pairs = [
            (a, b)
            for a, b in itertools.permutations(holds, 2)
            if a.ended <= (b.granted if a.count + b.count > limit else b.requested)
        ]
        wrong = [(a, b) for a, b in pairs if a.token >= b.token]
        if wrong:
            before, after = wrong[0]
            return Finding(
                False,
                f"{name}: {after.who} has token {after.token}, after {before.who} with "
                f"{before.token}",
            )
        return Finding(bool(pairs), f"{name}: fencing tokens rise in all {len(pairs)} comparisons")

    def check_arrival(self, name: str) -> Finding:
        """Check that a request queued before another was sent is granted before it."""
        holds = self.holds(name)
        pairs = [(a, b) for a, b in itertools.permutations(holds, 2) if a.queued < b.requested]
        wrong = [(a, b) for a, b in pairs if a.token > b.token]
        if wrong:
            first, second = wrong[0]
            return Finding(
                False, f"{name}: {second.who} came after {first.who}, and was served before"
            )
        return Finding(
            bool(pairs), f"{name}: served in the order of arrival in all {len(pairs)} comparisons"
        )

    def check_looks(self, name: str) -> Finding:
        """Check that the owners were always the longest queue prefix within the limit."""
        looks = [each for each in self.looks if each.name == name]
        for look in looks:
            queue = sorted((*look.owners, *look.waiters))
            fitting = 0
            for position, (_, count) in enumerate(queue):
                fitting += count
                if fitting > look.limit:
                    queue = queue[:position]
                    break
            if sorted(look.owners) != queue:
                return Finding(False, f"{name}: owners {look.owners}, waiters {look.waiters}")
        busy = sum(bool(each.waiters) for each in looks)
        return Finding(
            bool(busy),
            f"{name}: in order, and never idle, in {busy} looks into a queue that waited",
        )

    def check_takeover(self, name: str) -> Finding:
        """Check that another process led after the leader was killed; the figure is the delay."""
        for kill in (each for each in self.events if each.what == "killed"):
            holds = self.holds(name)
            after = [each for each in holds if each.granted > kill.at and each.who != kill.who]
            if any(each.who == kill.who for each in holds) and after:
                gap = after[0].granted - kill.at
                text = f"{name}: {after[0].who} took over from {kill.who} after its kill -9"
                return Finding(True, text, gap)
        return Finding(False, f"{name}: no process took over from a killed leader")

    def check_watchers(self, name: str, watchers: Iterable[str]) -> Finding:
        """Check that all watchers saw states in order, up to the last; the figure is the delay."""
        written = self.about(name, "written")
        order = {each.data: number for number, each in enumerate(written)}
        when = {each.data: each.at for each in written}
        delays: list[float] = []
        for who in watchers:
            seen = [each for each in self.about(name, "seen") if each.who == who]
            numbers = [order.get(each.data, -1) for each in seen]
            wrong = -1 in numbers or numbers != sorted(set(numbers))
            if wrong or not seen or numbers[-1] != len(written) - 1:
                states = [each.data for each in seen]
                return Finding(False, f"{name}: {who} has seen {states}")
            delays += [each.at - when[each.data] for each in seen if each.data in when]
        if not delays:
            return Finding(False, f"{name}: no process has seen anything")
        text = (
            f"{name}: every watcher saw the last of {len(written)} states, none went back; median"
        )
        return Finding(True, f"{text} delay", statistics.median(delays))
