"""Rules about the end of a history: the last values that observers saw, and the store's contents.

A `Truth` is read when all faults are repaired and the store has settled. By then the live
processes have been notified of the outcome of their requests, and lost sessions have expired in
the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tenure.testing.history.records import Crashed, Observed, Record, Truth
from tenure.testing.history.story import Life, Place, Story, listed
from tenure.testing.history.timeline import Violation

__all__ = ["end", "observers"]

_CONTEXT = 5
"""Maximum number of an observer's last records that a violation shows."""


def observers(story: Story) -> Iterator[Violation]:
    """Check that observers last saw the true state, and never saw data that was not written."""
    truths = {(truth.node, truth.name): truth for _, truth in story.truths}
    for (observer, place), shown in story.observed.items():
        yield from _unwritten(story, observer, place, shown)
        truth = truths.get(place)
        if truth is None:
            continue
        before = [record for record in shown if record.at <= truth.at]  # later records do not count
        if not before or _is_over(story, observer, before[-1].process, truth.at):
            continue
        last = before[-1]
        true = truth.owners if isinstance(last.value, tuple) else truth.data
        if last.value != true:
            what = f"{observer} saw {place[1]!r} on {place[0]} last in a state that was not its end"
            records: tuple[Record, ...] = (*before[-_CONTEXT:], truth)
            yield Violation("observers", *place, what, records, (last, truth))


def _is_over(story: Story, observer: str, process: str, at: float) -> bool:
    crashed = story.crashed.get(process)
    return story.unobserved.get((process, observer), inf) <= at or (
        crashed is not None and crashed.at <= at
    )


def _unwritten(
    story: Story, observer: str, place: Place, shown: list[Observed]
) -> Iterator[Violation]:
    if place not in story.calls:
        return  # the history does not record what was written
    written: dict[bytes | None, float] = {}
    for _, called in story.calls[place]:
        if called.op in ("create", "ensure", "update"):
            written.setdefault(called.argument, called.at)
    for record in shown:
        known = record.at + story.history.skew
        if isinstance(record.value, bytes) and written.get(record.value, inf) > known:
            what = f"{observer} was shown what was never written to {place[1]!r}"
            yield Violation("observers", *place, what, (record,), (record,))


def end(story: Story) -> Iterator[Violation]:
    """Check that the store has exactly the live processes' requests, and grants all it can."""
    for _, truth in story.truths:
        place = truth.node, truth.name
        lives = story.places.get(place, [])
        yield from _missing(story, place, lives, truth)
        yield from _left_over(story, place, lives, truth)
        yield from _ungranted(story, place, lives, truth)


def _missing(story: Story, place: Place, lives: list[Life], truth: Truth) -> Iterator[Violation]:
    """Check that every certain holder is an owner, and every certain waiter is in the queue."""
    owners = frozenset(truth.owners)
    queue = owners.union(truth.waiters)
    for life in lives:
        if life.order_id is None or life.order_id in owners or life.end <= truth.at:
            continue
        if life.granted is not None and life.granted.at < truth.at:
            if life.deadline > truth.at:
                what = f"{listed([life])} believes that it holds {place[1]!r}, and does not own it"
                yield story.accuse("end", place, what, [life], life.granted, truth)
        elif life.placed_at < truth.at < story.in_queue_until(life) and life.order_id not in queue:
            what = f"{listed([life])} waits for {place[1]!r}, and is not in its queue"
            yield story.accuse("end", place, what, [life], truth)


def _left_over(story: Story, place: Place, lives: list[Life], truth: Truth) -> Iterator[Violation]:
    """Check that the queue has no request that is over, and none that was never made."""
    known: dict[int, list[Life]] = {}
    nameless = 0  # requests that may be in the queue with an order id that is not recorded
    for life in lives:
        if life.order_id is not None:
            known.setdefault(life.order_id, []).append(life)
        elif not _is_out(life, truth.at):
            nameless += 1
    strangers: list[int] = []
    for order_id in (*truth.owners, *truth.waiters):
        those = known.get(order_id)
        if those is None:
            strangers.append(order_id)
        elif all(_is_out(life, truth.at) for life in those):
            what = f"{listed(those)} is over, and still stands in the queue of {place[1]!r}"
            yield story.accuse("end", place, what, those, truth)
    if len(strangers) > nameless:
        ids = ", ".join(str(order_id) for order_id in strangers)
        what = f"order id {ids}: in the queue of {place[1]!r}, without a request"
        yield Violation("end", *place, what, (truth,), (truth,))


def _is_out(life: Life, at: float) -> bool:
    """Return true if a request has certainly left its queue, now that the store has settled."""
    gone, window = life.gone, life.asked.window + life.grace
    if gone is not None and gone.at < at:
        # The store may keep a lost request until the end of the recovery window.
        return gone.why not in ("lost", "failed") or at > gone.at + window
    return isinstance(life.ended_by, Crashed) and at > life.ended_by.at + window


def _ungranted(story: Story, place: Place, lives: list[Life], truth: Truth) -> Iterator[Violation]:
    """Check that the owners fit within the limit, and that the first waiter does not fit too."""
    by_id = {life.order_id: life for life in lives if life.order_id is not None}
    owners = [by_id[order_id] for order_id in truth.owners if order_id in by_id]
    if truth.waiters and not truth.owners:
        what = f"{len(truth.waiters)} wait for {place[1]!r} on {place[0]}, which is free"
        yield story.accuse("end", place, what, [], truth)
        return
    held = sum(life.least_count for life in owners)
    if held > max((life.asked.limit for life in owners), default=inf):
        what = f"{listed(owners)} own {place[1]!r}, {held} tokens in all"
        yield story.accuse("end", place, what, owners, truth)
    head = by_id.get(truth.waiters[0]) if truth.waiters else None
    if head is None or len(owners) < len(truth.owners):
        return
    if sum(life.count for life in owners) + head.count <= head.asked.limit:
        what = (
            f"{listed([head])} is the first that waits for {place[1]!r}, and there is room for it"
        )
        yield story.accuse("end", place, what, [*owners, head], truth)
