"""dflockd's protocol, both ends, in simulated histories: none is violated, defects are found."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tenure.engines.dflockd import connection
from tenure.engines.dflockd.request import DflockdRequest
from tenure.engines.dflockd.session import DflockdSession
from tenure.server.dflockd.locks import Locks
from tenure.testing.simulation import Outcome, draw, run
from tenure.testing.simulation.plan import FAULTS
from tests.testing.simulation.lines import LinesWorld, connected

# A task of a killed process that is thrown away in the middle of its `finally` cannot wait there.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine:pytest.PytestUnraisableExceptionWarning"
)

SHARE = 40
"""Seeds for each run of the tests."""


@pytest.fixture(autouse=True)
def simulated(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are simulated, and lost connections are what this is about."""
    for name in ("tenure", "tenure.simulated"):
        caplog.set_level(logging.CRITICAL, logger=name)
    monkeypatch.setattr(connection, "_connected", connected)


def outcomes(seeds: range) -> Iterator[Outcome]:
    return (run(draw(seed), LinesWorld) for seed in seeds)


def test_no_history_is_violated() -> None:
    operations, faults = 0, Counter[str]()
    for outcome in outcomes(range(1, SHARE + 1)):
        assert not outcome.violations, f"seed {outcome.plan.seed}"
        operations += outcome.operations
        faults.update(outcome.faults)
    assert operations > 200 * SHARE
    assert set(faults) == {*FAULTS} - {"resize"}  # with dflockd, a limit comes with each request


def test_the_same_seed_gives_the_same_history() -> None:
    once, again = ([each.records for each in outcomes(range(3, 5))] for _ in range(2))
    assert once == again


def _counting_from_the_answer(self: DflockdSession, at: float) -> None:
    _proved(self, at + 2.0)


_proved = DflockdSession.prove


def _taking_back_too_early(self: Locks, now: float) -> None:
    _swept(self, now + 2.0)


_swept = Locks.sweep


def _joining_no_more(self: DflockdRequest) -> None:
    """It is in no queue any more, and nobody asks again."""


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (DflockdSession, "prove", _counting_from_the_answer),
        (Locks, "sweep", _taking_back_too_early),
        (DflockdRequest, "_again", _joining_no_more),
    ],
    ids=[
        "a proof that is younger than its question",
        "a lease that the server ends too early",
        "who has lost its place does not join again",
    ],
)
def test_a_planted_defect_is_found(
    owner: type, name: str, defect: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, defect)
    assert any(outcome.violations for outcome in outcomes(range(1, SHARE + 1)))
