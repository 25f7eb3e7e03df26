"""The native protocol, both ends, in simulated histories: none is violated, defects are found."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tenure.engines.native.attachment import NativeOperationQueue
from tenure.engines.native.heartbeat import Proofs
from tenure.testing.simulation import Outcome, draw, run
from tenure.testing.simulation.plan import FAULTS
from tests.testing.simulation.served import ServedWorld

SHARE = 40
"""Seeds for each run of the tests."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Lost connections are what this is about."""
    for name in ("tenure", "tenure.simulated"):
        caplog.set_level(logging.CRITICAL, logger=name)


def outcomes(seeds: range) -> Iterator[Outcome]:
    return (run(draw(seed), ServedWorld) for seed in seeds)


def test_no_history_is_violated() -> None:
    operations, faults = 0, Counter[str]()
    for outcome in outcomes(range(1, SHARE + 1)):
        assert not outcome.violations, f"seed {outcome.plan.seed}"
        operations += outcome.operations
        faults.update(outcome.faults)
    assert operations > 200 * SHARE
    assert set(faults) == set(FAULTS)


def test_the_same_seed_gives_the_same_history() -> None:
    once, again = ([each.records for each in outcomes(range(3, 5))] for _ in range(2))
    assert once == again


def _counting_from_the_answer(self: Proofs, number: int, age: float) -> float | None:
    return None if _answered(self, number, age) is None else self.renewed + 2.0


_answered = Proofs.answered


def _sending_nothing_again(self: NativeOperationQueue, connection: object, _: object = ()) -> None:
    _resume(self, connection)  # type: ignore[arg-type]


_resume = NativeOperationQueue.resume


@pytest.mark.filterwarnings("ignore")  # what is broken on purpose may complain in any way
@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (Proofs, "answered", _counting_from_the_answer),
        (NativeOperationQueue, "resume", _sending_nothing_again),
    ],
    ids=["a proof that is younger than its question", "what was lost is not asked again"],
)
def test_a_planted_defect_is_found(
    owner: type, name: str, defect: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, defect)
    assert any(outcome.violations for outcome in outcomes(range(1, SHARE + 1)))
