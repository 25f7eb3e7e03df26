"""`tenure backup` and `tenure restore`, as commands."""

from __future__ import annotations

import stat

import pytest

from tenure.cli.mistakes import Status
from tests.cli.programs import LISTENER, Tenure


def saved(tenure: Tenure) -> None:
    assert tenure.inside("sem", "create", "pool", "--limit", "3", "--data", "kept").returncode == 0
    done = tenure.inside("backup", str(tenure.folder / "b"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tenure.folder}/b (")


def test_a_store_is_saved_and_made_from_the_backup(tenure: Tenure) -> None:
    saved(tenure)
    file = tenure.folder / "b"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert tenure.inside("sem", "update", "pool", "--data", "newer").returncode == 0
    done = tenure.inside("restore", str(file), "--force")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"restored {tenure.folder}/store.db as it was at 2")
    assert second.startswith("nothing is granted for 30 s from its first use on: the longest")
    assert "kept" in tenure.inside("describe", "pool").stdout
    refused = tenure.inside("run", "--lock", "m", "--timeout", "0", "--", "true")
    assert refused.returncode == Status.STORE
    assert "restored from a backup" in refused.stderr


def test_a_quarantine_is_shortened_on_ones_word(tenure: Tenure) -> None:
    saved(tenure)
    done = tenure.inside("restore", str(tenure.folder / "b"), "--force", "--quarantine", "0")
    assert "no quarantine" in done.stdout
    assert tenure("run", "--lock", "m", "--timeout", "9", "--", "true").returncode == 0


def test_scripts_get_json(tenure: Tenure) -> None:
    saved(tenure)
    file = str(tenure.folder / "b")
    again = tenure.json("backup", file, "--force")
    assert again["backup"] == file
    assert again["bytes"] > 1000
    told = tenure.json("restore", file, "--force", "--quarantine", "1m")
    assert (told["quarantine"], told["moved"]) == (60.0, None)


def test_a_damaged_store_that_was_moved_is_said(tenure: Tenure) -> None:
    saved(tenure)
    (tenure.folder / "store.db").write_bytes(b"x" * 5000)
    done = tenure.inside("restore", str(tenure.folder / "b"), "--force")
    assert "the damaged store that was there is" in done.stdout


def test_a_store_in_use_is_refused_and_its_holder_goes_on(tenure: Tenure) -> None:
    saved(tenure)
    holder = tenure.start("run", "--lock", "m", "--", "python3", "-c", LISTENER)
    assert holder.line().startswith("there")
    done = tenure("restore", str(tenure.folder / "b"), "--force")
    assert done.returncode == Status.STORE
    assert "is in use. Stop all programs" in done.stderr
    assert "m" in tenure("ls").stdout


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("tenure://coord.example", "beside the server"),
        ("tenures://coord.example", "beside the server"),
        ("redis://cache", "redis-cli --rdb"),
        ("rediss://cache", "redis-cli --rdb"),
        ("postgresql://db/jobs", "pg_dump"),
        ("postgres://db/jobs", "pg_basebackup"),
        ("etcd://a,b,c", "etcdctl snapshot"),
        ("ydb://db:2136/local", "ydb tools"),
        ("dflockd://locks", "memory only"),
        ("memory://", "the memory of one process"),
        ("other://x", "the tools of its store"),
    ],
)
@pytest.mark.parametrize("command", ["backup", "restore"])
def test_other_stores_are_refused_with_their_own_tools(
    tenure: Tenure, command: str, url: str, said: str
) -> None:
    (tenure.folder / "b").touch()
    done = tenure.inside(command, str(tenure.folder / "b"), "--url", url, "--force")
    assert done.returncode == Status.USAGE
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_store_that_is_not_there_is_not_made_to_be_saved(tenure: Tenure) -> None:
    done = tenure.inside("backup", str(tenure.folder / "b"))
    assert done.returncode == Status.STORE
    assert [each.name for each in tenure.folder.iterdir()] == []


def test_the_help_says_what_a_restore_does_to_holders(tenure: Tenure) -> None:
    said = " ".join(tenure.inside("restore", "--help").stdout.split())
    assert "nothing is granted until the longest recovery window" in said
