"""A short run over dflockd's protocol: its server and clients die, stop and lose each other.

Administrators take away what they have.
"""

from pathlib import Path

import pytest

from chaos.dflockd import Dflockd
from chaos.report import examine
from chaos.runner import Plan, run

FAULTS = (
    *("kill-server", "pause-server", "cut", "half-open", "kill", "long-pause"),
    *("evict", "end-session", "delete", "drop"),
)


@pytest.mark.no_debug
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
async def test_every_promise_is_kept_over_dflockds_protocol(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    await run(Dflockd(folder), Plan(seconds=None, seed=1, processes=3, faults=FAULTS), tmp_path)

    report = examine(tmp_path)
    assert not report.violations, report.to_text()
    assert not report.failures, report.to_text()
    assert report.figures.acquisitions > 50
    assert report.figures.faults.keys() == set(FAULTS)
