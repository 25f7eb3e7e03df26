"""`tenure backup`: a copy of one moment, whole or not there."""

# ruff: noqa: ASYNC221, ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import tenure
from tenure.engines.contract import Withdrawn
from tenure.engines.sqlite.restore import backup
from tenure.errors import EngineError
from tests.engines.sqlite.helpers import attached, opened, result

DIES = """
import os, signal, sys
from tenure.engines.sqlite.restore import backup
def die(left, pages):
    if left < pages / 2:
        os.kill(os.getpid(), signal.SIGKILL)
backup(sys.argv[1], sys.argv[2], force=True, progress=die)
"""


async def fill(url: str, semaphores: int = 4) -> None:
    """Semaphores with more data than is copied in one step."""
    async with tenure.connect(url) as client:
        for number in range(semaphores):
            await client.semaphore(f"s{number}").create(limit=1, data=bytes([number]) * 2**20)


def rows(file: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as shell:
        return shell.execute(question).fetchall()


async def test_a_backup_is_the_store_at_one_moment_while_programs_write(
    url: str, path: Path, file: Path
) -> None:
    await fill(url)
    steps: list[int] = []
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as writer:

        def write(left: int, _pages: int) -> None:
            """Commit between any two steps, as any other program does, and wait for nothing."""
            steps.append(left)
            writer.execute("UPDATE contents SET data = ?", (os.urandom(2**20),))

        assert backup(url, str(file), progress=write) == (str(file), file.stat().st_size)
        assert len(steps) > 3
        assert steps == sorted(steps, reverse=True), "it did not begin anew"
    assert rows(file, "PRAGMA integrity_check") == [("ok",)]
    for number in range(4):
        data = rows(file, f"SELECT data FROM contents WHERE name = 's{number}'")
        assert data == [(bytes([number]) * 2**20,)]
    assert os.listdir(file.parent) == [file.name], "it is one file"


async def test_a_backup_has_what_was_committed_before_it(url: str, file: Path) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "held")
        backup(url, str(file))
        assert rows(file, "SELECT name FROM requests") == [("held",)]


async def test_only_its_owner_can_read_a_backup(url: str, file: Path) -> None:
    await fill(url, 1)
    umask = os.umask(0)
    try:
        backup(url, str(file))
    finally:
        os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_a_file_that_exists_is_replaced_only_by_force(url: str, file: Path) -> None:
    await fill(url, 1)
    file.write_bytes(b"last week's")
    with pytest.raises(EngineError, match=r"exists.*--force"):
        backup(url, str(file))
    assert file.read_bytes() == b"last week's"
    backup(url, str(file), force=True)
    assert rows(file, "PRAGMA integrity_check") == [("ok",)]


async def test_a_file_that_appears_during_the_backup_is_not_replaced(url: str, file: Path) -> None:
    await fill(url)

    def appear(_left: int, _pages: int) -> None:
        file.write_bytes(b"another")

    with pytest.raises(EngineError, match="exists"):
        backup(url, str(file), progress=appear)
    assert file.read_bytes() == b"another"
    assert os.listdir(file.parent) == [file.name]


async def test_a_backup_that_is_killed_leaves_what_was_there(url: str, file: Path) -> None:
    await fill(url)
    command = [sys.executable, "-c", DIES, url, str(file)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not file.exists()
    assert len(os.listdir(file.parent)) == 1

    backup(url, str(file))
    assert os.listdir(file.parent) == [file.name], "what the killed one left is removed"
    before = file.read_bytes()
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert file.read_bytes() == before


async def test_a_partial_backup_that_is_being_written_is_left_alone(url: str, file: Path) -> None:
    await fill(url)
    other = file.with_name(file.name)

    def another(left: int, pages: int) -> None:
        if left < pages / 2 and not other.exists():
            backup(url, str(other), force=True)

    backup(url, str(file), force=True, progress=another)
    assert rows(file, "PRAGMA integrity_check") == [("ok",)]
    assert os.listdir(file.parent) == [file.name]


async def test_a_damaged_store_makes_no_backup(url: str, path: Path, file: Path) -> None:
    await fill(url)
    with path.open("r+b") as database:
        for page in range(5, 60):
            database.seek(page * 1024)
            database.write(b"\xff" * 1024)
    with pytest.raises(EngineError, match="damaged"):
        backup(url, str(file))
    assert os.listdir(file.parent) == []


async def test_a_backup_is_not_taken_for_a_store(url: str, file: Path) -> None:
    await fill(url, 1)
    backup(url, str(file))
    with pytest.raises(EngineError, match=r"is a backup.*tenure restore"):
        async with tenure.connect(f"sqlite:///{file}"):
            pass


async def test_the_store_itself_is_no_place_for_its_backup(url: str, path: Path) -> None:
    await fill(url, 1)
    with pytest.raises(EngineError, match="the store itself"):
        backup(url, str(path), force=True)


async def test_a_file_of_another_program_is_not_backed_up(url: str, path: Path, file: Path) -> None:
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE theirs (id)")
    path.chmod(0o600)
    with pytest.raises(EngineError, match="another program's"):
        backup(url, str(file))


async def test_a_folder_that_is_missing_is_said(url: str, tmp_path: Path) -> None:
    await fill(url, 1)
    with pytest.raises(EngineError, match="No such file"):
        backup(url, str(tmp_path / "nowhere" / "b"))


async def test_nothing_that_a_backup_does_releases_a_lease(url: str, file: Path) -> None:
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        await one.enqueue(1, "m")
        await two.enqueue(1, "m")
        backup(url, str(file))
        await one.withdraw(1)
        await two.granted(1)
        assert await result(two.session.withdraw(1)) is Withdrawn.LEFT
