"""No two programs hold one lock when other programs touch the files of a store."""

# ruff: noqa: ASYNC220, ASYNC221  nothing else runs on the loop

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tenure.engines.sqlite import protection
from tenure.engines.sqlite.restore import restore
from tenure.errors import EngineError, EngineUnavailable
from tests.engines.sqlite.conftest import Workers
from tests.engines.sqlite.helpers import attached, opened
from tests.engines.sqlite.worker import Refused

LOG = ("store.db-wal", "store.db-shm")

needs_locks = pytest.mark.skipif(
    not hasattr(fcntl, "F_OFD_SETLK"), reason="the system has no locks of open files"
)
pytestmark = needs_locks


def inodes(folder: Path) -> list[int]:
    return [os.stat(folder / each).st_ino for each in LOG]


def remove(folder: Path, *names: str) -> None:
    for name in names:
        target = folder / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()


# What other descriptors of the files do


async def test_a_program_that_reads_its_own_store_keeps_its_locks(
    workers: Workers, tmp_path: Path
) -> None:
    async with workers(3) as (holder, leaver, other):
        assert (await holder.do("enqueue", hold=1, name="x"))[0] == "GRANTED"
        log = inodes(tmp_path)
        for name in ("store.db", *LOG, "store.db.tenure/turn.lock", "store.db.tenure/1.live"):
            await holder.do("read", path=str(tmp_path / name))
        await leaver.do("close")  # it must not take itself for the last one
        assert inodes(tmp_path) == log
        assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await holder.do("withdraw", hold=1)
        await other.hear("granted", hold=1)


async def test_a_new_program_does_not_clear_the_index_that_another_uses(
    workers: Workers, tmp_path: Path
) -> None:
    async with workers(1) as (holder,):
        for hold in range(20):
            await holder.do("enqueue", hold=hold, name=f"x-{hold}")
        await holder.do("read", path=str(tmp_path / LOG[1]))
        size = (tmp_path / LOG[1]).stat().st_size
        with sqlite3.connect(tmp_path / "store.db") as shell:
            assert shell.execute("SELECT count(*) FROM requests").fetchone() == (20,)
        shell.close()
        assert (tmp_path / LOG[1]).stat().st_size == size
        assert (await holder.do("enqueue", hold=20, name="x-20"))[0] == "GRANTED"


async def test_the_last_program_removes_the_log_all_the_same(url: str, tmp_path: Path) -> None:
    async with opened(url) as engine:
        await attached(engine)
        async with opened(url) as second:
            await attached(second)
        (tmp_path / "store.db").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["store.db", "store.db.tenure"]
    assert not protection._descriptors


