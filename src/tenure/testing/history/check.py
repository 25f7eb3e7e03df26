"""Check of a history against the guarantees of the library, each written as a rule.

`check` returns the contradictions. The rules, by the names that a `Violation` has:

* ``limit``: the leases of a semaphore that are believed to be held never exceed its limit.
* ``order``: a request is granted only if it fits beside all requests that precede it in the
  queue. A request with a smaller order id entered the queue earlier. It counts only if it is
  certain to be in the queue still.
* ``fencing``: no two requests have the same order id. A request that is made when an order id is
  known, anywhere in the store, gets a greater one.
* ``never again``: a request that was released, lost or timed out is not held again; an observer
  does not see a former owner own the semaphore again.
* ``loss``: a holder is notified of a loss by the deadline, or soon after its process continues,
  and does not hold the lease beyond the deadline.
* ``data``: a single order of the calls on a semaphore's data explains all their results.
* ``observers``: observers see the final state, and never data that was not written.
* ``end``: when the store has settled, it has the requests that processes believe they have, no
  others, and has granted every request that can be granted.

The rules use only what is certain. So a slow machine, a late message or an administrator's action
is never reported as a violation. Instants of different processes are compared with a tolerance of
the history's skew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from tenure.testing.history.ending import end, observers
from tenure.testing.history.linear import Operated, is_linearizable, shortest_contradiction
from tenure.testing.history.records import History, Leaves, Outcome, Record, Truth
from tenure.testing.history.story import ROUNDING, Life, Place, Story, listed
from tenure.testing.history.timeline import Violation

__all__ = ["RULES", "check"]

_MOST = 5
"""Maximum number of violations that one rule reports. Further ones have mostly the same cause."""

_CONTEXT = 8
"""Maximum number of calls on a semaphore's data that are shown before the unexplained call."""


def check(history: History) -> list[Violation]:
    """Return the contradictions between a history and the rules; an empty list if there are none.

    Raises:
        ValueError: the history is malformed: two requests share a label, or a record names a
            request that was never made.
    """
    story = Story(history)
    return [violation for rule in RULES.values() for violation in islice(rule(story), _MOST)]


# limit


def _limit(story: Story) -> Iterator[Violation]:
    for place, lives in story.places.items():
        yield from _limit_of(story, place, lives)


def _limit_of(story: Story, place: Place, lives: list[Life]) -> Iterator[Violation]:
    changes: list[tuple[float, int, int, bool]] = []  # instant, added count, life's index, is end
    for number, life in enumerate(lives):
        believed = life.believed
        if believed is None:
            continue
        start, end = believed[0], believed[1] - story.history.skew
        if end <= start:
            continue
        count = life.count
        changes.append((start, count, number, False))
        for at, left in life.shrinks:
            if at < end:
                changes.append((at, left - count, number, False))
                count = left
        changes.append((end, -count, number, True))
    changes.sort()  # at equal instants, releases come before grants
    least = min(life.asked.limit for life in lives)
    held, told = 0, False
    holders: dict[int, Life] = {}
    for _, more, number, last in changes:
        held += more
        if more > 0:
            holders[number] = lives[number]
        elif last:
            del holders[number]
        if held <= least:
            told = False
        elif more > 0 and not told:
            limit = max(life.asked.limit for life in holders.values())
            if held > limit:
                told = True
                yield _too_many(story, place, [*holders.values()], held, limit)


def _too_many(story: Story, place: Place, holders: list[Life], held: int, limit: int) -> Violation:
    node, name = place
    what = f"{listed(holders)} believe at once that they hold {name!r} on {node}"
    if any(life.asked.count != limit for life in holders):
        what += f", {held} tokens of a limit of {limit}"
    return story.accuse("limit", place, what, holders, *(life.granted for life in holders))


# order


def _order(story: Story) -> Iterator[Violation]:
    for place, lives in story.places.items():
        yield from _order_of(story, place, lives)


def _order_of(story: Story, place: Place, lives: list[Life]) -> Iterator[Violation]:
    queue = [(life.order_id, life) for life in lives if life.order_id is not None]
    queue.sort(key=lambda each: each[0])
    # For each position, the earliest instant at which a request from there on is granted.
    first_behind = [inf] * (len(queue) + 1)
    for index in range(len(queue) - 1, -1, -1):
        believed = queue[index][1].believed
        told = inf if believed is None else believed[0]
        first_behind[index] = min(told, first_behind[index + 1])
    ahead: list[tuple[float, int, Life]] = []  # in the queue until then, order id, request
    for index, (order_id, life) in enumerate(queue):
        believed = life.believed
        if believed is not None and ahead:
            before = {
                other_id: other
                for until, other_id, other in ahead
                if until > believed[0] and other_id != order_id
            }
            needed = life.count + sum(other.least_count for other in before.values())
            if needed > max(each.asked.limit for each in (life, *before.values())):
                yield _out_of_turn(story, place, life, [*before.values()], needed)
        behind = first_behind[index + 1]
        ahead = [each for each in ahead if each[0] > behind]
        if life.end - story.history.skew > behind:
            until = story.in_queue_until(life) - story.history.skew
            if until > behind:
                ahead.append((until, order_id, life))


