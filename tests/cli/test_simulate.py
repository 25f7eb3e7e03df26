"""`tenure simulate`: what it says of histories that hold, and of those that do not."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tenure.core.node import StoredSemaphore
from tenure.testing.history import check, load
from tests.cli.programs import Tenure, eventually
from tests.hang_guard.guard import descendants, is_alive

_grant_next = StoredSemaphore.grant_next


def _one_too_many(self: StoredSemaphore, now: float) -> Any:
    limit, self.limit = self.limit, self.limit + 1
    try:
        return _grant_next(self, now)
    finally:
        self.limit = limit


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A tenure that grants one token too many."""
    monkeypatch.setattr(StoredSemaphore, "grant_next", _one_too_many)
    caplog.set_level(logging.CRITICAL, logger="tenure")


def test_what_holds_is_summed_up(tenure: Tenure) -> None:
    done = tenure("simulate", "--seeds", "3", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("3 histories, ")
    assert "faults: " in second
    assert third == "none failed"


def test_a_script_gets_json(tenure: Tenure) -> None:
    told = tenure.json("simulate", "--seeds", "2", "--first-seed", "8", "--jobs", "1")
    assert told["seeds"] == 2
    assert told["operations"] > 400
    assert sum(told["faults"].values()) >= 10
    assert told["failed"] == []


def test_a_history_that_fails_is_told_with_its_seed_and_made_smaller(
    tenure: Tenure, defect: None, tmp_path: Path
) -> None:
    kept = tmp_path / "history.jsonl"
    done = tenure.inside(
        *("simulate", "--first-seed", "5", "--seeds", "1", "--jobs", "1", "--history", str(kept))
    )
    assert done.returncode == 70
    lines = done.stdout.splitlines()
    assert lines[0] == "seed 5 fails; again: tenure simulate --first-seed 5 --seeds 1"
    assert lines[1].startswith("limit: ")
    assert any(line.startswith("the smallest history with this failure") for line in lines)
    assert lines[-1] == "1 failed"
    assert "limit" in {violation.rule for violation in check(load([kept]))}


def test_after_a_few_that_fail_it_stops(tenure: Tenure, defect: None) -> None:
    done = tenure.inside("simulate", "--seeds", "500", "--jobs", "1", "--json")
    assert done.returncode == 70
    assert '"seed": 1' in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_its_workers_end_when_it_is_killed(tenure: Tenure) -> None:
    simulating = tenure.start("simulate", "--seeds", "1000000", "--jobs", "2")
    helpers = 2  # the fork server, and what removes the resources of the dead
    eventually(lambda: len(descendants(simulating.process.pid)) == helpers + 2)
    workers = descendants(simulating.process.pid)
    simulating.process.kill()
    simulating.process.wait()
    eventually(lambda: not any(map(is_alive, workers)))


@pytest.mark.parametrize("option", ["--seeds", "--first-seed", "--jobs"])
def test_a_number_that_is_none_is_refused(tenure: Tenure, option: str) -> None:
    done = tenure.inside("simulate", option, "-3")
    assert done.returncode == 78
    assert "'-3' is not a whole number" in done.stderr