async def test_a_descriptor_stays_open_while_the_program_has_another_of_the_file(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        await attached(engine)
        own = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        own.execute("BEGIN")
        own.execute("SELECT count(*) FROM requests").fetchone()
    shell = ["sqlite3", "store.db", "PRAGMA journal_mode = DELETE"]
    if shutil.which("sqlite3"):  # the program's own connection has kept its lock
        found = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "locked" in found.stderr
    own.execute("COMMIT")
    own.close()
    protection.LogLocks.close_unused()
    assert not protection._descriptors


async def test_a_forked_child_that_connects_again_keeps_its_log(
    workers: Workers, url: str, tmp_path: Path
) -> None:
    program = """
import asyncio, os, sys
from tenure.engines.sqlite import connect
from tenure.clock import SystemClock
from tests.engines.sqlite.helpers import attached, opened
url, (parent_left, leave), (child_holds, hold) = sys.argv[1], os.pipe(), os.pipe()
async def parent():
    async with opened(url) as engine:
        await attached(engine)
        child = os.fork()
        if child == 0:
            try:
                os._exit(asyncio.run(in_child()))
            finally:
                os._exit(1)
        os.close(hold)
        os.read(child_holds, 1)
    os.write(leave, b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
async def in_child():
    async with opened(url) as engine:
        one = await attached(engine)
        place = await one.enqueue(1, "x")
        os.write(hold, b"x")
        os.read(parent_left, 1)
        print(place.name, flush=True)
        sys.stdin.read()
    return 0
asyncio.run(parent())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "GRANTED\n"
        log = inodes(tmp_path)
        async with workers(1) as (other,):
            assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        assert inodes(tmp_path) == log
        process.stdin.close()
    assert process.returncode == 0


# Other programs that open the database


@pytest.mark.skipif(not shutil.which("sqlite3"), reason="needs the sqlite3 shell")
async def test_a_shell_may_vacuum_the_store_but_not_end_its_log(
    workers: Workers, tmp_path: Path
) -> None:
    def shell(statement: str) -> str:
        call = ["sqlite3", "store.db", statement]
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    async with workers(2) as (holder, other):
        await holder.do("enqueue", hold=1, name="x")
        await holder.do("read", path=str(tmp_path / "store.db"))
        assert "locked" in shell("PRAGMA journal_mode = DELETE")
        assert not shell("VACUUM")
        assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await holder.do("withdraw", hold=1)
        await other.hear("granted", hold=1)


# Files that are taken away


@pytest.mark.parametrize(
    "names",
    [
        LOG,
        LOG[1:],
        ("store.db", *LOG),
        ("store.db.tenure",),
        ("store.db.tenure/turn.lock",),
        ("store.db", *LOG, "store.db.tenure"),
    ],
    ids=" ".join,
)
async def test_the_holder_loses_its_lease_before_another_program_is_granted(
    workers: Workers, tmp_path: Path, names: tuple[str, ...]
) -> None:
    async with workers(1, window=2.0) as (holder,), workers(1, attach=False) as (other,):
        await holder.do("enqueue", hold=1, name="x")
        remove(tmp_path, *names)
        await other.do("attach", window=30.0, renew=True)
        where, _ = await other.do("enqueue", hold=1, name="x")
        if where == "GRANTED":
            granted = other.heard("outcome")[-1]
        else:  # the store still has the session of the holder
            granted = await other.hear("granted", hold=1)
        lost = await holder.hear("ended")
        assert "while in use" in lost["error"]
        assert lost["at"] < granted["at"]
        with pytest.raises(Refused, match="while in use"):
            await holder.do("create", name="pool", limit=1)


@pytest.mark.parametrize("name", [LOG[0], "store.db"])
async def test_a_new_program_is_refused_while_the_former_index_is_in_use(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    async with workers(1) as (holder,), workers(2, attach=False) as (other, later):
        await holder.do("enqueue", hold=1, name="x")
        remove(tmp_path, name)
        with pytest.raises(Refused, match="End every program that uses"):
            await other.do("attach", window=30.0, renew=True)
        lost = await holder.hear("ended")
        assert re.search(f"{name} was (removed|replaced) while in use", lost["error"])
        await holder.do("close")
        await later.do("attach", window=30.0, renew=True)
        assert (await later.do("enqueue", hold=1, name="x"))[0] == "GRANTED"


async def test_the_end_is_in_the_log(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        remove(tmp_path, *LOG)
        engine.monitor._tick()
        assert one.heard.end is not None
        (record,) = (each for each in caplog.records if each.levelname == "ERROR")
        assert record.getMessage().startswith(
            f"all sessions have ended: url={url} error={tmp_path}"
        )
        assert "removed while in use" in record.getMessage()


async def test_a_new_program_is_refused_while_a_stopped_one_may_hold(
    workers: Workers, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 0.1)
    async with workers(1) as (holder,):
        await holder.do("enqueue", hold=1, name="x")
        holder.stop()
        remove(tmp_path, *LOG)
        async with opened(url) as engine:
            # A newcomer with the current files is not named.
            async with workers(1, attach=False) as (newcomer,):
                await newcomer.do("open")
                with pytest.raises(EngineUnavailable, match=rf"loss: pid {holder.pid} \([^,]+$"):
                    await attached(engine)
            holder.signal(signal.SIGCONT)
            await holder.hear("ended")
            monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 20.0)
            one = await attached(engine)
            assert (await one.enqueue(1, "x")).name == "GRANTED"


async def test_it_is_refused_while_clients_of_a_server_may_hold(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 0.1)
    async with opened(url) as server:
        one = await attached(server, window=1.0, liveness="window")
        remove(tmp_path, "store.db", *LOG)
        server.monitor._tick()
        assert one.heard.end is not None
        async with opened(url) as engine:
            with pytest.raises(EngineUnavailable, match="replaced or set back while in use"):
                await attached(engine)
            monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 20.0)
            await attached(engine)
            assert server.clock.now() >= one.session.proven_until - 1.0


async def test_a_program_joins_in_vain_while_its_files_are_replaced(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        remove(tmp_path, *LOG)
        with pytest.raises(EngineError, match="removed while in use"):
            await attached(engine)
        assert not engine.store.marks.marked


async def test_a_view_of_a_store_that_was_taken_away_is_an_error(url: str, tmp_path: Path) -> None:
    async with opened(url) as engine:
        await attached(engine)
        remove(tmp_path, *LOG)
        engine.store.tx._checked_at = float("-inf")
        with pytest.raises(EngineError, match="removed while in use"):
            await engine.list_nodes()


async def test_a_file_that_is_put_back_is_not_used_again(url: str, tmp_path: Path) -> None:
    async with opened(url) as engine:
        await attached(engine)
        os.rename(tmp_path / "store.db", tmp_path / "elsewhere")
        engine.monitor._tick()
        os.rename(tmp_path / "elsewhere", tmp_path / "store.db")
        with pytest.raises(EngineError, match="removed while in use"):
            await attached(engine)


async def test_the_end_of_a_former_program_leaves_the_new_log_alone(
    workers: Workers, url: str, tmp_path: Path
) -> None:
    async with opened(url) as former:
        one = await attached(former)
        for hold in range(50):
            await one.enqueue(hold, f"x-{hold}")
        remove(tmp_path, *LOG)
        former.monitor._tick()
        async with workers(1) as (new,):
            await new.do("create", name="pool", limit=7)
            await new.do("close")
        assert (tmp_path / LOG[0]).exists()  # it was not the last one to have the file open
    async with opened(url) as engine:
        found = await engine.list_semaphores("/default", owners=True, waiters=True)
        names = [each.name for each in found]
    assert names == ["pool"]


async def test_no_backup_is_restored_while_a_program_works_with_former_files(
    url: str, file: Path, tmp_path: Path
) -> None:
    from tenure.engines.sqlite.restore import backup

    async with opened(url) as engine:
        await attached(engine)
        backup(url, str(file))
        remove(tmp_path, "store.db", *LOG, "store.db.tenure")
        with pytest.raises(EngineError, match="is in use"):
            restore(url, str(file))


# Files that are truncated


@pytest.mark.parametrize("names", [("store.db",), LOG[:1], ("store.db", LOG[0])], ids=" ".join)
async def test_a_truncated_file_ends_the_sessions_and_is_named(
    url: str, tmp_path: Path, names: tuple[str, ...]
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        for name in names:
            os.truncate(tmp_path / name, 0)
        await one.ended()
        assert f"{names[0]} was truncated while in use" in str(one.heard.end)
        with pytest.raises(EngineError, match="shorter than its index says"):
            async with opened(url) as other:
                await attached(other)


async def test_a_checkpoint_that_truncates_the_log_ends_no_session(
    url: str, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        shell = sqlite3.connect(tmp_path / "store.db")
        assert shell.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        shell.close()
        assert (tmp_path / LOG[0]).stat().st_size == 0
        engine.monitor._tick()
        assert one.heard.end is None
        assert (await one.enqueue(2, "y")).name == "GRANTED"


# Backup tools, names and modes


async def test_a_reader_that_stays_and_a_copy_leave_the_leases_alone(
    workers: Workers, tmp_path: Path
) -> None:
    async with workers(2) as (holder, other):
        await holder.do("enqueue", hold=1, name="x")
        reader = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM requests").fetchone()
        reader.execute("SELECT count(*) FROM nodes").fetchone()
        shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *_: ["store.db.tenure", "copy"])
        assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await holder.do("withdraw", hold=1)
        await other.hear("granted", hold=1)
        reader.close()


async def test_a_vacuum_into_another_file_leaves_the_leases_alone(
    workers: Workers, tmp_path: Path
) -> None:
    async with workers(2) as (holder, other):
        await holder.do("enqueue", hold=1, name="x")
        tool = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        tool.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
        tool.close()
        assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await holder.do("withdraw", hold=1)
        await other.hear("granted", hold=1)


async def test_a_renamed_folder_ends_the_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    async with opened(f"sqlite:///{folder}/store.db") as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        folder.rename(tmp_path / "two")
        await one.ended()
        assert "while in use" in str(one.heard.end)


# Systems without such locks


async def test_a_system_without_the_locks_goes_by_the_names_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def old(fd: int, command: int, *arguments: Any) -> Any:
        if command in {fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK}:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", old)
    async with opened(url) as engine:
        one = await attached(engine)
        assert not engine.store.marks.supported
        remove(tmp_path, *LOG)
        engine.monitor._tick()
        assert one.heard.end is not None
    async with opened(url) as engine:
        await attached(engine)
