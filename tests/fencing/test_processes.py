"""Several processes before one fence, in one SQLite file."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.fencing.crowd import FENCE

PROCESSES, STEPS = 4, 100


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_of_many_processes_the_writes_never_go_back(journal: str, tmp_path: Path) -> None:
    path = tmp_path / "data.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
        FENCE.create_table(connection)
        connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, token INTEGER)")
        connection.commit()
        command = [sys.executable, "-W", "error", "-m", "tests.fencing.crowd", str(path)]
        crowd = [
            subprocess.Popen(
                [*command, str(number), str(STEPS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(PROCESSES)
        ]
        try:
            for each in crowd:
                assert each.stdout is not None
                assert each.stdout.readline() == "ready\n"
            for each in crowd:
                assert each.stdin is not None
                each.stdin.write("go\n")
                each.stdin.flush()
            refused = sum(int(each.communicate()[0]) for each in crowd)
        finally:
            for each in crowd:
                each.kill()
                each.communicate()
        notes = [token for (token,) in connection.execute("SELECT token FROM notes ORDER BY id")]
        (writes,) = connection.execute("SELECT writes FROM tenure_fences").fetchone()
    assert notes == sorted(notes)
    assert len(notes) == writes == PROCESSES * STEPS - refused
    assert refused > 0
