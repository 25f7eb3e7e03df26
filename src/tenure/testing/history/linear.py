"""Whether calls on a semaphore's data can have happened one after another: linearizability.

The search is that of Wing and Gong, with the memory that Lowe gave it: put one call after
another, each one among those that no call which has not had its turn precedes in time, and never
try the same situation twice. A *situation* is the calls that have had their turn and the state
they left. It is kept relative to the first call that has not had its turn, so at a point where
nothing is under way all that remains of the past is the state, and a long history costs no more
than its parts.

Three things keep it small:

* A call that fits and never changes anything has its turn at once: it gains nothing by waiting.
* A call whose outcome is unknown may happen at any time after it began, or never. One whose data
  was read, and was written by nothing else, has happened: by the time of that reading. A data
  update whose data nobody read needs no turn. Those that remain and do the same are
  interchangeable, so that it matters only how many of them have been used.
* The state is that of one semaphore: linearizability is local.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from tenure.testing.history.records import Operation, Outcome, Record

__all__ = ["ABSENT", "Operated", "is_linearizable", "shortest_contradiction", "step"]


class _Absent:
    """The state of a semaphore that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

State = bytes | _Absent | None  # None: data that nobody has ever read


@dataclass(frozen=True, slots=True)
class Operated:
    """One call, with what came of it (`records` tell of that), and when it happened.

    That is between two instants, which are compared with each other only; a call that ends in the
    instant in which another begins may have happened after it.
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
    """The state after a call that found `state`, or ``False`` if it would have ended otherwise."""
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
    """Whether there is an order that explains what every call gave."""
    certain, perhaps = _sorted_out(calls)
    first: Configuration = (0, 0, start, (0,) * len(perhaps))
    tried = {first}
    to_try = [first]
    while to_try:
        situation = to_try.pop()
        if situation[0] == len(certain):
            return True
        for following in _turns(situation, certain, perhaps):
            if following not in tried:
                tried.add(following)
                to_try.append(following)
    return False


def _turns(
    situation: Configuration, certain: Sequence[Operated], perhaps: Sequence[Sequence[Operated]]
) -> Iterator[Configuration]:
    """The situations that one more turn leads to, the most promising one last."""
    first, done, state, used = situation
    turns: list[tuple[float, int, State]] = []
    horizon = inf  # the first end of a call that has not had its turn: nothing later precedes it
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
    for kind, each in enumerate(perhaps):
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
    """The calls that have happened, and those that may have, by what they do; each by its start."""
    calls = [call for call in calls if call.outcome != "refused"]
    read: dict[bytes | None, float] = {}  # data, and by when it had been read
    for call in calls:
        if call.op == "read" and call.outcome == "ok":
            read[call.result] = min(call.end, read.get(call.result, inf))
    writers = Counter(call.argument for call in calls if call.op in ("create", "ensure", "update"))
    certain: list[Operated] = []
    perhaps: dict[tuple[Operation, bytes | None], list[Operated]] = {}
    for call in sorted(calls, key=lambda call: call.start):
        if call.outcome != "unknown":
            certain.append(call)
        elif call.op == "delete":
            perhaps.setdefault(("delete", None), []).append(replace(call, outcome="ok"))
        elif call.op != "read":
            op: Operation = "update" if call.op == "update" else "create"
            done = replace(call, op=op, outcome="ok")
            if call.argument not in read:
                if op == "create":
                    perhaps.setdefault((op, None), []).append(replace(done, argument=None))
            elif writers[call.argument] == 1:
                certain.append(replace(done, end=max(call.start, read[call.argument])))
            else:
                perhaps.setdefault((op, call.argument), []).append(done)
    return certain, list(perhaps.values())


def shortest_contradiction(calls: Sequence[Operated]) -> list[Operated]:
    """Of calls that are not linearizable, those begun until the first end that none explains.

    The last of them is the one that ended so.
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
    """The same history, told at an earlier instant."""
    for call in calls:
        if call.end <= end:
            yield call
        elif call.start <= end:
            yield replace(call, end=inf, outcome="unknown", result=None)
