"""A short run on a real server: it and its clients die, stop and lose each other."""

from pathlib import Path

import pytest

from chaos.report import examine
from chaos.runner import Plan, run
from chaos.served import Served

FAULTS = (
    *("kill-server", "restart-server", "pause-server", "cut", "half-open", "flood"),
    *("kill", "kill-several", "pause", "supplant"),
)


@pytest.mark.no_debug
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_every_promise_is_kept_by_a_server_under_every_fault(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    await run(Served(folder), Plan(seconds=None, seed=1, processes=4, faults=FAULTS), tmp_path)

    report = examine(tmp_path)
    assert not report.violations, report.to_text()
    assert not report.failures, report.to_text()
    assert report.figures.acquisitions > 50
    assert report.figures.faults.keys() == set(FAULTS)
