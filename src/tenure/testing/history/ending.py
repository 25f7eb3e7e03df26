"""Rules for the end of a history: the last values that observers saw, and the store's contents.

A `Truth` is read when all faults are repaired and the store has settled. By then the live
processes have been notified of the outcome of their requests, and lost sessions have expired in
the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tenure.testing.history.index import HistoryIndex, Place, RequestEntry, listed
from tenure.testing.history.records import Crashed, Observed, Record, Truth
from tenure.testing.history.timeline import Violation

_CONTEXT = 5
"""Maximum number of an observer's last records that a violation shows."""


def observers(index: HistoryIndex) -> Iterator[Violation]:
    """Check that observers last saw the true state, and never saw data that was not written."""
    truths = {(truth.node, truth.name): truth for _, truth in index.truths}
    for (observer, place), shown in index.observed.items():
        yield from _unwritten(index, observer, place, shown)
        truth = truths.get(place)
        if truth is None:
            continue
        before = [record for record in shown if record.at <= truth.at]  # later records do not count
        if not before or _has_stopped(index, observer, before[-1].process, truth.at):
            continue
        last = before[-1]
        true = truth.owners if isinstance(last.value, tuple) else truth.data
        if last.value != true:
            what = f"{observer} saw {place[1]!r} on {place[0]} last in a state that was not its end"
            records: tuple[Record, ...] = (*before[-_CONTEXT:], truth)
            yield Violation("observers", *place, what, records, (last, truth))


def _has_stopped(index: HistoryIndex, observer: str, process: str, at: float) -> bool:
    crashed = index.crashed.get(process)
    return index.unobserved.get((process, observer), inf) <= at or (
        crashed is not None and crashed.at <= at
    )


def _unwritten(
    index: HistoryIndex, observer: str, place: Place, shown: list[Observed]
) -> Iterator[Violation]:
    if place not in index.calls:
        return  # the history does not record what was written
    written: dict[bytes | None, float] = {}
    for _, called in index.calls[place]:
        if called.op in ("create", "ensure", "update"):
            written.setdefault(called.argument, called.at)
    for record in shown:
        known = record.at + index.history.skew
        if isinstance(record.value, bytes) and written.get(record.value, inf) > known:
            what = f"{observer} was shown data that was never written to {place[1]!r}"
            yield Violation("observers", *place, what, (record,), (record,))


def end(index: HistoryIndex) -> Iterator[Violation]:
    """Check that the store has exactly the live processes' requests, and grants all it can."""
    for _, truth in index.truths:
        place = truth.node, truth.name
        entries = index.places.get(place, [])
        yield from _missing(index, place, entries, truth)
        yield from _unexpected(index, place, entries, truth)
        yield from _ungranted(index, place, entries, truth)


def _missing(
    index: HistoryIndex, place: Place, entries: list[RequestEntry], truth: Truth
) -> Iterator[Violation]:
    """Check that every certain holder is an owner, and every certain waiter is in the queue."""
    owners = frozenset(truth.owners)
    queue = owners.union(truth.waiters)
    for entry in entries:
        if entry.order_id is None or entry.order_id in owners or entry.end <= truth.at:
            continue
        if entry.granted is not None and entry.granted.at < truth.at:
            if entry.deadline > truth.at:
                what = f"{listed([entry])} considers {place[1]!r} held, and does not own it"
                yield index.accuse("end", place, what, [entry], entry.granted, truth)
        elif (
            entry.placed_at < truth.at < index.in_queue_until(entry) and entry.order_id not in queue
        ):
            what = f"{listed([entry])} waits for {place[1]!r}, and is not in its queue"
            yield index.accuse("end", place, what, [entry], truth)


def _unexpected(
    index: HistoryIndex, place: Place, entries: list[RequestEntry], truth: Truth
) -> Iterator[Violation]:
    """Check that the queue has no ended request, and none that was never made."""
    known: dict[int, list[RequestEntry]] = {}
    nameless = 0  # requests that may be in the queue with an order id that is not recorded
    for entry in entries:
        if entry.order_id is not None:
            known.setdefault(entry.order_id, []).append(entry)
        elif not _is_out(entry, truth.at):
            nameless += 1
    strangers: list[int] = []
    for order_id in (*truth.owners, *truth.waiters):
        those = known.get(order_id)
        if those is None:
            strangers.append(order_id)
        elif all(_is_out(entry, truth.at) for entry in those):
            what = f"{listed(those)} has ended, but is still in the queue of {place[1]!r}"
            yield index.accuse("end", place, what, those, truth)
    if len(strangers) > nameless:
        ids = ", ".join(str(order_id) for order_id in strangers)
        what = f"order id {ids}: in the queue of {place[1]!r}, without a request"
        yield Violation("end", *place, what, (truth,), (truth,))


def _is_out(entry: RequestEntry, at: float) -> bool:
    """Return true if a request has certainly left its queue, now that the store has settled."""
    gone, window = entry.gone, entry.requested.window + entry.grace
    if gone is not None and gone.at < at:
        # The store may keep a lost request until the end of the recovery window.
        return gone.why not in ("lost", "failed") or at > gone.at + window
    return isinstance(entry.ended_by, Crashed) and at > entry.ended_by.at + window


def _ungranted(
    index: HistoryIndex, place: Place, entries: list[RequestEntry], truth: Truth
) -> Iterator[Violation]:
    """Check that the owners fit within the limit, and that the first waiter does not fit, too."""
    by_id = {entry.order_id: entry for entry in entries if entry.order_id is not None}
    owners = [by_id[order_id] for order_id in truth.owners if order_id in by_id]
    if truth.waiters and not truth.owners:
        what = f"{len(truth.waiters)} wait for {place[1]!r} on {place[0]}, which is free"
        yield index.accuse("end", place, what, [], truth)
        return
    held = sum(entry.least_count for entry in owners)
    if held > max((entry.requested.limit for entry in owners), default=inf):
        what = f"{listed(owners)} own {place[1]!r}, {held} tokens in all"
        yield index.accuse("end", place, what, owners, truth)
    head = by_id.get(truth.waiters[0]) if truth.waiters else None
    if head is None or len(owners) < len(truth.owners):
        return
    if sum(entry.count for entry in owners) + head.count <= head.requested.limit:
        what = (
            f"{listed([head])} is the first that waits for {place[1]!r}, and there is room for it"
        )
        yield index.accuse("end", place, what, [*owners, head], truth)
