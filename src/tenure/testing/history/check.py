"""Check of a history against the guarantees of the library, each written as a rule.

`check` returns the contradictions. The rules, by the names that a `Violation` has:

* ``limit``: the leases of a semaphore that are certainly held never exceed its limit.
* ``order``: a request is granted only if it fits together with all requests that precede it in the
  queue. A request with a smaller order id entered the queue earlier. It counts only if it is
  certainly still in the queue.
* ``fencing``: no two requests have the same order id. A request that is made when an order id is
  known, anywhere in the store, gets a greater one.
* ``never again``: a request that was released, lost or timed out is not held again; no observer
  sees a former owner as an owner again.
* ``loss``: a holder is notified of a loss by the deadline, or soon after its process continues, and
  does not consider the lease held beyond the deadline.
* ``data``: a single order of the calls on a semaphore's data explains all their results.
* ``observers``: observers see the final state, and never data that was not written.
* ``end``: when the store has settled, it has exactly the requests that processes consider theirs,
  and has granted every request that can be granted.

The rules use only certain facts, so a slow machine, a late message or an administrator's action is
never reported as a violation. Instants of different processes are compared with the history's skew
as tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from tenure.testing.history.ending import end, observers
from tenure.testing.history.index import ROUNDING, HistoryIndex, Place, RequestEntry, listed
from tenure.testing.history.linear import Operated, is_linearizable, shortest_contradiction
from tenure.testing.history.records import History, Leaves, Outcome, Record, Truth
from tenure.testing.history.timeline import Violation

_MOST = 5
"""Maximum number of violations that one rule reports. Further ones usually have the same cause."""

_CONTEXT = 8
"""Maximum number of calls on a semaphore's data that are shown before the unexplained call."""


def check(history: History) -> list[Violation]:
    """Return the contradictions between a history and the rules; an empty list if there are none.

    Raises:
        ValueError: the history is malformed: two requests share a label, or a record names a
            request that was never made.
    """
    index = HistoryIndex(history)
    return [violation for rule in RULES.values() for violation in islice(rule(index), _MOST)]


# limit


def _limit(index: HistoryIndex) -> Iterator[Violation]:
    for place, entries in index.places.items():
        yield from _limit_of(index, place, entries)


def _limit_of(
    index: HistoryIndex, place: Place, entries: list[RequestEntry]
) -> Iterator[Violation]:
    changes: list[tuple[float, int, int, bool]] = []  # instant, added count, entry's index, is end
    for number, entry in enumerate(entries):
        held_between = entry.held_between
        if held_between is None:
            continue
        start, end = held_between[0], held_between[1] - index.history.skew
        if end <= start:
            continue
        count = entry.count
        changes.append((start, count, number, False))
        for at, left in entry.shrinks:
            if at < end:
                changes.append((at, left - count, number, False))
                count = left
        changes.append((end, -count, number, True))
    changes.sort()  # at equal instants, releases come before grants
    least = min(entry.requested.limit for entry in entries)
    held, reported = 0, False
    holders: dict[int, RequestEntry] = {}
    for _, more, number, last in changes:
        held += more
        if more > 0:
            holders[number] = entries[number]
        elif last:
            del holders[number]
        if held <= least:
            reported = False
        elif more > 0 and not reported:
            limit = max(entry.requested.limit for entry in holders.values())
            if held > limit:
                reported = True
                yield _too_many(index, place, [*holders.values()], held, limit)


def _too_many(
    index: HistoryIndex, place: Place, holders: list[RequestEntry], held: int, limit: int
) -> Violation:
    node, name = place
    what = f"{listed(holders)} hold {name!r} on {node} at once"
    if any(entry.requested.count != limit for entry in holders):
        what += f", {held} tokens of a limit of {limit}"
    return index.accuse("limit", place, what, holders, *(entry.granted for entry in holders))


# order


def _order(index: HistoryIndex) -> Iterator[Violation]:
    for place, entries in index.places.items():
        yield from _order_of(index, place, entries)


def _order_of(
    index: HistoryIndex, place: Place, entries: list[RequestEntry]
) -> Iterator[Violation]:
    queue = [(entry.order_id, entry) for entry in entries if entry.order_id is not None]
    queue.sort(key=lambda each: each[0])
    # For each position, the earliest instant at which a request from there on is granted.
    first_behind = [inf] * (len(queue) + 1)
    for number in range(len(queue) - 1, -1, -1):
        held_between = queue[number][1].held_between
        reported = inf if held_between is None else held_between[0]
        first_behind[number] = min(reported, first_behind[number + 1])
    ahead: list[tuple[float, int, RequestEntry]] = []  # in the queue until then, order id, request
    for number, (order_id, entry) in enumerate(queue):
        held_between = entry.held_between
        if held_between is not None and ahead:
            before = {
                other_id: other
                for until, other_id, other in ahead
                if until > held_between[0] and other_id != order_id
            }
            needed = entry.count + sum(other.least_count for other in before.values())
            if needed > max(each.requested.limit for each in (entry, *before.values())):
                yield _out_of_order(index, place, entry, [*before.values()], needed)
        behind = first_behind[number + 1]
        ahead = [each for each in ahead if each[0] > behind]
        if entry.end - index.history.skew > behind:
            until = index.in_queue_until(entry) - index.history.skew
            if until > behind:
                ahead.append((until, order_id, entry))


def _out_of_order(
    index: HistoryIndex, place: Place, entry: RequestEntry, before: list[RequestEntry], needed: int
) -> Violation:
    node, name = place
    what = (
        f"{listed([entry])} was granted {name!r} on {node} while {listed(before)} stood before it, "
        "which left no room for it"
    )
    if entry.requested.limit != entry.requested.count:
        what += f": {needed} tokens of a limit of {entry.requested.limit}"
    return index.accuse("order", place, what, [*before, entry], entry.granted)


