"""Check of a history against the guarantees of the library, each written as a rule.

`check` returns the contradictions. The rules, by the names that a `Violation` has:

* ``limit``: the leases of a semaphore that are certainly held never exceed its limit, or one that
  it had when the last of them was granted.
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
* ``turns``: where each key has a limit, a key has at most that many tokens in the queue of all, so
  that the keys take turns; and requests of one key enter that queue in the order of the key's own.
* ``deadlock``: the waits and leases of a deadlock that was reported were there at one instant, and
  each of its tasks waits for another one. Programs that were cut off may have ended theirs before.
* ``rate``: no window has more tokens of a rate than its burst, by the store's clock and by that of
  the programs. A take that is sent after the answer to another one is not granted before it. No
  program begins before its grant.

The rules use only certain facts, so a slow machine, a late message or an administrator's action is
never reported as a violation. Instants of different processes are compared with the history's skew
as tolerance.

Rules for the end of a history: the last values that observers saw, and the store's contents.

A `Truth` is read when all faults are repaired and the store has settled. By then the live
processes have been notified of the outcome of their requests, and lost sessions have expired in
the store.

Linearizability of the calls on a semaphore's data: search for a possible order.

The search is the algorithm of Wing and Gong, with the memoization of Lowe. It places one call after
another; no unplaced call may precede the next call in time. No situation is tried twice. A
*situation* is the set of placed calls and the resulting state. It is stored relative to the first
unplaced call. So at a point without a call in progress, only the state remains of the past, and the
cost of a long history is the sum of the costs of its parts.

Three properties keep the search small:

* A call that fits and changes nothing is placed immediately.
* A call whose outcome is unknown may happen at any time after it began, or never. If its data was
  read, and no other call wrote that data, the call happened by the end of that read. An update
  whose data was never read need not be placed. The remaining calls with the same effect are
  interchangeable, so only the number of placed ones matters.
* The state is that of one semaphore, because linearizability is local.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Literal

from tenure.core.rates import MICROSECONDS, RateRule
from tenure.testing.history.index import (
    ROUNDING,
    HistoryIndex,
    Place,
    RequestEntry,
    TakeEntry,
    listed,
)
from tenure.testing.history.records import (
    Crashed,
    Deadlocked,
    Described,
    History,
    Leaves,
    Observed,
    Operation,
    Outcome,
    Record,
    Truth,
)
from tenure.testing.history.timeline import Violation

_RECORDS_SHOWN = 5
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
            records: tuple[Record, ...] = (*before[-_RECORDS_SHOWN:], truth)
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
    if held > max((index.most_tokens(entry) for entry in owners), default=inf):
        what = f"{listed(owners)} own {place[1]!r}, {held} tokens in all"
        yield index.accuse("end", place, what, owners, truth)
    head = by_id.get(truth.waiters[0]) if truth.waiters else None
    if head is None or len(owners) < len(truth.owners):
        return
    limit = min(index.limits(head, truth.at, truth.at))
    if sum(entry.count for entry in owners) + head.count <= limit:
        what = (
            f"{listed([head])} is the first that waits for {place[1]!r}, and there is room for it"
        )
        yield index.accuse("end", place, what, [*owners, head], truth)


class _Absent:
    """The state of a semaphore that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

State = bytes | _Absent | None  # None: data that was never read


@dataclass(frozen=True, slots=True)
class Operated:
    """One call with its outcome, its `records`, and the two instants between which it happened.

    The instants are compared only with those of other calls. A call that ends at the instant at
    which another one begins may have happened after it.
    """

    start: float
    end: float
    op: Operation
    argument: bytes | None
    outcome: Outcome
    result: bytes | None = None
    records: tuple[Record, ...] = ()


Configuration = tuple[int, int, State, tuple[int, ...]]


