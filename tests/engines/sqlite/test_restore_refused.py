"""When `tenure restore` is refused, and when it fails: the former store is left as it was."""

# ruff: noqa: ASYNC221, ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import tenure
from tenure.core.rules import MAX_WINDOW
from tenure.engines.sqlite.restore import backup, restore
from tenure.errors import EngineError
from tests.engines.sqlite.conftest import Workers
from tests.engines.sqlite.helpers import opened
from tests.engines.sqlite.restored import again, as_of_version_2, change, told

DIES = """
import os, signal, sys
from tenure.engines.sqlite.restore import restore
def die(left, pages):
    if left < pages / 2:
        os.kill(os.getpid(), signal.SIGKILL)
restore(sys.argv[1], sys.argv[2], force=True, progress=die)
"""


async def test_a_store_that_exists_is_replaced_only_by_force(
    url: str, path: Path, file: Path
) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    before = path.read_bytes()
    with pytest.raises(EngineError, match=r"exists.*--force"):
        restore(url, str(file))
    assert path.read_bytes() == before


async def test_a_store_that_a_program_has_open_is_not_replaced(
    url: str, file: Path, workers: Workers
) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    async with opened(url):  # without a session
        with pytest.raises(EngineError, match="in use"):
            again(url, file)
    async with workers(1) as (worker,):
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="in use"):
                again(url, file)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        assert await worker.do("enqueue", hold=1, name="m")


async def test_a_command_that_outlives_its_program_is_not_robbed(
    url: str, file: Path, workers: Workers
) -> None:
    async with workers(1) as (worker,):
        backup(url, str(file))
        child = await worker.do("inherit")
        try:
            os.kill(worker.pid, signal.SIGKILL)
            await worker.process.wait()
            with pytest.raises(EngineError, match="in use"):
                again(url, file)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_restore_that_is_killed_leaves_the_former_store(url: str, file: Path) -> None:
    async with tenure.connect(url) as client:
        for number in range(4):
            await client.semaphore(f"s{number}").create(limit=1, data=b"x" * 2**20)
        backup(url, str(file))
        await client.semaphore("later").create(limit=1, data=b"y" * 2**20)
        for number in range(4):
            await client.semaphore(f"s{number}").update(b"z" * 2**20)
    command = [sys.executable, "-c", DIES, url, str(file)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    async with tenure.connect(url) as client:
        assert (await client.semaphore("later").describe()).data == b"y" * 2**20
        for number in range(4):
            assert (await client.semaphore(f"s{number}").describe()).data == b"z" * 2**20
        async with client.mutex("m").lock(timeout=30):
            pass
    again(url, file, quarantine=0)
    async with tenure.connect(url) as client:
        assert len(await client.list_semaphores()) == 4


async def test_a_damaged_store_is_moved_away(url: str, path: Path, file: Path) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("pool").create(limit=3)
    backup(url, str(file))
    path.write_bytes(b"no database" * 1000)
    done = again(url, file)
    assert done.quarantine == MAX_WINDOW
    assert Path(done.moved).read_bytes().startswith(b"no database")
    async with tenure.connect(url) as client:
        assert (await client.semaphore("pool").describe()).limit == 3


@pytest.mark.parametrize("content", [b"", b"no database" * 1000])
def test_a_file_that_is_no_backup_restores_nothing(
    url: str, path: Path, file: Path, content: bytes
) -> None:
    file.write_bytes(content)
    with pytest.raises(EngineError, match="not a backup"):
        restore(url, str(file))
    assert not path.exists()


async def test_a_store_is_no_backup(url: str, path: Path, tmp_path: Path) -> None:
    async with opened(url):
        pass
    with pytest.raises(EngineError, match="not a backup"):
        restore(f"sqlite:///{tmp_path}/other.db", str(path))


async def test_a_damaged_backup_restores_nothing(url: str, path: Path, file: Path) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("pool").create(limit=3, data=b"x" * 2**17)
        await client.semaphore("data").create(limit=3, data=b"kept")
    backup(url, str(file))
    with file.open("r+b") as damaged:
        for page in range(5, 40):
            damaged.seek(page * 1024)
            damaged.write(b"\xff" * 1024)
    with pytest.raises(EngineError, match="damaged"):
        again(url, file)
    async with tenure.connect(url) as client:
        assert (await client.semaphore("data").describe()).data == b"kept"


async def test_a_backup_of_a_newer_version_is_refused(url: str, file: Path) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    with closing(sqlite3.connect(file)) as shell:
        shell.execute("PRAGMA user_version = 99")
    with pytest.raises(EngineError, match="newer tenure"):
        again(url, file)


async def test_a_database_of_another_program_is_not_replaced(
    url: str, path: Path, file: Path, tmp_path: Path
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    async with opened(other):
        pass
    backup(other, str(file))
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE theirs (id)")
    path.chmod(0o600)
    with pytest.raises(EngineError, match="another program's"):
        again(url, file)


async def test_a_backup_of_an_earlier_version_is_brought_up_to_date(
    url: str, path: Path, file: Path
) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("pool").create(limit=3)
    backup(url, str(file))
    as_of_version_2(file)
    assert again(url, file).quarantine == MAX_WINDOW
    assert told(path, "longest_window") == MAX_WINDOW


@pytest.mark.parametrize(
    ("column", "value"), [("saved_at", "x"), ("saved_at", 1e300), ("last_order_id", 2**62)]
)
async def test_a_backup_that_says_what_cannot_be_restores_nothing(
    url: str, file: Path, column: str, value: object
) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("data").create(limit=3, data=b"kept")
    backup(url, str(file))
    change(file, **{column: value})
    with pytest.raises(EngineError, match="counters are invalid"):
        again(url, file)
    async with tenure.connect(url) as client:
        assert (await client.semaphore("data").describe()).data == b"kept"


async def test_a_store_whose_schema_is_no_text_is_damaged(url: str, path: Path) -> None:
    async with opened(url):
        pass
    data = path.read_bytes()
    assert b"CREATE TABLE meta" in data
    path.write_bytes(data.replace(b"CREATE TABLE meta", b"CR\xffATE TABLE m\xffta"))
    with pytest.raises(EngineError, match="damaged"):
        async with opened(url):
            pass