# fencing


def _fencing(index: HistoryIndex) -> Iterator[Violation]:
    for entry, granted in index.replaced:
        what = f"{listed([entry])} was granted with another order id, {granted.order_id}"
        yield index.accuse("fencing", entry.place, what, [entry], granted)
    owners: dict[int, RequestEntry] = {}
    for entry in index.entries.values():
        order_id, floor = entry.order_id, entry.floor
        if order_id is None:
            continue
        other = owners.setdefault(order_id, entry)
        if other is not entry and _origin(index, other) != _origin(index, entry):
            what = f"{listed([other])} and {listed([entry])} have one order id"
            yield index.accuse("fencing", entry.place, what, [other, entry], entry.granted)
        elif entry.requested.recovers is not None:
            former = index.entries.get(entry.requested.recovers)
            if former is not None and former.order_id not in (None, order_id):
                what = f"{listed([entry])} continues {listed([former])}, which it is not"
                yield index.accuse("fencing", entry.place, what, [former, entry], entry.granted)
        elif floor is not None and floor.order_id is not None and order_id < floor.order_id:
            what = f"{listed([floor])} was known before {listed([entry])} was sent"
            yield index.accuse("fencing", entry.place, what, [floor, entry], entry.requested)


def _origin(index: HistoryIndex, entry: RequestEntry) -> str:
    """Return the label of the first request in the chain of recoveries that leads to this one."""
    while entry.requested.recovers is not None:
        former = index.entries.get(entry.requested.recovers)
        if former is None:
            return entry.requested.recovers or entry.requested.request
        entry = former
    return entry.requested.request


# never again


def _never_again(index: HistoryIndex) -> Iterator[Violation]:
    for entry, record in index.again:
        what = f"{listed([entry])} is held again after it had been withdrawn or had ended"
        yield index.accuse("never again", entry.place, what, [entry], entry.ended_by, record)
    for (observer, place), shown in index.observed.items():
        was: set[int] = set()
        left: set[int] = set()
        for record in shown:
            owners = set(record.value) if isinstance(record.value, tuple) else set()
            if owners & left:
                back = ", ".join(str(order_id) for order_id in sorted(owners & left))
                what = f"{observer} saw {back} own {place[1]!r} on {place[0]} again"
                yield Violation("never again", *place, what, tuple(shown), (record,))
                break
            left |= was - owners
            was = owners


# loss


def _loss(index: HistoryIndex) -> Iterator[Violation]:
    for entry, record in index.late:
        what = f"{listed([entry])} was held after its deadline"
        yield index.accuse("loss", entry.place, what, [entry], record)
    for entry in index.entries.values():
        gone, left = entry.gone, entry.ended_by
        if gone is None or entry.granted is None or entry.deadline == inf:
            continue
        if gone.why == "released" and isinstance(left, Leaves):
            if left.at > entry.deadline + ROUNDING:
                what = f"{listed([entry])} was held to its end, and its deadline had passed by then"
                yield index.accuse("loss", entry.place, what, [entry], left)
        elif gone.why == "lost":
            grace = entry.grace + index.history.slack
            due = index.excused_until(entry.requested.process, entry.deadline + grace, grace)
            if gone.at > due + ROUNDING:
                late = gone.at - entry.deadline
                what = f"{listed([entry])} was lost, and its holder learned it {late:.3f} s late"
                yield index.accuse("loss", entry.place, what, [entry], gone)


# data


def _data(index: HistoryIndex) -> Iterator[Violation]:
    for place in index.calls:
        calls = _calls_on(index, place)
        if is_linearizable(calls):
            continue
        *before, culprit = shortest_contradiction(calls)
        records = tuple(
            record for call in (*before[-_CONTEXT:], culprit) for record in call.records
        )
        reported = culprit.records[-1]
        answer = "what was found at the end" if isinstance(reported, Truth) else "what it answered"
        what = f"no order of the calls on {place[1]!r} on {place[0]} explains {answer}"
        yield Violation("data", *place, what, records, (reported,))


def _calls_on(index: HistoryIndex, place: Place) -> list[Operated]:
    """Return the calls on the data of a semaphore, and its final states (`Truth`) as reads.

    Without skew, events of the same instant happened in the order of the records. Clocks that may
    differ give no such order.
    """
    skew = index.history.skew

    def when(number: int, record: Record) -> float:
        return record.at if skew else float(number)

    calls: list[Operated] = []
    for number, called in index.calls[place]:
        start, end = when(number, called), inf
        outcome: Outcome = "unknown"
        result = None
        records: tuple[Record, ...] = (called,)
        ended = index.returned.get(called.call)
        if ended is not None:
            returned = ended[1]
            outcome, result, records = returned.outcome, returned.result, (called, returned)
            if outcome != "unknown":
                end = when(*ended) + skew
        calls.append(Operated(start, end, called.op, called.argument, outcome, result, records))
    for number, truth in index.truths:
        if (truth.node, truth.name) == place:
            start = when(number, truth)
            outcome = "missing" if truth.data is None else "ok"
            calls.append(Operated(start, start + skew, "read", None, outcome, truth.data, (truth,)))
    return calls


RULES: dict[str, Callable[[HistoryIndex], Iterator[Violation]]] = {
    "limit": _limit,
    "order": _order,
    "fencing": _fencing,
    "never again": _never_again,
    "loss": _loss,
    "data": _data,
    "observers": observers,
    "end": end,
}
"""The rules by name, in the order in which they are checked."""
