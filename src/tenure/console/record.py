"""Record of the last minutes of a store: requests, events, and the present state in brief.

A state machine without I/O. Its owner passes in what each reading of the store found, and views
draw timelines and lists of events from it. Rules:

* **Readings, not pushes.** A request that came and went between two readings is not recorded. The
  times of grants are those of the store, as far as it knows them. The end of a request is placed at
  the grant that followed it, else at the reading that missed it.
* **Bounded.** At most `MOST_SEMAPHORES` semaphores are followed, of each its first `OWNERS` owners
  and first waiters, and `MOST_PAST` ended requests and `MOST_EVENTS` events are kept. Of data only
  its size, its digest and a short beginning are kept.
* **The first reading** of a semaphore shows a state and no event.

All times are those of one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import nlargest
from typing import Literal, TypeAlias

from tenure.identity import holder_name, semaphore_with_identities
from tenure.model import EPHEMERAL_LIMIT, RequestDescription, SemaphoreDescription
from tenure.shown import kind, safe, shown_data

KEEP = 300.0
"""Seconds for which ended requests are kept."""

MOST_SEMAPHORES = 20_000
MOST_PAST = 20_000
MOST_EVENTS = 1_000
OWNERS = 50
BEGINNING = 160
"""Bytes that are kept of an owner's data."""

_SLACK = 0.5  # seconds by which the clocks of two readings may differ

EventKind: TypeAlias = Literal[
    "queued",
    "granted",
    "ended",
    "withdrawn",
    "created",
    "deleted",
    "data changed",
    "limit changed",
    "node created",
    "node dropped",
]