def _out_of_turn(
    story: Story, place: Place, life: Life, before: list[Life], needed: int
) -> Violation:
    node, name = place
    what = (
        f"{listed([life])} was granted {name!r} on {node} while {listed(before)} stood before it, "
        "which left no room for it"
    )
    if life.asked.limit != life.asked.count:
        what += f": {needed} tokens of a limit of {life.asked.limit}"
    return story.accuse("order", place, what, [*before, life], life.granted)


# fencing


def _fencing(story: Story) -> Iterator[Violation]:
    for life, granted in story.replaced:
        what = f"{listed([life])} was granted with another order id, {granted.order_id}"
        yield story.accuse("fencing", life.place, what, [life], granted)
    owners: dict[int, Life] = {}
    for life in story.lives.values():
        order_id, floor = life.order_id, life.floor
        if order_id is None:
            continue
        other = owners.setdefault(order_id, life)
        if other is not life and _origin(story, other) != _origin(story, life):
            what = f"{listed([other])} and {listed([life])} have one order id"
            yield story.accuse("fencing", life.place, what, [other, life], life.granted)
        elif life.asked.recovers is not None:
            former = story.lives.get(life.asked.recovers)
            if former is not None and former.order_id not in (None, order_id):
                what = f"{listed([life])} goes on with {listed([former])}, which it is not"
                yield story.accuse("fencing", life.place, what, [former, life], life.granted)
        elif floor is not None and floor.order_id is not None and order_id < floor.order_id:
            what = f"{listed([floor])} was known before {listed([life])} was asked for"
            yield story.accuse("fencing", life.place, what, [floor, life], life.asked)


def _origin(story: Story, life: Life) -> str:
    """Return the label of the first request in the chain of recoveries that leads to this one."""
    while life.asked.recovers is not None:
        former = story.lives.get(life.asked.recovers)
        if former is None:
            return life.asked.recovers or life.asked.request
        life = former
    return life.asked.request


# never again


def _never_again(story: Story) -> Iterator[Violation]:
    for life, record in story.again:
        what = f"{listed([life])} is held again after it had been given up or was over"
        yield story.accuse("never again", life.place, what, [life], life.ended_by, record)
    for (observer, place), shown in story.observed.items():
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


def _loss(story: Story) -> Iterator[Violation]:
    for life, record in story.late:
        what = f"{listed([life])} was held after its deadline"
        yield story.accuse("loss", life.place, what, [life], record)
    for life in story.lives.values():
        gone, left = life.gone, life.ended_by
        if gone is None or life.granted is None or life.deadline == inf:
            continue
        if gone.why == "released" and isinstance(left, Leaves):
            if left.at > life.deadline + ROUNDING:
                what = f"{listed([life])} was held to its end, and its deadline had passed by then"
                yield story.accuse("loss", life.place, what, [life], left)
        elif gone.why == "lost":
            grace = life.grace + story.history.slack
            due = story.excused_until(life.asked.process, life.deadline + grace, grace)
            if gone.at > due + ROUNDING:
                late = gone.at - life.deadline
                what = f"{listed([life])} was lost, and its holder learned it {late:.3f} s late"
                yield story.accuse("loss", life.place, what, [life], gone)


# data


def _data(story: Story) -> Iterator[Violation]:
    for place in story.calls:
        calls = _calls_on(story, place)
        if is_linearizable(calls):
            continue
        *before, culprit = shortest_contradiction(calls)
        records = tuple(
            record for call in (*before[-_CONTEXT:], culprit) for record in call.records
        )
        told = culprit.records[-1]
        answer = "what was found at the end" if isinstance(told, Truth) else "what it answered"
        what = f"no order of the calls on {place[1]!r} on {place[0]} explains {answer}"
        yield Violation("data", *place, what, records, (told,))


def _calls_on(story: Story, place: Place) -> list[Operated]:
    """Return the calls on the data of a semaphore, and its final states (`Truth`) as reads.

    Without skew, records of the same instant happened in the order of the history. Clocks that
    may disagree give no such order.
    """
    skew = story.history.skew

    def when(number: int, record: Record) -> float:
        return record.at if skew else float(number)

    calls: list[Operated] = []
    for number, called in story.calls[place]:
        start, end = when(number, called), inf
        outcome: Outcome = "unknown"
        result = None
        records: tuple[Record, ...] = (called,)
        ended = story.returned.get(called.call)
        if ended is not None:
            returned = ended[1]
            outcome, result, records = returned.outcome, returned.result, (called, returned)
            if outcome != "unknown":
                end = when(*ended) + skew
        calls.append(Operated(start, end, called.op, called.argument, outcome, result, records))
    for number, truth in story.truths:
        if (truth.node, truth.name) == place:
            start = when(number, truth)
            outcome = "missing" if truth.data is None else "ok"
            calls.append(Operated(start, start + skew, "read", None, outcome, truth.data, (truth,)))
    return calls


RULES: dict[str, Callable[[Story], Iterator[Violation]]] = {
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
