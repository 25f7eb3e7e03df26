"""Each program in `examples/` runs, and prints what its pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path) -> str:
    """Run an example on a new SQLite file in this folder, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", FOLDER / name],
        cwd=folder,
        env={**os.environ, "TENURE_URL": "sqlite:///examples.db", "XDG_STATE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_a_cron_job_runs_once_in_a_period(tmp_path: Path) -> None:
    assert run("cron_once.py", tmp_path) == "backing up\n"
    assert "nothing to do; the last run was started by" in run("cron_once.py", tmp_path)


def test_jobs_share_the_gpus(tmp_path: Path) -> None:
    lines = run("gpu_slots.py", tmp_path).splitlines()
    jobs = [line.split(" uses GPU ") for line in lines]
    assert sorted(job for job, _ in jobs) == [f"job {number}" for number in range(1, 7)]
    assert {gpu for _, gpu in jobs} <= {"0", "1"}


PRINTED = {
    "fenced_writer.py": "the late write was refused\nbalance: 90\n",
    "leader.py": "first leads\nsecond leads\nclients see: second\n",
    "service_discovery.py": (
        "live: 10.0.0.1:80, 10.0.0.2:80\nlive: 10.0.0.2:80\nusing 10.0.0.2:80\n"
    ),
    "web_handler.py": "409 an export is under way\n200 exported\n",
}


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_an_example_prints_what_it_shows(name: str, printed: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == printed


def test_a_worker_applies_the_last_setting(tmp_path: Path) -> None:
    # Values that follow one another quickly may be merged; the last one is always seen.
    assert run("config_reload.py", tmp_path).endswith("stopped\n")


def test_every_example_is_run() -> None:
    shown = {path.name for path in FOLDER.glob("*.py")}
    assert shown == {"cron_once.py", "gpu_slots.py", "config_reload.py", *PRINTED}


def test_every_example_is_on_its_page() -> None:
    page = (FOLDER.parent / "docs" / "start" / "examples.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert f"{{literalinclude}} ../../examples/{path.name}\n" in page