@dataclass(slots=True)
class Span:
    """One request, as far as it was seen.

    Attributes:
        label: the program of its session.
        count: number of tokens; ``None`` for all.
        joined: the time at which it joined the queue; ``None``: before it was first seen.
        granted: the time of its grant; ``None``: it waits, or left without one.
        ended: the time at which it left the queue; ``None``: it is still there.
        beginning: the beginning of an owner's data.
    """

    order_id: int
    session_id: int
    label: str
    count: int | None
    joined: float | None
    granted: float | None
    ended: float | None = None
    beginning: bytes = b""

    @property
    def data(self) -> str:
        """The beginning of an owner's data, made visible."""
        return shown_data(self.beginning, BEGINNING // 4)


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """A change between two readings.

    Attributes:
        number: rises with each event.
        at: the time of the change.
        what: the kind of change.
        node: the node.
        name: the semaphore; empty if the event is about the node.
        label: the program of the request, if it is about one.
        order_id: the order id of the request.
        lasted: seconds for which the request waited (granted, withdrawn) or owned (ended).
        detail: the new data or limit.
    """

    number: int
    at: float
    what: EventKind
    node: str
    name: str = ""
    label: str = ""
    order_id: int | None = None
    lasted: float | None = None
    detail: str = ""


@dataclass(slots=True)
class Seen:
    """A semaphore that is followed, and what its last reading found.

    Attributes:
        exists: whether the last reading found it; a mutex that is free does not exist.
        changed: the time of the last change of its owners or its number of waiters.
        missing: its former waiters; the next reading of the owners shows whether they are owners
            now, because the waiters are read after the owners.
        past: its requests that have ended, in the order of their ends.
    """

    node: str
    name: str
    kind: str
    limit: int
    held: int
    waiting: int
    ephemeral: bool
    digest: bytes
    read_at: float
    changed: float
    exists: bool = True
    round: int = 0
    owners: dict[int, Span] = field(default_factory=dict)
    waiters: dict[int, Span] = field(default_factory=dict)
    missing: dict[int, Span] = field(default_factory=dict)
    past: deque[Span] = field(default_factory=deque)

    def spans(self) -> Iterator[Span]:
        """Iterate over its requests: those that ended, the owners, the waiters."""
        yield from self.past
        yield from self.owners.values()
        yield from self.waiters.values()
        yield from self.missing.values()


Allowed: TypeAlias = Callable[[str], bool]
"""Returns true for a node that the reader of the record may see."""


class StoreRecord:
    """Record of one store.

    Attributes:
        full: whether the store has more semaphores than are followed.
        rounds: number of complete readings.
    """

    def __init__(self) -> None:
        self.full = False
        self.rounds = 0
        self._nodes: frozenset[str] | None = None
        self._seen: dict[str, dict[str, Seen]] = {}
        self._count = 0
        self._past: deque[Seen] = deque()
        self._events: deque[StoreEvent] = deque(maxlen=MOST_EVENTS)
        self._number = 0
        self._previous = self._began = float("-inf")  # times at which the last two rounds began

    # Readings

    def saw_nodes(self, paths: Iterable[str], now: float) -> None:
        """Record the list of nodes."""
        nodes = frozenset(paths)
        before, self._nodes = self._nodes, nodes
        if before is not None:
            for path in sorted(nodes - before):
                self._event(now, "node created", path)
            for path in sorted(before - nodes):
                self._event(now, "node dropped", path)
        for path in set(self._seen) - nodes:
            for each in self._seen[path].values():
                self._missing(each, now)

    def begin(self, now: float) -> None:
        """Record that a complete reading begins."""
        self.full = False
        self.rounds += 1
        self._previous, self._began = self._began, now

    def finish(self, node: str, now: float) -> None:
        """Record that all semaphores of a node have been read in this round."""
        for each in self._seen.get(node, {}).values():
            if each.exists and each.round != self.rounds:
                self._missing(each, now)

    def forget_old(self, now: float) -> None:
        """Forget requests that ended long ago, and semaphores that left nothing else."""
        past = self._past
        while past and (len(past) > MOST_PAST or (past[0].past[0].ended or 0.0) < now - KEEP):
            self._forget_oldest()
        for names in list(self._seen.values()):
            for each in [each for each in names.values() if not (each.exists or each.past)]:
                self._forget(each)

    def _forget_oldest(self) -> None:
        """Forget the request that ended first."""
        seen = self._past.popleft()
        seen.past.popleft()
        if not (seen.exists or seen.past):
            self._forget(seen)

    def _forget(self, seen: Seen) -> None:
        names = self._seen[seen.node]
        del names[seen.name]
        self._count -= 1
        if not names:
            del self._seen[seen.node]

    def saw(
        self,
        node: str,
        described: SemaphoreDescription,
        now: float,
        waiters: Sequence[RequestDescription] | None = None,
    ) -> None:
        """Record a reading of one semaphore.

        Args:
            node: its node.
            described: the semaphore with its owners.
            now: the time of the reading.
            waiters: its first waiters in order; ``None``: not read.
        """
        names = self._seen.setdefault(node, {})
        seen = names.get(described.name)
        if seen is None:
            while self._count >= MOST_SEMAPHORES and self._past:
                self._forget_oldest()
            if self._count >= MOST_SEMAPHORES:
                self.full = True
                return
            names = self._seen.setdefault(node, {})
            self._count += 1
            seen = names[described.name] = Seen(
                node,
                described.name,
                kind(described),
                described.limit,
                described.held,
                0,
                described.ephemeral,
                _digest(described.data),
                now,
                now,
            )
            before = self._previous
            self._first(seen, described, now)
        else:
            before = seen.read_at
            self._again(seen, described, now)
        if waiters is None and not described.waiting:
            waiters = ()
        if waiters is not None:
            truncated = len(described.owners) > OWNERS
            self._queue(seen, waiters, now, before, truncated=truncated)
        waiting = described.waiting or 0
        if waiting != seen.waiting:
            seen.waiting = waiting
            seen.changed = now
        seen.read_at = now
        seen.round = self.rounds

    def _first(self, seen: Seen, described: SemaphoreDescription, now: float) -> None:
        """Record the first reading of a semaphore."""
        if self.rounds > 1 and not described.ephemeral:
            self._event(now, "created", seen.node, seen.name)
        for each in described.owners[:OWNERS]:
            span = _span(each, now)
            seen.owners[each.order_id] = span
            if self.rounds > 1 and (span.granted or now) >= self._previous - _SLACK:
                self._granted(seen, span, now)

    def _again(self, seen: Seen, described: SemaphoreDescription, now: float) -> None:
        """Record a later reading of a semaphore."""
        before = seen.read_at
        if not seen.exists:
            seen.exists = True
            if not described.ephemeral:
                self._event(now, "created", seen.node, seen.name)
        owners = described.owners[:OWNERS]
        if seen.owners.keys() != {each.order_id for each in owners}:
            self._owners(seen, owners, now, before)
            seen.changed = now
        self._withdraw_missing(seen, before)
        for each in owners:
            self._altered(seen, seen.owners[each.order_id], each, now)
        seen.held = described.held
        if described.limit != seen.limit:
            seen.limit = described.limit
            limit = "" if described.limit == EPHEMERAL_LIMIT else f"{described.limit}"
            self._event(now, "limit changed", seen.node, seen.name, detail=limit)
        digest = _digest(described.data)
        if digest != seen.digest:
            seen.digest = digest
            detail = shown_data(described.data)
            self._event(now, "data changed", seen.node, seen.name, detail=detail)
        if seen.ephemeral != described.ephemeral or described.owners or not described.ephemeral:
            seen.kind = kind(described)
        seen.ephemeral = described.ephemeral

    def _owners(
        self,
        seen: Seen,
        owners: Sequence[RequestDescription],
        now: float,
        before: float,
    ) -> None:
        """Record other owners than at the reading before."""
        added = []
        for each in owners:
            if each.order_id not in seen.owners:
                known = seen.waiters.pop(each.order_id, None)
                known = known or seen.missing.pop(each.order_id, None)
                span = _span(each, now)
                if known is not None:
                    span.joined = known.joined
                added.append(span)
        recent = [each for each in added if (each.granted or now) >= before - _SLACK]
        gone = set(seen.owners) - {each.order_id for each in owners}
        # A grant shows that there was room by then.
        full = seen.held >= seen.limit
        followed = [each.granted or now for each in recent if full or each.joined is not None]
        ended_at = min(followed, default=now)
        for order_id in sorted(gone):
            span = seen.owners.pop(order_id)
            self._end(seen, span, max(ended_at, span.granted or ended_at))
            lasted = None if span.granted is None else max(0.0, ended_at - span.granted)
            self._request_event(ended_at, "ended", seen, span, lasted)
        for span in added:
            seen.owners[span.order_id] = span
        for span in recent:
            self._granted(seen, span, now)

    def _altered(self, seen: Seen, span: Span, owner: RequestDescription, now: float) -> None:
        """Record another count or other data of an owner, such as a proclaim of a leader."""
        span.count = _count(owner)
        beginning = owner.data[:BEGINNING]
        if beginning != span.beginning:
            span.beginning = beginning
            seen.changed = now
            facts = span.label, span.order_id, None, span.data
            self._event(now, "data changed", seen.node, seen.name, *facts)

    def _granted(self, seen: Seen, span: Span, now: float) -> None:
        waited = None
        if span.joined is not None and span.granted is not None:
            waited = max(0.0, span.granted - span.joined)
        self._request_event(span.granted or now, "granted", seen, span, waited)

    def _queue(
        self,
        seen: Seen,
        waiters: Sequence[RequestDescription],
        now: float,
        before: float,
        *,
        truncated: bool,
    ) -> None:
        """Record the first waiters; `truncated`: not all owners are followed."""
        present = {each.order_id for each in waiters}
        for order_id in [each for each in seen.waiters if each not in present]:
            span = seen.waiters.pop(order_id)
            if not truncated:  # else it may be one of the other owners
                seen.missing[order_id] = span
        for each in waiters:
            if each.order_id not in seen.waiters:
                joined = now if each.since is None else now - each.since
                span = Span(
                    each.order_id, each.session_id, _label(each), _count(each), joined, None
                )
                seen.waiters[each.order_id] = span
                if self.rounds > 1 and joined >= before - _SLACK:
                    self._request_event(joined, "queued", seen, span, None)

    def _withdraw_missing(self, seen: Seen, at: float) -> None:
        """Record that former waiters are not owners."""
        for span in seen.missing.values():
            self._end(seen, span, at)
            waited = None if span.joined is None else max(0.0, at - span.joined)
            self._request_event(at, "withdrawn", seen, span, waited)
        seen.missing.clear()

    def _missing(self, seen: Seen, now: float) -> None:
        """Record that a semaphore does not exist any more."""
        if not seen.exists:
            return
        self._withdraw_missing(seen, seen.read_at)
        for span in (*seen.owners.values(), *seen.waiters.values()):
            what: EventKind = "withdrawn" if span.granted is None else "ended"
            begun = span.joined if span.granted is None else span.granted
            lasted = None if begun is None else max(0.0, now - begun)
            self._end(seen, span, now)
            self._request_event(now, what, seen, span, lasted)
        seen.owners.clear()
        seen.waiters.clear()
        seen.held = seen.waiting = 0
        seen.exists = False
        seen.changed = now
        if not seen.ephemeral:
            self._event(now, "deleted", seen.node, seen.name)

    def _end(self, seen: Seen, span: Span, at: float) -> None:
        span.ended = at
        seen.past.append(span)
        self._past.append(seen)

    def _request_event(
        self, at: float, what: EventKind, seen: Seen, span: Span, lasted: float | None
    ) -> None:
        self._event(at, what, seen.node, seen.name, span.label, span.order_id, lasted)

    def _event(
        self,
        at: float,
        what: EventKind,
        node: str,
        name: str = "",
        label: str = "",
        order_id: int | None = None,
        lasted: float | None = None,
        detail: str = "",
    ) -> None:
        self._number += 1
        self._events.append(
            StoreEvent(self._number, at, what, node, name, label, order_id, lasted, detail)
        )

    # What views read

    def find(self, node: str, name: str) -> Seen | None:
        """Return a semaphore that is followed."""
        return self._seen.get(node, {}).get(name)

    def events(
        self, allowed: Allowed, *, most: int, after: int = 0, node: str = "", name: str = ""
    ) -> list[StoreEvent]:
        """Return the latest events, the newest first.

        Args:
            allowed: returns true for a node whose events may be returned.
            most: number of events to return, at most.
            after: return only events with a greater number.
            node: return only events of this node; empty for all.
            name: return only events of this semaphore; empty for all.
        """
        found: list[StoreEvent] = []
        visible: dict[str, bool] = {}
        for each in reversed(self._events):
            if each.number <= after or len(found) == most:
                break
            if (node and each.node != node) or (name and each.name != name):
                continue
            if each.node not in visible:
                visible[each.node] = allowed(each.node)
            if visible[each.node]:
                found.append(each)
        return found

    def liveliest(self, allowed: Allowed, most: int, node: str = "") -> list[Seen]:
        """Return semaphores whose owners or waiters changed last, sorted by node and name."""
        chosen = nlargest(
            most,
            (each for each in self._all(allowed, node) if each.owners or each.past or each.waiting),
            key=lambda each: (bool(each.waiting), each.changed),
        )
        return sorted(chosen, key=lambda each: (each.node, each.name))

    def longest_queues(self, allowed: Allowed, most: int) -> list[Seen]:
        """Return the semaphores with the most waiters, the longest queue first."""
        return nlargest(
            most,
            (each for each in self._all(allowed) if each.waiting),
            key=lambda each: each.waiting,
        )

    def of_session(
        self, allowed: Allowed, node: str, session_id: int, most: int
    ) -> list[tuple[Seen, Span]]:
        """Return the present requests of a session, as far as they are followed."""
        found: list[tuple[Seen, Span]] = []
        for seen in self._all(allowed, node):
            for span in (*seen.owners.values(), *seen.waiters.values()):
                if span.session_id == session_id:
                    if len(found) == most:
                        return found
                    found.append((seen, span))
        return found

    def totals(self, allowed: Allowed) -> Totals:
        """Return the sums over what is followed."""
        semaphores = held = waiting = 0
        for each in self._all(allowed):
            if each.exists:
                semaphores += 1
                held += each.held > 0
                waiting += each.waiting
        return Totals(semaphores, held, waiting)

    def _all(self, allowed: Allowed, node: str = "") -> Iterator[Seen]:
        for path, names in self._seen.items():
            if (not node or path == node) and allowed(path):
                yield from names.values()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the semaphores of some nodes.

    Attributes:
        semaphores: number of semaphores.
        held: number of those that have an owner.
        waiting: number of waiters.
    """

    semaphores: int
    held: int
    waiting: int


def _span(owner: RequestDescription, now: float) -> Span:
    granted = None if owner.since is None else now - owner.since
    span = Span(owner.order_id, owner.session_id, _label(owner), _count(owner), None, granted)
    span.beginning = owner.data[:BEGINNING]
    return span


def _label(request: RequestDescription) -> str:
    (each,) = semaphore_with_identities(
        SemaphoreDescription("", b"", 1, 0, ephemeral=True, owners=(request,))
    ).owners
    described = each.session_description or ""
    if described and described.startswith(each.program or ""):
        # Such as "tenure run backup.sh" of the program "tenure".
        return holder_name(replace(each, program=described[:80]))
    label = holder_name(each)
    return f"{label} ({safe(described[:80])})" if described else label


def _count(request: RequestDescription) -> int | None:
    return None if request.count == EPHEMERAL_LIMIT else request.count


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest() if data else b""
