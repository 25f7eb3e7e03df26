"""`tenure doctor` and `python -m tenure.doctor`: they tell what is the matter, whatever it is."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenure.doctor import Finding, examine, healthy, without_secrets
from tenure.doctor.__main__ import main
from tenure.engines import diagnose
from tenure.engines.sqlite import schema
from tests.cli.programs import Tenure

TURN = """
import fcntl, os, signal, struct, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, struct.pack("q", os.getpid()), 0)
print("there", flush=True)
signal.pause()
"""


def found(tenure: Tenure, code: int = 0, **environment: str) -> dict[str, Any]:
    """What a doctor finds, by what was examined."""
    import json

    done = tenure("doctor", "--json", **environment)
    assert (done.returncode, done.stderr) == (code, "")
    told = json.loads(done.stdout)
    assert told["usable"] == (code == 0)
    return {each["what"]: each for each in told["findings"]}


def test_a_store_that_works_is_tried_out(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    before = tenure.json("ls")
    rows = found(tenure)
    assert {each["level"] for each in rows.values()} <= {"ok", "warning"}
    assert rows["URL"]["found"] == f"{tenure.url}  (from TENURE_URL)"
    assert "the WAL-reset bug" in rows["checkpoints"]["found"]
    assert (
        rows["contents"]["found"] == f"schema {schema.VERSION}; nodes: 1, sessions: 0, requests: 0"
    )
    assert rows["in use"]["found"] == "by no other process"
    assert rows["lock"]["found"].startswith("locked and released in ")
    assert rows["hand-over"]["found"].startswith("from one session to the next in ")
    assert tenure.json("ls") == before
    files = {each.name for each in tenure.folder.iterdir()}
    assert files - {"store.db-wal", "store.db-shm"} == {"store.db", "store.db.tenure"}


def test_a_store_that_is_not_there_yet_is_not_made(tenure: Tenure) -> None:
    rows = found(tenure)
    assert "does not exist yet" in rows["file"]["found"]
    assert "left out" in rows["trial"]["found"]
    assert list(tenure.folder.iterdir()) == []


def test_where_the_url_comes_from(tenure: Tenure) -> None:
    given = tenure.inside("doctor", "--url", "memory://").stdout
    assert "memory://  (given)" in given
    assert "hand-over" in given
    rows = found(tenure, TENURE_URL="", XDG_STATE_HOME=str(tenure.folder))
    assert rows["URL"]["found"] == f"sqlite:///{tenure.folder}/tenure/tenure.db  (the default)"
    assert without_secrets("redis://me:secret@host/1") == "redis://***@host/1"


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1024:] = os.urandom(len(data) - 1024)
    file.write_bytes(data)


def foreign(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    file.chmod(0o600)


def newer(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def replaced_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("break_it", "what", "message", "remedy"),
    [
        (damage, "contents", "damaged", "Stop all programs"),
        (foreign, "contents", "another program's SQLite database", "a file of its own"),
        (newer, "contents", "made by a newer tenure", ""),
        (lambda file: file.write_bytes(b"text" * 1000), "contents", "not an SQLite", "another"),
        (replaced_by_a_folder, "file", "is a folder", "Add the name of a file"),
        (linked, "file", "is a symbolic link", "Name the file itself"),
        (dangling, "file", "is a symbolic link", "Name the file itself"),
        (lambda file: file.chmod(0o666), "file", "others can write to", ""),
        (lambda file: file.parent.chmod(0o777), "folder", "everyone can write", "of your own"),
    ],
)
def test_a_broken_store_is_told_with_its_remedy(
    tenure: Tenure, break_it: Callable[[Path], object], what: str, message: str, remedy: str
) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    file = tenure.folder / "store.db"
    for each in ("store.db-wal", "store.db-shm"):
        (tenure.folder / each).unlink(missing_ok=True)
    break_it(file)
    try:
        rows = found(tenure, 74)
    finally:
        tenure.folder.chmod(0o700)
    assert rows[what]["level"] == "failure"
    assert message in rows[what]["found"]
    assert remedy in rows[what]["remedy"]
    assert "left out" in rows["trial"]["found"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the URL is empty"),
        ("jobs.db", "is not a URL with a scheme"),
        ("nosuch://host", "no engine is installed for nosuch://"),
        ("sqlite:///jobs.db?mode=7", "mode is 0600"),
        ("sqlite://host/jobs.db", "names a host"),
        ("sqlite:////proc/nowhere/jobs.db", "may not write|cannot be made|does not work"),
    ],
)
def test_a_wrong_url_is_a_failure_in_a_row(tenure: Tenure, url: str, message: str) -> None:
    done = tenure.inside("doctor", "--url", url)
    assert (done.returncode, done.stderr) == (74, "")
    failures = [line for line in done.stdout.splitlines() if line.startswith("failure")]
    assert any(part in line for line in failures for part in message.split("|")), done.stdout


def test_a_writer_that_was_stopped_in_its_turn_is_named(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    turn = str(tenure.folder / "store.db.tenure" / "turn.lock")
    with subprocess.Popen(
        [sys.executable, "-c", TURN, turn], stdout=subprocess.PIPE, text=True
    ) as stalled:
        assert stalled.stdout is not None
        assert stalled.stdout.readline() == "there\n"
        try:
            rows = {each.what: each for each in diagnose(tenure.url)}
            os.kill(stalled.pid, signal.SIGSTOP)
            row = found(tenure, 74)["writers"]
        finally:
            stalled.kill()
    assert rows["writers"].level == "warning"
    assert f"pid {stalled.pid} has had the turn" in rows["writers"].found
    assert (row["level"], row["found"]) == (
        "failure",
        f"pid {stalled.pid} was stopped in its turn",
    )
    assert f"kill -CONT {stalled.pid}" in row["remedy"]
    assert found(tenure)["writers"]["found"] == "take their turns"


def test_who_uses_the_file_is_told_and_who_is_stopped(tenure: Tenure) -> None:
    holder = tenure.hold()
    pid = holder.process.pid
    assert found(tenure)["in use"]["found"] == f"by pid {pid}"
    holder.signal(signal.SIGSTOP)
    row = found(tenure)["in use"]
    assert (row["level"], row["found"]) == ("warning", f"by pid {pid}; stopped: pid {pid}")
    holder.signal(signal.SIGKILL)
    holder.process.wait()
    assert "1 dead, which the next one removes" in found(tenure)["in use"]["found"]


@pytest.mark.parametrize(("free", "level"), [(2**20 - 1, "failure"), (2**25, "warning")])
def test_a_full_disk_is_told(
    tenure: Tenure, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    real = os.statvfs

    def statvfs(path: Any) -> Any:
        state = real(path)
        return SimpleNamespace(
            f_blocks=free, f_bavail=free, f_frsize=1, f_files=9, f_favail=3, f_flag=state.f_flag
        )

    monkeypatch.setattr(os, "statvfs", statvfs)
    rows = {each.what: each for each in examine(tenure.url)}
    assert rows["disk space"].level == level
    assert rows["inodes"].level == "warning"


def test_a_plain_python_can_examine_without_the_extra(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    code = (
        "import runpy, sys; sys.modules |= {'click': None, 'rich': None}\n"
        "runpy.run_module('tenure.doctor', run_name='__main__', alter_sys=True)"
    )
    for arguments, status, message in (
        ([], 0, "ok       hand-over"),
        (["jobs\x1b[2J.db"], 74, "jobs\\x1b[2J.db"),
        (["--help"], 0, "usage: "),
        (["--halp"], 78, ""),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, *arguments],
            env=tenure.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, message in done.stdout) == (status, True), done


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--halp", 78)])
def test_how_it_is_used_is_told(
    capsys: pytest.CaptureFixture[str], argument: str, status: int
) -> None:
    assert main([argument]) == status
    said = capsys.readouterr()
    told, other = (said.out, said.err) if status == 0 else (said.err, said.out)
    assert (told, other) == ("usage: python -m tenure.doctor [URL]\n", "")


def test_whoever_has_read_enough_of_it_hears_of_no_trouble(tenure: Tenure) -> None:
    nobody_reads, writes = os.pipe()
    os.close(nobody_reads)
    done = subprocess.run(
        [sys.executable, "-m", "tenure.doctor"],
        env=tenure.environment,
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_examination_that_fails_itself_is_a_failure(
    tenure: Tenure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> list[Finding]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("tenure.engines.sqlite.engine.SqliteEngine.diagnose", broken)
    findings = list(examine(tenure.url))
    (engine,) = [each for each in findings if each.what == "engine"]
    assert (engine.level, "planted" in engine.found) == ("warning", True)
    assert healthy(findings)
    assert findings[-1].what == "hand-over"
