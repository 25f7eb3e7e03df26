"""Linearizability of the calls on a semaphore's data: search for a possible order.

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

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from tenure.testing.history.records import Operation, Outcome, Record


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
