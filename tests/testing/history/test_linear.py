"""The search for an order of calls, against one that tries every order there is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenure.testing.history.check import (
    ABSENT,
    Operated,
    State,
    is_linearizable,
    shortest_contradiction,
    step,
)

X, Y = b"x", b"y"


def call(
    start: float, end: float, op: str, argument: bytes | None = None, **told: object
) -> Operated:
    return Operated(start, end, op, argument, **{"outcome": "ok", **told})  # type: ignore[arg-type]


# What one call does


@pytest.mark.parametrize(
    ("op", "outcome", "when_absent", "when_x"),
    [
        ("create", "ok", Y, False),
        ("create", "exists", False, X),
        ("create", "missing", False, False),
        ("ensure", "ok", Y, X),
        ("ensure", "exists", False, X),
        ("update", "ok", False, Y),
        ("update", "missing", ABSENT, False),
        ("update", "exists", False, False),
        ("delete", "ok", False, ABSENT),
        ("delete", "busy", False, X),
        ("delete", "missing", ABSENT, False),
        ("read", "missing", ABSENT, False),
        ("read", "busy", False, False),
    ],
)
def test_a_call_leaves_a_state(
    op: str, outcome: str, when_absent: State | bool, when_x: State | bool
) -> None:
    made = call(0, 1, op, Y, outcome=outcome)
    assert step(made, ABSENT) == when_absent
    assert step(made, X) == when_x


def test_a_reading_tells_the_state() -> None:
    assert step(call(0, 1, "read", result=X), X) == X
    assert step(call(0, 1, "read", result=X), Y) is False
    assert step(call(0, 1, "read", result=X), ABSENT) is False


# Orders


@pytest.mark.parametrize(
    ("calls", "possible"),
    [
        ([], True),
        ([call(0, 1, "read", outcome="missing")], True),
        ([call(0, 1, "update", X)], False),
        ([call(0, 2, "create", X), call(1, 3, "read", outcome="missing")], True),
        ([call(0, 2, "create", X), call(3, 4, "read", outcome="missing")], False),
        ([call(0, 2, "create", X), call(2, 4, "read", outcome="missing")], True),
        # two that overlap, and two that read them the other way round
        (
            [
                call(0, 1, "create", b""),
                call(2, 5, "update", X),
                call(2, 5, "update", Y),
                call(6, 7, "read", result=X),
                call(8, 9, "read", result=X),
            ],
            True,
        ),
        (
            [
                call(0, 1, "create", b""),
                call(2, 5, "update", X),
                call(2, 5, "update", Y),
                call(6, 7, "read", result=X),
                call(8, 9, "read", result=Y),
            ],
            False,
        ),
        # of one that failed nobody knows whether and when it happened
        (
            [
                call(0, 1, "create", X),
                call(2, inf, "update", Y, outcome="unknown"),
                call(3, 4, "read", result=X),
                call(8, 9, "read", result=Y),
            ],
            True,
        ),
        (
            [
                call(0, 1, "create", X),
                call(2, inf, "update", Y, outcome="unknown"),
                call(3, 4, "read", result=Y),
                call(8, 9, "read", result=X),
            ],
            False,
        ),
        # not before it began
        (
            [
                call(0, 1, "create", X),
                call(3, 4, "read", result=Y),
                call(5, inf, "update", Y, outcome="unknown"),
            ],
            False,
        ),
        # and once
        (
            [
                call(0, 1, "create", X),
                call(2, inf, "delete", outcome="unknown"),
                call(3, 4, "read", outcome="missing"),
                call(5, 6, "create", X),
                call(7, 8, "read", outcome="missing"),
            ],
            False,
        ),
        (
            [
                call(0, 1, "create", X),
                call(2, inf, "delete", outcome="unknown"),
                call(2, inf, "delete", outcome="unknown"),
                call(3, 4, "read", outcome="missing"),
                call(5, 6, "create", X),
                call(7, 8, "read", outcome="missing"),
            ],
            True,
        ),
        # a creation whose data nobody read is seen by that there is something
        (
            [
                call(0, inf, "create", X, outcome="unknown"),
                call(3, 4, "create", Y, outcome="exists"),
                call(5, 6, "delete"),
                call(7, 8, "update", Y, outcome="missing"),
            ],
            True,
        ),
        ([call(0, inf, "ensure", X, outcome="refused"), call(3, 4, "update", X)], False),
    ],
)
def test_some_order_explains_them_or_none(calls: list[Operated], possible: bool) -> None:
    assert is_linearizable(calls) is possible
    assert by_trying_every_order(calls) is possible


# Every order there is


def by_trying_every_order(calls: Sequence[Operated], start: State = ABSENT) -> bool:
    known = [each for each in calls if each.outcome not in ("unknown", "refused")]
    unknown = [each for each in calls if each.outcome == "unknown" and each.op != "read"]
    return any(
        explains(order, start)
        for number in range(len(unknown) + 1)
        for happened in itertools.combinations(unknown, number)
        for order in itertools.permutations((*known, *happened))
    )


def explains(order: Sequence[Operated], start: State) -> bool:
    for before, after in itertools.combinations(order, 2):
        if after.outcome != "unknown" and after.end < before.start:
            return False
    state: State = start
    for each in order:
        following = happen(each, state) if each.outcome == "unknown" else step(each, state)
        if following is False:
            return False
        state = following
    return True


def happen(made: Operated, state: State) -> State:
    """What a call does that may be refused."""
    if made.op in ("create", "ensure"):
        return made.argument if state is ABSENT else state
    if state is ABSENT:
        return state
    return made.argument if made.op == "update" else ABSENT


DATA = st.sampled_from([X, Y, b"z"])


@st.composite
def calls_that_overlap(draw: st.DrawFn) -> list[Operated]:
    """Few calls, close to each other, whose outcomes are likely to fit."""
    calls = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 8))
        end = start + draw(st.integers(0, 6))
        op = draw(
            st.sampled_from(["create", "ensure", "update", "update", "delete", "read", "read"])
        )
        outcomes = {
            "create": ["ok", "exists", "unknown"],
            "ensure": ["ok", "unknown"],
            "update": ["ok", "ok", "missing", "unknown", "refused"],
            "delete": ["ok", "missing", "busy", "unknown"],
            "read": ["ok", "ok", "missing", "unknown"],
        }
        outcome = draw(st.sampled_from(outcomes[op]))
        calls.append(
            call(
                start,
                inf if outcome == "unknown" else end,
                op,
                None if op in ("delete", "read") else draw(DATA),
                outcome=outcome,
                result=draw(DATA) if op == "read" and outcome == "ok" else None,
            )
        )
    return calls


@given(calls_that_overlap())
@example(
    [  # what changes nothing now may be needed later
        call(0, 9, "update", X),
        call(0, 1, "create", X),
        call(2, 3, "update", Y),
        call(4, 5, "read", result=X),
    ]
)
@example(
    [
        call(0, 1, "create", X),
        call(0, 9, "ensure", Y),
        call(2, 3, "delete"),
        call(4, 5, "read", result=Y),
    ]
)
def test_the_search_finds_an_order_if_there_is_one(calls: list[Operated]) -> None:
    assert is_linearizable(calls) is by_trying_every_order(calls)


@given(calls_that_overlap())
@example(
    [
        call(0, 0, "create", X),
        call(0, 1, "update", Y, outcome="refused"),
        call(0, 0, "read", result=Y),
    ]
)
def test_the_shortest_contradiction_is_one_and_without_its_last_call_is_none(
    calls: list[Operated],
) -> None:
    if is_linearizable(calls):
        return
    *before, culprit = shortest_contradiction(calls)
    assert culprit.outcome != "unknown"
    told = [each for each in before if each.end <= culprit.end]
    begun = [
        Operated(each.start, inf, each.op, each.argument, "unknown")
        for each in before
        if each.end > culprit.end
    ]
    assert not by_trying_every_order([*told, *begun, culprit])
    same = [each for each in told if each.end == culprit.end]
    earlier = [each for each in told if each.end < culprit.end]
    pending = [
        Operated(each.start, inf, each.op, each.argument, "unknown")
        for each in (*same, culprit)  # before it was refused, it may have happened
    ]
    assert by_trying_every_order([*earlier, *begun, *pending])


# Long ones


def test_a_long_history_costs_no_more_than_its_parts() -> None:
    calls = [call(0, 1, "create", b"")]
    for turn in range(2, 4000, 2):
        written = [b"%d %d" % (turn, which) for which in range(4)]
        calls += [call(turn, turn + 1.0, "update", data) for data in written]
        calls += [call(turn, turn + 1.5, "read", result=data) for data in written[:3]]
        calls.append(call(turn, inf, "update", b"lost", outcome="unknown"))
        calls.append(call(turn, inf, "delete", outcome="unknown"))
    begun = time.process_time()
    assert is_linearizable(calls)
    # It is enough that one answer at the end is wrong for everything to be tried.
    wrong = [*calls, call(9000, 9001, "read", result=b"2 0")]
    assert not is_linearizable(wrong)
    assert time.process_time() - begun < 30