def step(call: Operated, state: State) -> State | Literal[False]:
    """Return the state after a call that found `state`; ``False`` contradicts its outcome."""
    exists = not isinstance(state, _Absent)
    match call.op, call.outcome:
        case ("create", "ok"):
            return False if exists else call.argument
        case ("ensure", "ok"):
            return state if exists else call.argument
        case ("update", "ok"):
            return call.argument if exists else False
        case ("delete", "ok"):
            return ABSENT if exists else False
        case ("read", "ok"):
            return state if exists and state == call.result else False
        case ("create" | "ensure", "exists") | ("delete", "busy"):
            return state if exists else False
        case ("update" | "delete" | "read", "missing"):
            return False if exists else state
    return False


def is_linearizable(calls: Iterable[Operated], start: State = ABSENT) -> bool:
    """Return true if some order of the calls explains the outcome of every call."""
    certain, uncertain = _sorted_out(calls)
    first: Configuration = (0, 0, start, (0,) * len(uncertain))
    tried = {first}
    to_try = [first]
    while to_try:
        situation = to_try.pop()
        if situation[0] == len(certain):
            return True
        for following in _turns(situation, certain, uncertain):
            if following not in tried:
                tried.add(following)
                to_try.append(following)
    return False


def _turns(
    situation: Configuration, certain: Sequence[Operated], uncertain: Sequence[Sequence[Operated]]
) -> Iterator[Configuration]:
    """Yield the situations after placing one more call, the most promising one last."""
    first, done, state, used = situation
    turns: list[tuple[float, int, State]] = []
    horizon = inf  # the earliest end of an unplaced call: a call that starts later must wait
    for offset in range(len(certain) - first):
        call = certain[first + offset]
        if call.start > horizon:
            break
        if done >> offset & 1:
            continue
        horizon = min(horizon, call.end)
        after = step(call, state)
        if after is False:
            continue
        if call.op == "read" or call.outcome != "ok":
            yield _after(situation, offset, state)
            return
        turns.append((call.end, offset, after))
    for kind, each in enumerate(uncertain):
        count = used[kind]
        if count < len(each) and each[count].start <= horizon:
            after = step(each[count], state)
            if after is not False and after is not state:
                yield first, done, after, (*used[:kind], count + 1, *used[kind + 1 :])
    turns.sort(key=lambda turn: turn[0], reverse=True)
    for _, offset, after in turns:
        yield _after(situation, offset, after)


def _after(situation: Configuration, offset: int, state: State) -> Configuration:
    first, done, _, used = situation
    done |= 1 << offset
    while done & 1:
        done >>= 1
        first += 1
    return first, done, state, used


def _sorted_out(calls: Iterable[Operated]) -> tuple[list[Operated], list[list[Operated]]]:
    """Return the calls that happened, and those that may have, grouped by effect; all by start."""
    calls = [call for call in calls if call.outcome != "refused"]
    read: dict[bytes | None, float] = {}  # data, and the earliest end of a read that returned it
    for call in calls:
        if call.op == "read" and call.outcome == "ok":
            read[call.result] = min(call.end, read.get(call.result, inf))
    writers = Counter(call.argument for call in calls if call.op in ("create", "ensure", "update"))
    certain: list[Operated] = []
    uncertain: dict[tuple[Operation, bytes | None], list[Operated]] = {}
    for call in sorted(calls, key=lambda call: call.start):
        if call.outcome != "unknown":
            certain.append(call)
        elif call.op == "delete":
            uncertain.setdefault(("delete", None), []).append(replace(call, outcome="ok"))
        elif call.op != "read":
            op: Operation = "update" if call.op == "update" else "create"
            done = replace(call, op=op, outcome="ok")
            if call.argument not in read:
                if op == "create":
                    uncertain.setdefault((op, None), []).append(replace(done, argument=None))
            elif writers[call.argument] == 1:
                certain.append(replace(done, end=max(call.start, read[call.argument])))
            else:
                uncertain.setdefault((op, call.argument), []).append(done)
    return certain, list(uncertain.values())


