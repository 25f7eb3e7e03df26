"""Simulated histories: none is violated, a seed gives the same one again, defects are found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tenure import events
from tenure._client import acquire, scope, semaphore, several
from tenure._client.request import Request
from tenure._client.session_core import SessionCore
from tenure._client.session_life import Proof
from tenure.core import rates
from tenure.core.node import StoredSemaphore
from tenure.core.rates import RateState
from tenure.testing.faults import FaultySession
from tenure.testing.history import Called, Granted, Requested, Violation
from tenure.testing.simulation import Outcome, Plan, draw, run, shrink, simulate, smallest
from tenure.testing.simulation.batch import Tally, outcomes, tallies
from tenure.testing.simulation.plan import FAULTS
from tests.guarantees.histories import by_simulation

SHARE = 150
"""Seeds for each run of the tests; many more are for `tenure simulate`."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Sessions that cannot say goodbye are what this is about."""
    caplog.set_level(logging.CRITICAL, logger="tenure")


@by_simulation
def test_no_history_is_violated() -> None:
    total = Tally()
    for tally in tallies(1, SHARE, jobs=2):
        total.merge(tally)
    assert total.failed == []
    assert total.seeds == SHARE
    assert total.short < SHARE / 50
    assert total.operations > 200 * SHARE
    assert set(total.faults) == set(FAULTS)


def test_a_history_holds_what_it_gets_and_does_much() -> None:
    [outcome] = outcomes([1])
    granted = [record for record in outcome.records if isinstance(record, Granted)]
    asked = sum(isinstance(record, Requested | Called) for record in outcome.records)
    assert len(granted) > 60
    assert asked > 150
    assert outcome.operations > 200
    assert sum(outcome.faults.values()) >= 5


def test_the_same_seed_gives_the_same_history() -> None:
    assert [each.records for each in outcomes([5, 6])] == [
        each.records for each in outcomes([5, 6])
    ]
    assert simulate(5).records != simulate(6).records


def test_another_interpreter_gives_the_same_history() -> None:
    program = (
        "from tenure.testing.simulation.batch import outcomes\n"
        "print(sum(map(hash, (each.at for one in outcomes([5, 6]) for each in one.records))))"
    )
    [here] = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert here.strip()


# Planted defects


def _no_withdrawal(*_: object) -> None:
    """A request that is given up stays."""


def _starting_with_the_answer(self: SessionCore, at: float) -> None:
    _proven(self, max(at, self.now()))


_proven = SessionCore.proven


def _for_longer_than_the_window(self: Proof, window: float) -> None:
    _new_proof(self, window)
    self.span = 1.2 * window


_new_proof = Proof.__init__


def _at_most_one_too_many(self: StoredSemaphore, now: float) -> Any:
    limit, self.limit = self.limit, self.limit + 1
    try:
        return _grant_next(self, now)
    finally:
        self.limit = limit


_grant_next = StoredSemaphore.grant_next


def _only_once_in_three(self: FaultySession, hold: int, order_id: int | None) -> None:
    if hold % 3:
        _granted(self, hold, order_id)


_granted = FaultySession.granted


def _with_the_key_released(request: Request, place: Request) -> Any:
    place.abandon()
    return _lease_of(request, place)


_lease_of = semaphore._lease_of


