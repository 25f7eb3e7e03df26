"""Short runs on the real thing. What takes long in them are the faults themselves."""

import json
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.adapter import Engine
from chaos.faults import everywhere, resizing
from chaos.report import Report, examine
from chaos.runner import Plan, run
from chaos.sqlite import Sqlite
from tests.guarantees.histories import by_chaos

# A moment that did not come is no failure: nobody wanted the name, nobody was seen in its turn, or
# the store was out of order by another fault when an administrator came.
BY_OCCASION = {"evict", "end-session", "delete", "foreign-lock", "kill-in-turn", "stop-in-turn"}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    folder = tmp_path / "engine"
    folder.mkdir()
    return Sqlite(folder)


def explained(report: Report) -> str:
    return report.to_text()


@by_chaos
@pytest.mark.no_debug
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_every_promise_is_kept_under_every_fault(engine: Engine, tmp_path: Path) -> None:
    await run(engine, Plan(seconds=None, seed=1), tmp_path)

    report = examine(tmp_path)
    assert not report.violations, explained(report)
    assert not report.failures, explained(report)
    assert report.figures.acquisitions > 100
    offered = {fault.name for fault in (*engine.faults(), *everywhere(), *resizing())}
    assert report.figures.faults.keys() >= offered - BY_OCCASION
    assert report.figures.faults.keys() | report.figures.missed.keys() == offered
    assert json.loads(report.to_json())["violations"] == []


@pytest.mark.no_debug
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_leases_that_do_not_lapse_are_found_out(tmp_path: Path) -> None:
    faults, program = ("long-pause",), "tests.chaos.never_lapses"
    for seed in range(1, 6):  # it takes a pause in the right moment
        folder = tmp_path / str(seed)
        (folder / "engine").mkdir(parents=True)
        plan = Plan(11.0, seed, faults=faults, program=program)
        await run(Sqlite(folder / "engine"), plan, folder)
        report = examine(folder)
        if report.violations:
            break
    assert any(each.rule == "limit" for each in report.violations), explained(report)
    assert not report.passed
    assert "FAILED: promises were broken" in explained(report)
    assert main(["check", str(folder)]) == 1


@pytest.mark.no_debug
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_limits_that_are_kept_loosely_are_found_out(engine: Engine, tmp_path: Path) -> None:
    plan = Plan(6.0, 1, faults=("stall",), program="tests.chaos.loose_limits")
    await run(engine, plan, tmp_path)
    report = examine(tmp_path)
    assert {"limit", "rate"} <= {each.rule for each in report.violations}, explained(report)


async def test_a_fault_that_the_engine_does_not_have_is_refused(
    engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="sqlite has no fault named moon"):
        await run(engine, Plan(seconds=1, faults=("moon",)), tmp_path)