def shortest_contradiction(calls: Sequence[Operated]) -> list[Operated]:
    """Return the calls that began before the first unexplained end, of non-linearizable calls.

    The last of them is the call that ended with the unexplained outcome.
    """
    ends = sorted((call for call in calls if call.outcome != "unknown"), key=lambda call: call.end)
    explained, contradicting = 0, len(ends)
    while contradicting - explained > 1:
        middle = (explained + contradicting) // 2
        if is_linearizable(_until(calls, ends[middle - 1].end)):
            explained = middle
        else:
            contradicting = middle
    culprit = ends[contradicting - 1]
    begun = [call for call in calls if call.start <= culprit.end and call is not culprit]
    return [*sorted(begun, key=lambda call: call.start), culprit]


def _until(calls: Iterable[Operated], end: float) -> Iterator[Operated]:
    """Yield the calls as known at the instant `end`."""
    for call in calls:
        if call.end <= end:
            yield call
        elif call.start <= end:
            yield replace(call, end=inf, outcome="unknown", result=None)


_MOST = 5
"""Maximum number of violations that one rule reports. Further ones usually have the same cause."""

_CALLS_SHOWN = 8
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
    least = index.least_tokens(place)
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
            limit = max(map(index.most_tokens, _last_granted([*holders.values()])))
            if held > limit:
                reported = True
                yield _too_many(index, place, [*holders.values()], held, limit)


def _last_granted(holders: list[RequestEntry]) -> list[RequestEntry]:
    """Return the request that was granted last, in the order of the queue; all if unknown.

    What the others had then was within the limit, together with its count.
    """
    known = [(entry.order_id, entry) for entry in holders if entry.order_id is not None]
    if len(known) < len(holders):
        return holders
    return [max(known, key=lambda each: each[0])[1]]


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
            if needed > index.most_tokens(entry):
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
    limit = index.most_tokens(entry)
    if limit != entry.requested.count:
        what += f": {needed} tokens of a limit of {limit}"
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
            record for call in (*before[-_CALLS_SHOWN:], culprit) for record in call.records
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


# turns


def _keys_turns(index: HistoryIndex) -> Iterator[Violation]:
    keyed: dict[Place, list[tuple[RequestEntry, RequestEntry]]] = {}
    for place, entries in index.places.items():
        pairs = [(entry, index.entries.get(entry.requested.key or "")) for entry in entries]
        both = [(entry, of_key) for entry, of_key in pairs if of_key is not None]
        if both:
            keyed[place] = both
    shown: dict[Place, list[Described | Truth]] = defaultdict(list)
    for described in index.described:
        shown[described.node, described.name].append(described)
    for _, truth in index.truths:
        shown[truth.node, truth.name].append(truth)
    for place, both in keyed.items():
        yield from _too_many_of_a_key(index, place, both, shown[place])
        yield from _overtaken_in_a_key(index, place, both)


def _too_many_of_a_key(
    index: HistoryIndex,
    place: Place,
    both: list[tuple[RequestEntry, RequestEntry]],
    shown: list[Described | Truth],
) -> Iterator[Violation]:
    """Check that the queue of all never has more of a key than its limit."""
    by_id = {entry.order_id: (entry, of_key) for entry, of_key in both}
    for record in shown:
        found: dict[Place, list[tuple[RequestEntry, RequestEntry]]] = defaultdict(list)
        for order_id in (*record.owners, *record.waiters):
            known = by_id.get(order_id)
            # The key's tokens may be evicted alone; the other request stays then.
            if known is not None and known[1].end > record.at:
                found[known[1].place].append(known)
        for (_, key), those in found.items():
            count = sum(entry.least_count for entry, _ in those)
            limit = those[0][1].requested.limit
            if count > limit:
                entries = [entry for entry, _ in those]
                what = (
                    f"{listed(entries)} of {key!r} are in the queue of {place[1]!r} at once, "
                    f"{count} tokens of a limit of {limit}"
                )
                yield index.accuse("turns", place, what, entries, record)