def _half_of_the_window(state: RateState, now: int) -> RateState | None:
    return _within_window(state, now + state.rule.window // 2)


_within_window = rates._within_window


class _Staying(Request):
    """A request that stays in its queue when another one is kept."""

    __slots__ = ()

    def abandon(self, outcome: events.Outcome = "withdrawn") -> None:
        """Do nothing."""


async def _join_and_stay(*arguments: Any) -> Request:
    request = await _join(*arguments)
    request.__class__ = _Staying
    return request


_join = acquire.join

DEFECTS: dict[str, tuple[object, str, Callable[..., Any], set[str]]] = {
    "a cancelled request stays in its queue": (
        *(Request, "withdraw_because", _no_withdrawal),
        {"end", "error"},
    ),
    "a lease counts from the answer": (
        *(SessionCore, "proven", _starting_with_the_answer),
        {"limit", "order"},
    ),
    "a lease outlives its window": (
        *(Proof, "__init__", _for_longer_than_the_window),
        {"limit", "order"},
    ),
    "a loss does not cancel": (
        *(scope.Scope, "trigger", lambda _: None),
        {"loss"},
    ),
    "one too many is granted": (
        *(StoredSemaphore, "grant_next", _at_most_one_too_many),
        {"limit"},
    ),
    "a key's tokens are released with the grant": (
        *(semaphore, "_lease_of", _with_the_key_released),
        {"limit", "order", "turns"},
    ),
    "tokens of a rate leave its window too early": (
        *(rates, "_within_window", _half_of_the_window),
        {"rate"},
    ),
    "the other queues of any are not left": (
        *(several, "join", _join_and_stay),
        {"end", "error"},
    ),
    "a grant is not told": (
        *(FaultySession, "granted", _only_once_in_three),
        {"end", "error"},
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, plant, rules = DEFECTS[defect]
    monkeypatch.setattr(owner, name, plant)
    found = Counter[str]()
    for outcome in outcomes([*range(81, 91), *range(1, 400)]):  # some are found there
        found.update(violation.rule for violation in outcome.violations)
        if rules & found.keys():
            return
    pytest.fail(f"not found in 409 histories; other rules: {dict(found)}")


# Shrinking


def test_a_failing_history_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredSemaphore, "grant_next", _at_most_one_too_many)
    failing = next(each for each in outcomes(range(1, 50)) if each.violations)
    small = smallest(failing)
    assert small.violations[0].rule == "limit"
    assert small.plan.steps <= 12
    assert small.plan.faults == ()
    assert run(small.plan).records == small.records


def test_shrinking_leaves_what_is_needed() -> None:
    plan = draw(3)
    needed = plan.faults[2], plan.processes[1].tasks[2][7]

    def fails(smaller: Plan) -> bool:
        return needed[0] in smaller.faults and needed[1] in smaller.processes[1].tasks[2]

    small = shrink(plan, fails)
    assert small.faults == (needed[0],)
    assert [task for process in small.processes for task in process.tasks if task] == [(needed[1],)]


def test_shrinking_ends_when_it_has_tried_enough() -> None:
    tried: list[Plan] = []

    def fails(smaller: Plan) -> bool:
        tried.append(smaller)
        return len(smaller.faults) > 1

    plan = draw(4)
    assert shrink(plan, fails, attempts=7).steps == plan.steps
    assert len(tried) == 7


def test_what_a_process_raises_that_it_must_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(StoredSemaphore, "grant_next", fail)
    outcome = simulate(1)
    assert "ZeroDivisionError" in str(outcome.violations[0])
    assert outcome.violations[0].rule == "error"


def test_a_plan_tells_what_it_is() -> None:
    plan = replace(draw(1), faults=draw(1).faults[:1])
    text = str(plan)
    assert text.startswith(f"seed 1: {plan.steps} steps, 1 faults")
    assert str(plan.faults[0]) in text
    assert text.count("process") >= 4


def test_no_worker_is_forked_from_the_program_that_starts_it() -> None:
    """It would have the program's objects without its threads, and clean up what is not its own."""
    program = (
        "import os\n"
        "from tenure.testing.simulation.batch import tallies\n"
        "os.register_at_fork(after_in_child=lambda: os.write(1, b'forked '))\n"
        "print(sum(tally.seeds for tally in tallies(1, 2, jobs=2)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "2\n"


def test_tallies_add_up() -> None:
    one, other = Tally(), Tally()
    first, second = outcomes([1, 2])
    one.add(first)
    other.add(_with_a_violation(second))
    one.merge(other)
    assert (one.seeds, one.failed) == (2, [2])
    assert one.operations == first.operations + second.operations
    [same] = tallies(1, 1, jobs=1)
    assert same.operations == first.operations


def _with_a_violation(outcome: Outcome) -> Outcome:
    return replace(outcome, violations=[Violation("limit", "/default", "a", "too many", ())])
