"""Index over a history by request and process, built once for all rules.

A `RequestEntry` has the known facts of one request, from the instant at which it was made. It only
states certain facts:

* The request is *held* from the instant at which its program was notified of the grant
  (`RequestEntry.held_between`), until the request may leave (it is about to be withdrawn, released
  or revoked, or its process killed), or until its latest known deadline.
* The request is *in its queue* until it may leave, until its timeout has passed without a grant, or
  until its process was paused for so long that its session may have ended.

Everything else is unknown, so a rule never reports a violation based on a guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from tenure.core.rules import EXACT
from tenure.testing.history.records import (
    Called,
    Continued,
    Crashed,
    Deadlocked,
    Described,
    Gone,
    Granted,
    Held,
    History,
    Leaves,
    Observed,
    Paused,
    Queued,
    Record,
    Refunds,
    Requested,
    Returned,
    Revokes,
    Shrinks,
    Takes,
    Took,
    Truth,
    Unobserved,
)
from tenure.testing.history.timeline import Violation

Place = tuple[str, str]
"""Node and name of a semaphore."""

ROUNDING = 1e-6
"""Maximum error of a conversion between clocks, in seconds."""

_SHORT_PAUSE = 1 / 3
"""Fraction of the recovery window for which a paused process certainly keeps its session."""


class RequestEntry:
    """Everything that is known about one request.

    Attributes:
        requested, granted, gone: the first record of each kind, if there is one.
        order_id, placed_at: its order id, and the instant since which that is known.
        count: its number of tokens; 1 if the limit is so high that it means "unbounded" and the
            request does not take all of it.
        end: the instant from which it may have left its queue; `ended_by` is the reason.
        deadline: the latest known deadline of the lease; infinite before the grant.
        shrinks: the instants at which it may have released some tokens, each with the number of
            kept tokens.
        floor: the request with the greatest order id that was known when this one was made.
    """

    __slots__ = (
        "count",
        "deadline",
        "end",
        "ended_by",
        "floor",
        "gone",
        "granted",
        "order_id",
        "placed_at",
        "requested",
        "shrinks",
    )

    def __init__(self, requested: Requested) -> None:
        self.requested = requested
        self.count = _share(requested.count, requested.limit)
        self.granted: Granted | None = None
        self.gone: Gone | None = None
        self.order_id: int | None = None
        self.placed_at = inf
        self.end = inf
        self.ended_by: Record | None = None
        self.deadline = inf
        self.shrinks: list[tuple[float, int]] = []
        self.floor: RequestEntry | None = None

    @property
    def place(self) -> Place:
        """Node and name of the semaphore."""
        return self.requested.node, self.requested.name

    @property
    def held_between(self) -> tuple[float, float] | None:
        """Start and end of the time in which its program certainly held it, or ``None``."""
        if self.granted is None:
            return None
        end = min(self.end, self.deadline)
        return (self.granted.at, end) if end > self.granted.at else None

    @property
    def grace(self) -> float:
        """Seconds after a deadline within which its program must be notified of the loss."""
        return max(0.05 * self.requested.window, 0.1)

    @property
    def least_count(self) -> int:
        """The number of tokens that it certainly takes until its end."""
        return min([self.count, *(count for _, count in self.shrinks)])

    def leave(self, at: float, why: Record) -> None:
        """Record that from an instant on it may have left its queue, and why."""
        if at < self.end:
            self.end = at
            self.ended_by = why


class Change:
    """A change of a limit, which happened between two instants; `end` is infinite if unknown."""

    __slots__ = ("end", "limit", "start")

    def __init__(self, start: float, limit: int) -> None:
        self.start = start
        self.end = inf
        self.limit = limit


class TakeEntry:
    """Everything that is known about one take of a rate.

    Attributes:
        takes, took: its records; without the second it may or may not have been carried out.
        refunds: its records of refunds.
    """

    __slots__ = ("refunds", "takes", "took")

    def __init__(self, takes: Takes) -> None:
        self.takes = takes
        self.took: Took | None = None
        self.refunds: list[Refunds] = []

    @property
    def count(self) -> int:
        """The number of tokens that certainly stay counted."""
        return self.takes.count - sum(each.count for each in self.refunds)

    @property
    def records(self) -> list[Record]:
        """Its records."""
        took = [] if self.took is None else [self.took]
        return [self.takes, *took, *self.refunds]


def _share(count: int, limit: int) -> int:
    return count if count == limit or limit <= EXACT else 1


@dataclass(slots=True)
class Pause:
    """Period in which a process was paused; `end` is infinite if it was never resumed."""

    start: float
    end: float


class HistoryIndex:
    """Index over one history.

    Attributes:
        history: the history.
        entries: the requests, by label.
        places: the requests of each place, in the order of their creation.
        again: requests that were granted or held after their end, each with that record.
        replaced: requests that were granted with a second order id, each with that record.
        late: requests that were held after their deadline, each with that record.
        pauses: the pauses of each process, in order.
        crashed: the first `Crashed` record of each process that crashed.
        calls, returned: the calls on data by place, and the returns by call, with their positions
            in the history.
        observed: the records of each observer of each place, in order.
        unobserved: the processes and observers whose watch has ended, with the instant.
        truths: the final states, with their positions in the history.
        described: what descriptions showed.
        takes: the takes of each rate, in the order of their calls.
        deadlocked: the reports of deadlocks.
    """

    def __init__(self, history: History) -> None:
        """Index the records of `history` in order."""
        self.history = history
        self.entries: dict[str, RequestEntry] = {}
        self.places: dict[Place, list[RequestEntry]] = {}
        self.again: list[tuple[RequestEntry, Record]] = []
        self.replaced: list[tuple[RequestEntry, Granted]] = []
        self.late: list[tuple[RequestEntry, Held]] = []
        self.pauses: dict[str, list[Pause]] = {}
        self.crashed: dict[str, Crashed] = {}
        self.calls: dict[Place, list[tuple[int, Called]]] = {}
        self.returned: dict[str, tuple[int, Returned]] = {}
        self._changes: dict[Place, dict[str, Change]] = {}  # of limits, by call
        self._deleted: set[tuple[str | None, str | None]] = set()  # places, perhaps created again
        self.observed: dict[tuple[str, Place], list[Observed]] = {}
        self.unobserved: dict[tuple[str, str], float] = {}
        self.truths: list[tuple[int, Truth]] = []
        self.described: list[Described] = []
        self.takes: dict[Place, list[TakeEntry]] = {}
        self.deadlocked: list[Deadlocked] = []
        self._takes: dict[str, TakeEntry] = {}
        self._index = 0
        self._greatest: RequestEntry | None = None  # among those known for at least the skew
        self._lately: deque[tuple[float, RequestEntry]] = deque()  # instant from which it counts
        self._present: dict[str, dict[str, RequestEntry]] = {}  # of each process, not gone
        handlers: dict[type, Callable[[Any], None]] = {
            Requested: self._requested,
            Queued: self._queued,
            Granted: self._granted,
            Held: self._held,
            Shrinks: self._shrinks,
            Leaves: self._leaves,
            Gone: self._gone,
            Revokes: self._revokes,
            Paused: self._paused,
            Continued: self._continued,
            Crashed: self._crashed,
            Called: self._called,
            Returned: self._returned,
            Observed: self._observed,
            Unobserved: self._unobserved,
            Truth: self._truth,
            Described: self.described.append,
            Deadlocked: self.deadlocked.append,
            Takes: self._take,
            Took: self._took,
            Refunds: self._refunds,
        }
        for self._index, record in enumerate(history.records):
            handlers[type(record)](record)

    # Queries

    def limits(self, entry: RequestEntry, start: float, end: float) -> list[int]:
        """Return the limits that a request's semaphore may have had between two instants."""
        skew, place = self.history.skew, entry.place
        changes = [*self._changes.get(place, {}).values()]

        def is_over(since: float) -> bool:
            """Return whether a change that ended at `since` was replaced before `start`."""
            return any(each.start > since + skew and each.end + skew < start for each in changes)

        found = [
            each.limit for each in changes if each.start <= end + skew and not is_over(each.end)
        ]
        node, name = place
        deleted = self._deleted & {place, (node, None), (None, name), (None, None)}
        if deleted or not is_over(-inf):
            found.append(entry.requested.limit)
        return found

    def most_tokens(self, entry: RequestEntry) -> int:
        """Return the highest limit that a semaphore may have had when a request was granted."""
        requested, granted = entry.requested, entry.granted
        start = requested.at if requested.recovers is None else -inf
        return max(self.limits(entry, start, inf if granted is None else granted.at))

    def least_tokens(self, place: Place) -> int:
        """Return the lowest limit that a semaphore may have had at any time."""
        changed = [each.limit for each in self._changes.get(place, {}).values()]
        return min([*changed, *(entry.requested.limit for entry in self.places[place])])

    def in_queue_until(self, entry: RequestEntry) -> float:
        """Return the instant until which it was certainly in its queue, if it ever was."""
        requested, end = entry.requested, entry.end
        gone = entry.gone
        if gone is not None and gone.deadline is not None:
            end = min(end, gone.deadline)  # after its deadline the session may have expired
        elif gone is not None and gone.why == "failed":
            return requested.at  # it may never have entered the queue
        if entry.granted is None and requested.timeout is not None:
            end = min(end, requested.at + requested.timeout)
        if requested.process in self.pauses:
            most = requested.window * _SHORT_PAUSE
            for pause in self._long_pauses(requested.process, requested.at, most):
                return min(end, pause.start)
        return end

    def may_stay_until(self, entry: RequestEntry) -> float:
        """Return the instant until which it may have been in its queue.

        A program that is cut off ends its wait or its lease before the store knows, at the latest
        when the session expires.
        """
        later = entry.requested.window + entry.grace + self.history.slack + self.history.skew
        if entry.gone is not None:
            return entry.gone.at + later
        crashed = self.crashed.get(entry.requested.process)
        return inf if crashed is None else crashed.at + later

    def _long_pauses(self, process: str, since: float, most: float) -> Iterator[Pause]:
        """Yield the pauses since an instant that exceed `most` seconds, merging close ones."""
        whole: Pause | None = None
        for pause in self.pauses.get(process, ()):
            if pause.end < since:
                continue
            near = whole is not None and pause.start - whole.end < most
            whole = Pause(whole.start if whole and near else pause.start, pause.end)
            if whole.end - whole.start > most:
                yield whole

    def excused_until(self, process: str, due: float, grace: float) -> float:
        """Return the instant until which the pauses of a process excuse a delay."""
        for pause in self.pauses.get(process, ()):
            if pause.start <= due < pause.end + grace:
                due = pause.end + grace
        return due

    def accuse(
        self,
        rule: str,
        place: Place,
        what: str,
        entries: Sequence[RequestEntry],
        *conflict: Record | None,
    ) -> Violation:
        """Return a violation with all records about some requests and their processes."""
        labels = {entry.requested.request for entry in entries}
        processes = {entry.requested.process for entry in entries}
        others = {id(entry.ended_by) for entry in entries} | {id(record) for record in conflict}
        start = min((entry.requested.at for entry in entries), default=inf)
        ends = (entry.end if entry.gone is None else entry.gone.at for entry in entries)
        end = max(ends, default=inf)
        records = tuple(
            record
            for record in self.history.records
            if getattr(record, "request", None) in labels
            or id(record) in others
            or (
                isinstance(record, Paused | Continued | Crashed)
                and record.process in processes
                and start <= record.at <= end
            )
        )
        marked = tuple(record for record in conflict if record is not None)
        return Violation(rule, *place, what, records, marked)

    # Records

    def _requested(self, record: Requested) -> None:
        if record.request in self.entries:
            raise ValueError(f"two requests of this history are called {record.request!r}")
        entry = RequestEntry(record)
        entry.floor = self._known_by(record.at)
        self.entries[record.request] = entry
        self.places.setdefault(entry.place, []).append(entry)
        crashed = self.crashed.get(record.process)
        if crashed is not None:  # the crash is recorded first, and the process ran on briefly
            entry.leave(record.at, crashed)
        if any(
            each.end == inf and record.count > each.limit
            for each in self._changes.get(entry.place, {}).values()
        ):
            entry.leave(record.at, record)  # the limit is being changed, perhaps after it joins
        self._present.setdefault(record.process, {})[record.request] = entry

    def _entry(self, record: Queued | Granted | Held | Shrinks | Leaves | Gone) -> RequestEntry:
        try:
            return self.entries[record.request]
        except KeyError:
            raise ValueError(f"there is no request for this record: {record}") from None

    def _queued(self, record: Queued) -> None:
        entry = self._entry(record)
        if entry.order_id is None:
            self._place(entry, record.at, record.order_id)

    def _place(self, entry: RequestEntry, at: float, order_id: int) -> None:
        entry.order_id = order_id
        entry.placed_at = at
        self._lately.append((at + self.history.skew, entry))

    def _known_by(self, at: float) -> RequestEntry | None:
        while self._lately and self._lately[0][0] <= at:
            entry = self._lately.popleft()[1]
            if self._greatest is None or (entry.order_id or 0) > (self._greatest.order_id or 0):
                self._greatest = entry
        return self._greatest

    def _granted(self, record: Granted) -> None:
        entry = self._entry(record)
        if entry.gone is not None:
            self.again.append((entry, record))
        elif entry.granted is None:
            entry.granted = record
            entry.deadline = record.deadline
        if record.order_id is not None:
            if entry.order_id is None:
                self._place(entry, record.at, record.order_id)
            elif entry.order_id != record.order_id:
                self.replaced.append((entry, record))

    def _held(self, record: Held) -> None:
        entry = self._entry(record)
        entry.deadline = record.deadline
        if entry.gone is not None or isinstance(entry.ended_by, Leaves):
            self.again.append((entry, record))
        if record.at > record.deadline + ROUNDING:
            self.late.append((entry, record))

    def _shrinks(self, record: Shrinks) -> None:
        entry = self._entry(record)
        entry.shrinks.append((record.at, _share(record.count, entry.requested.limit)))

    def _leaves(self, record: Leaves) -> None:
        self._entry(record).leave(record.at, record)

    def _gone(self, record: Gone) -> None:
        entry = self._entry(record)
        if entry.gone is None:
            entry.gone = record
            entry.leave(record.at, record)
            if record.deadline is not None and entry.granted is not None:
                entry.deadline = record.deadline
            self._present.get(entry.requested.process, {}).pop(record.request, None)

    def _revokes(self, record: Revokes) -> None:
        concerned: Sequence[dict[str, RequestEntry]]
        if record.request is None and record.session_of is None:
            self._deleted.add((record.node, record.name))
        if record.session_of is not None:
            concerned = [self._present.get(record.session_of, {})]
        else:
            concerned = list(self._present.values())
        for entries in concerned:
            for label, entry in entries.items():
                requested = entry.requested
                if (
                    record.request in (None, label)
                    and record.node in (None, requested.node)
                    and record.name in (None, requested.name)
                ):
                    entry.leave(record.at if record.since is None else record.since, record)

    def _paused(self, record: Paused) -> None:
        self.pauses.setdefault(record.process, []).append(Pause(record.at, inf))

    def _continued(self, record: Continued) -> None:
        for pause in reversed(self.pauses.get(record.process, [])):
            if pause.end == inf:
                pause.end = record.at
                break

    def _crashed(self, record: Crashed) -> None:
        self.crashed.setdefault(record.process, record)
        pauses = self.pauses.get(record.process, [])
        at = min([record.at, *(pause.start for pause in pauses if pause.end == inf)])
        for entry in self._present.pop(record.process, {}).values():
            entry.leave(at, record)

    def _called(self, record: Called) -> None:
        place = (record.node, record.name)
        if record.op == "resize":
            limit = int(record.argument or b"0")
            self._changes.setdefault(place, {})[record.call] = Change(record.at, limit)
            for entries in self._present.values():
                for entry in entries.values():
                    if entry.place == place and entry.requested.count > limit:
                        entry.leave(record.at, record)  # unless it owns, it leaves
            return
        if record.op == "delete":
            self._deleted.add(place)
        calls = self.calls.setdefault((record.node, record.name), [])
        calls.append((self._index, record))

    def _returned(self, record: Returned) -> None:
        for changes in self._changes.values():
            change = changes.get(record.call)
            if change is not None and record.outcome == "ok":
                change.end = record.at
            elif change is not None and record.outcome != "unknown":
                del changes[record.call]
        self.returned[record.call] = (self._index, record)

    def _observed(self, record: Observed) -> None:
        key = (record.observer, (record.node, record.name))
        self.observed.setdefault(key, []).append(record)
        self.unobserved.pop((record.process, record.observer), None)

    def _unobserved(self, record: Unobserved) -> None:
        self.unobserved[record.process, record.observer] = record.at

    def _truth(self, record: Truth) -> None:
        self.truths.append((self._index, record))

    def _take(self, record: Takes) -> None:
        if record.take in self._takes:
            raise ValueError(f"two takes of this history are called {record.take!r}")
        entry = self._takes[record.take] = TakeEntry(record)
        self.takes.setdefault((record.node, record.name), []).append(entry)

    def _taken(self, record: Took | Refunds) -> TakeEntry:
        try:
            return self._takes[record.take]
        except KeyError:
            raise ValueError(f"there is no take for this record: {record}") from None

    def _took(self, record: Took) -> None:
        self._taken(record).took = record

    def _refunds(self, record: Refunds) -> None:
        self._taken(record).refunds.append(record)


def listed(entries: Sequence[RequestEntry]) -> str:
    """Return the labels and order ids of some requests, as part of a sentence."""
    *some, last = (
        entry.requested.request
        + ("" if entry.order_id is None else f" (order id {entry.order_id})")
        for entry in entries
    )
    return f"{', '.join(some)} and {last}" if some else last