def _overtaken_in_a_key(
    index: HistoryIndex, place: Place, both: list[tuple[RequestEntry, RequestEntry]]
) -> Iterator[Violation]:
    """Check that requests of a key enter the queue of all in order, but for those that may race.

    A request enters it as an owner of its key. An earlier one of that key that enters it later is
    an owner of the key at that time, too. So all of them fit in the key's limit.
    """
    queues: dict[Place, list[tuple[int, int, RequestEntry, RequestEntry]]] = defaultdict(list)
    for entry, of_key in both:
        if entry.order_id is not None and of_key.order_id is not None:
            queues[of_key.place].append((of_key.order_id, entry.order_id, entry, of_key))
    for (_, key), queue in queues.items():
        queue.sort(key=lambda each: each[0])
        ahead: list[tuple[int, RequestEntry, RequestEntry]] = []  # by the order id among all
        for _, order_id, entry, of_key in queue:
            later = ahead[bisect_right(ahead, order_id, key=lambda each: each[0]) :]
            granted = entry.granted
            passed = [
                other
                for _, other, its_key in later
                if granted is not None and its_key.end - index.history.skew > granted.at
            ]
            count = entry.count + sum(other.least_count for other in passed)
            if passed and count > of_key.requested.limit:
                what = (
                    f"{listed([entry])} overtook {listed(passed)} of the same key {key!r}, which "
                    "had places before it"
                )
                yield index.accuse("turns", place, what, [entry, *passed], granted)
            insort(ahead, (order_id, entry, of_key), key=lambda each: each[0])


# deadlock


def _deadlock(index: HistoryIndex) -> Iterator[Violation]:
    by_id = {each.order_id: each for each in index.entries.values() if each.order_id is not None}
    for record in index.deadlocked:
        victim = index.entries[record.request]
        waits = [index.entries[label] for label in record.waits if label in index.entries]
        inside = [by_id[order_id] for order_id in record.inside if order_id in by_id]
        members = [*waits, *inside]
        false = (
            "is of requests that were never made"
            if len(members) < len(record.waits) + len(record.inside) or victim not in waits
            else _why_false(index, record, waits, inside)
        )
        if false:
            what = f"the deadlock that ended {listed([victim])} {false}"
            yield index.accuse("deadlock", victim.place, what, members or [victim], record)


def _why_false(
    index: HistoryIndex,
    record: Deadlocked,
    waits: list[RequestEntry],
    inside: list[RequestEntry],
) -> str | None:
    """Return why the tasks that a report names were certainly not in a deadlock."""
    taken = Counter(each.place for each in [*waits, *inside])
    for each in waits:
        if taken[each.place] == 1:
            return f"has no other task for which {listed([each])} waits"
    for each in inside:
        if each.granted is None:
            return f"has {listed([each])} as a lease, which was never granted"
    since = max(
        *(each.requested.at for each in waits),
        *(each.granted.at for each in inside if each.granted),
    )
    for each in [*waits, *inside]:
        if index.may_stay_until(each) < since:
            return f"never was: {listed([each])} had left before the last of it began"
    for each in waits:
        if each.granted is not None and each.granted.at + index.history.skew < since:
            return f"never was: {listed([each])} was granted before the last of it began"
    if since > record.at + index.history.skew:
        return "was reported before it began"
    return None


# rate

_DRIFT = 0.02
"""Fraction by which clocks of programs and the store's may differ in their rates."""


def _rate(index: HistoryIndex) -> Iterator[Violation]:
    for place, takes in index.takes.items():
        rules = {RateRule(each.takes.limit, each.takes.per, each.takes.burst) for each in takes}
        granted = [each for each in takes if each.took is not None and each.took.granted]
        yield from _begun_early(place, granted)
        if len(rules) == 1:  # a resize may forget what has left its window
            [rule] = rules
            yield from _too_much(place, granted, rule)
            yield from _too_soon(index, place, granted, rule)
            yield from _takes_overtaken(index, place, granted)


