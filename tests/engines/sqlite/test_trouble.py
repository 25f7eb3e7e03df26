"""What can be wrong with a file: each a clear error, and nothing lost."""

# ruff: noqa: ASYNC221, ASYNC240  nothing else runs on the loop while a test prepares its files

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.engines.contract import Place
from tenure.engines.sqlite import schema
from tenure.errors import EngineError, EngineUnavailable
from tenure.model import NodeConfig
from tenure.testing.recorder import TIMEOUT as PATIENCE
from tests.engines.sqlite.helpers import attached, engine_of, opened, program, result
from tests.guarantees import DURABLE_SQLITE, SQLITE, guarantee


async def refused(url: str, says: str) -> None:
    engine = engine_of(url)
    with pytest.raises(EngineError, match=says):
        await engine.open()
    with pytest.raises(EngineUnavailable):
        await engine.list_nodes()
    await engine.aclose()


@pytest.mark.parametrize("content", [b"short", b"not a database, but a text\n" * 100, bytes(8192)])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(
    url: str, path: Path, content: bytes
) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    await refused(url, "is not an SQLite database")
    assert path.read_bytes() == content


async def test_another_programs_database_is_refused_and_left_alone(url: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("CREATE TABLE theirs (a)")
    path.chmod(0o600)
    content = path.read_bytes()
    await refused(url, "another program's SQLite database")
    assert path.read_bytes() == content


async def test_a_file_of_a_newer_version_is_refused_and_left_alone(url: str, path: Path) -> None:
    async with program(url):
        pass
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("PRAGMA user_version = 99")
    await refused(url, "made by a newer tenure .*schema is 99")
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("PRAGMA user_version").fetchone() == (99,)


async def test_a_file_that_another_tool_took_out_of_its_mode_is_put_back(
    url: str, path: Path
) -> None:
    async with program(url):
        pass
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("PRAGMA journal_mode = DELETE")
    async with program(url) as one:
        assert await one.enqueue(1, "x") is Place.GRANTED
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_an_empty_file_is_taken(url: str, path: Path) -> None:
    path.touch(0o600)
    async with program(url) as one:
        assert await one.enqueue(1, "x") is Place.GRANTED


async def test_a_damaged_file_is_a_clear_error(url: str, path: Path) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        for number in range(200):
            await one.session.create_semaphore(f"pool-{number}", 1, b"x" * 100, exist_ok=False)
    content = bytearray(path.read_bytes())
    content[2048:] = b"\xff" * (len(content) - 2048)
    path.write_bytes(content)

    async def use() -> None:
        async with program(url) as one:
            for number in range(200):
                await one.session.update_semaphore(f"pool-{number}", b"y")

    with pytest.raises(EngineError, match=r"is damaged.*Stop all programs"):
        await use()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_taken_away_ends_everything(
    url: str, path: Path, replaced: bool
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        engine.store._checkpointer.close()  # one that has begun would use what is in its place
        os.rename(path, f"{path}.old")
        if replaced:
            path.touch(0o600)
        says = "replaced" if replaced else "removed"
        await one.ended()
        assert f"was {says} while in use" in str(one.heard.end)
        with pytest.raises(EngineError, match=f"was {says} while in use"):
            await engine.create_node("/new", NodeConfig(), exist_ok=False)
        os.rename(f"{path}.old", path)


async def test_a_checkpoint_leaves_a_file_alone_that_has_replaced_the_store(
    url: str, path: Path
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        assert await one.enqueue(1, "x") is Place.GRANTED
        os.rename(path, f"{path}.old")
        path.touch(0o600)
        engine.store._checkpointer.checkpoint()
        assert path.stat().st_size == 0
        os.rename(f"{path}.old", path)
        described = await engine.describe_semaphore("/default", "x", owners=True, waiters=True)
        assert len(described.owners) == 1  # the log is still the store's


async def test_a_file_that_has_replaced_the_store_is_not_read(url: str, path: Path) -> None:
    async with opened(url) as engine:
        os.rename(path, f"{path}.old")
        path.touch(0o600)
        engine.store.committer.busy = True  # so that reading opens a connection
        with pytest.raises(EngineError, match="was replaced"), engine.store.reading():
            pass
        engine.store.committer.busy = False
        assert path.stat().st_size == 0
        os.rename(f"{path}.old", path)


async def test_nothing_is_changed_in_a_file_that_was_found_missing(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        # The latest operation has looked at the file just now, however late the monitor is.
        monkeypatch.setattr("tenure.engines.sqlite.transaction._LOOK", 60.0)
        os.rename(path, f"{path}.old")
        await one.ended()
        with pytest.raises(EngineError, match="was removed while in use"):
            await engine.create_node("/new", NodeConfig(), exist_ok=False)
        os.rename(f"{path}.old", path)


async def test_a_watch_that_could_not_begin_hinders_no_later_one(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.transaction._LOOK", 0.0)
    async with program(url) as one, program(url) as other:
        changed = asyncio.Event()
        os.rename(path, f"{path}.old")
        with pytest.raises(EngineError, match="was removed while in use"):
            one.session.watch("x", data=False, owners=True, changed=changed.set)
        os.rename(f"{path}.old", path)
        one.session.watch("x", data=False, owners=True, changed=changed.set)
        changed.clear()
        assert await other.enqueue(1, "x") is Place.GRANTED
        await asyncio.wait_for(changed.wait(), PATIENCE)


async def test_a_sign_of_life_that_is_taken_away_proves_nothing(url: str, path: Path) -> None:
    async with opened(url) as engine, program(url) as other:
        one = await attached(engine, window=1)
        await one.enqueue(1, "x")
        proofs = len(one.heard.proofs)
        os.unlink(one.session._life.path)
        one.session.renew()
        assert len(one.heard.proofs) == proofs
        await one.ended()
        assert "was removed while in use" in str(one.heard.end)
        assert await other.enqueue(1, "x", timeout=0) is Place.REFUSED, "its window has not passed"
        assert await other.enqueue(2, "x") is Place.WAITING
        await other.granted(2)


async def test_the_folder_may_be_lost_when_nobody_uses_it(url: str, path: Path) -> None:
    async with program(url) as one:
        await one.session.create_semaphore("pool", 3, b"", exist_ok=False)
    os.unlink(f"{path}.tenure/turn.lock")
    os.rmdir(f"{path}.tenure")
    async with program(url) as one:
        described = await one.session.describe_semaphore("pool", owners=True, waiters=True)
        assert described.limit == 3


async def test_a_new_database_beside_an_old_folder_is_fine(url: str, path: Path) -> None:
    old = Path(f"{path}.tenure")
    old.mkdir(0o700)
    for name in ("1.live", "2.live", "2.sock", "7.live"):
        (old / name).touch(0o600)
    async with program(url) as one:
        assert await one.enqueue(1, "x") is Place.GRANTED
        assert not (old / "7.live").exists(), "what is nobody's is swept away"


# Disks


def mounted(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte."""
    folder = tmp_path / "disk"
    mounted(folder, "size=1m,mode=700")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            return filler


@pytest.mark.parametrize("query", ["", "?durability=full"])
@guarantee("disk full", "kept", "others proceed", "answers stand", on=(SQLITE, DURABLE_SQLITE))
async def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(
    small_disk: Path, query: str
) -> None:
    url = f"sqlite:///{small_disk}/store.db{query}"
    async with program(url, window=2) as one, program(url, window=2) as other:
        assert await one.enqueue(1, "x") is Place.GRANTED
        assert await other.enqueue(1, "x") is Place.WAITING
        filler = fill(small_disk)
        failed = 0
        for hold in range(2, 2000):
            try:
                await one.enqueue(hold, f"key-{hold}", data=b"x" * 1000)
            except EngineError as error:
                assert "full" in str(error)  # noqa: PT017
                failed += 1
                if failed == 3:
                    break
        assert failed == 3
        for _ in range(6):  # the heartbeat needs no room
            await asyncio.sleep(0.5)
            one.session.renew()
            other.session.renew()
        assert one.heard.end is None is other.heard.end
        filler.unlink()
        assert await one.enqueue(3000, "y") is Place.GRANTED
        await one.withdraw(1)
        await other.granted(1)
        engine: Any = other.session._engine
        described = await engine.list_semaphores("/default", owners=True, waiters=True)
        held = {each.name for each in described}
        assert f"key-{hold}" not in held, "what failed has not happened"
        assert {f"key-{number}" for number in range(2, hold - 2)} <= held, "the rest has"


@pytest.mark.parametrize("query", ["", "?durability=full"])
@guarantee("disk full", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_a_full_disk_while_closing_lets_go_all_the_same(small_disk: Path, query: str) -> None:
    url = f"sqlite:///{small_disk}/store.db{query}"
    async with program(url) as other:
        async with opened(url) as engine:
            one = await attached(engine)
            assert await one.enqueue(1, "x") is Place.GRANTED
            filler = fill(small_disk)

            async def use_up() -> None:
                for hold in range(2, 5000):
                    await one.enqueue(hold, f"key-{hold}", data=b"x" * 1000)

            with pytest.raises(EngineError, match="full"):
                await use_up()
            try:
                await engine.aclose()
            except EngineError as error:
                assert "full" in str(error)  # noqa: PT017
        filler.unlink()
        assert await other.enqueue(1, "x", timeout=0) is Place.GRANTED


async def test_a_full_disk_is_a_clear_error_when_opening(small_disk: Path) -> None:
    fill(small_disk)
    await refused(f"sqlite:///{small_disk}/store.db", "full")


async def test_a_read_only_file_system_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    mounted(folder, "size=1m,mode=700")
    try:
        url = f"sqlite:///{folder}/store.db"
        async with program(url):
            pass
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        await refused(url, "read-only")
        await refused(f"sqlite:///{folder}/other.db", "read-only")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_descriptors_that_have_run_out_are_a_clear_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as engine:

        def none_left(*_: object, **__: object) -> None:
            raise OSError(24, os.strerror(24))

        with monkeypatch.context() as patch:
            patch.setattr("tenure.engines.sqlite.participants.LivenessFile", none_left)
            with pytest.raises(EngineError, match="ulimit"):
                await attached(engine)
        one = await attached(engine)
        assert (await result(one.ask(1, "x"))).place is Place.GRANTED


async def test_a_file_of_the_first_version_is_brought_up_to_date(url: str, path: Path) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("pool").create(limit=3, data=b"kept")
    with closing(sqlite3.connect(path)) as shell:
        for column in (
            *("durable", "identity", "longest_window", "quarantine"),
            *("quarantined_until", "saved_at"),
        ):
            shell.execute(f"ALTER TABLE meta DROP COLUMN {column}")
        shell.execute("DROP TABLE rates")
        shell.execute("PRAGMA user_version = 1")
    for _ in range(2):
        async with tenure.connect(url) as client:
            described = await client.semaphore("pool").describe()
            assert (described.limit, described.data) == (3, b"kept")
            async with client.mutex("m").lock():
                pass
    with closing(sqlite3.connect(path)) as shell:
        assert shell.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