def _granted_at(entry: TakeEntry) -> int:
    """Return the time of a grant by the store's clock."""
    assert entry.took is not None
    return entry.took.granted or 0


def _begun_early(place: Place, takes: list[TakeEntry]) -> Iterator[Violation]:
    for entry in takes:
        took = entry.took
        if took and took.at - entry.takes.at < (1 - _DRIFT) * took.waited - ROUNDING:
            what = f"{entry.takes.take} began before the time of its grant"
            yield Violation("rate", *place, what, tuple(entry.records), (took,))


def _too_much(place: Place, takes: list[TakeEntry], rule: RateRule) -> Iterator[Violation]:
    """Check all windows of the store's clock, those of bursts and whole periods."""
    ordered = sorted(takes, key=_granted_at)
    for window, most in {rule.window: rule.burst, rule.per: rule.limit}.items():
        first = inside = 0
        for number, entry in enumerate(ordered):
            inside += entry.count
            while _granted_at(ordered[first]) <= _granted_at(entry) - window:
                inside -= ordered[first].count
                first += 1
            if inside > most:
                yield _exceeded(place, ordered[first : number + 1], inside, most, window)
                break


def _too_soon(
    index: HistoryIndex, place: Place, takes: list[TakeEntry], rule: RateRule
) -> Iterator[Violation]:
    """Check the windows of the programs' clock that certainly contain the grants of some takes."""
    span = rule.window / MICROSECONDS * (1 - _DRIFT) - index.history.skew
    between: list[tuple[float, float, TakeEntry]] = []
    for entry in takes:
        assert entry.took is not None
        start = entry.takes.at + (1 - _DRIFT) * entry.took.waited
        between.append((start, entry.took.at, entry))
    between.sort(key=lambda each: each[0])
    for number, (start, _, _) in enumerate(between):
        those: list[TakeEntry] = []
        for later, end, entry in islice(between, number, None):
            if later >= start + span:
                break
            if end < start + span:
                those.append(entry)
        count = sum(entry.count for entry in those)
        if count > rule.burst:
            yield _exceeded(place, those, count, rule.burst, rule.window)
            return


def _exceeded(
    place: Place, takes: list[TakeEntry], count: int, most: int, window: int
) -> Violation:
    node, name = place
    what = (
        f"{count} tokens of {name!r} on {node} were granted within {window / MICROSECONDS:g} s, "
        f"and {most} may be"
    )
    records = tuple(record for entry in takes for record in entry.records)
    return Violation("rate", node, name, what, records, tuple(e.took for e in takes if e.took))


def _takes_overtaken(
    index: HistoryIndex, place: Place, takes: list[TakeEntry]
) -> Iterator[Violation]:
    """Check the order of the grants. A take whose tokens were all refunded does not count."""
    decided = []
    for entry in takes:
        assert entry.took is not None
        if entry.count > 0:
            answered = entry.took.at - (1 - _DRIFT) * entry.took.waited + index.history.skew
            decided.append((answered, entry))
    decided.sort(key=lambda each: each[0])
    number, latest = 0, None
    for entry in takes:  # in the order of the calls
        while number < len(decided) and decided[number][0] < entry.takes.at:
            known = decided[number][1]
            if latest is None or _granted_at(known) > _granted_at(latest):
                latest = known
            number += 1
        if latest is not None and _granted_at(latest) > _granted_at(entry):
            what = f"{entry.takes.take} overtook {latest.takes.take}, which was answered before"
            records = (*latest.records, *entry.records)
            marked = tuple(each.took for each in (latest, entry) if each.took)
            yield Violation("rate", *place, what, records, marked)


RULES: dict[str, Callable[[HistoryIndex], Iterator[Violation]]] = {
    "limit": _limit,
    "order": _order,
    "fencing": _fencing,
    "never again": _never_again,
    "loss": _loss,
    "data": _data,
    "observers": observers,
    "end": end,
    "turns": _keys_turns,
    "deadlock": _deadlock,
    "rate": _rate,
}
"""The rules by name, in the order in which they are checked."""
