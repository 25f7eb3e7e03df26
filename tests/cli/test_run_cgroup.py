"""Cgroups of `tenure run`: where one is made, and why not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.cli.run.guard.cgroup import NoCgroup, end_abandoned, make, own_cgroup, parent_of

UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "35 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("mounts", "cgroups", "found"),
    [
        (UNIFIED, "0::/\n", "/sys/fs/cgroup"),
        (UNIFIED, "0::/system.slice/cron.service\n", "/sys/fs/cgroup/system.slice/cron.service"),
        (HYBRID, "4:memory:/m\n0::/a\n", "/sys/fs/cgroup/unified/a"),
        (HYBRID, "4:memory:/m\n", None),  # version 1 only
        ("35 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", "0::/\n", None),
        ("", "0::/\n", None),  # not mounted
        # A container's part of the hierarchy, mounted without a namespace.
        ("30 23 0:26 /docker/c /sys/fs/cgroup rw - cgroup2 c rw\n", "0::/docker/c/x\n", "/x"),
        ("30 23 0:26 /docker/c /sys/fs/cgroup rw - cgroup2 c rw\n", "0::/docker/c\n", ""),
        ("30 23 0:26 /docker/c /sys/fs/cgroup rw - cgroup2 c rw\n", "0::/docker/cd\n", None),
        ("30 23 0:26 /docker/c /sys/fs/cgroup rw - cgroup2 c rw\n", "0::/other\n", None),
        ("30 23 0:26 / /sys/fs\\040x rw - cgroup2 c rw\n", "0::/a\n", "/sys/fs x/a"),
    ],
)
def test_the_cgroup_of_a_process_is_found(mounts: str, cgroups: str, found: str | None) -> None:
    if found is not None and not found.startswith("/sys"):
        found = "/sys/fs/cgroup" + found
    assert own_cgroup(mounts, cgroups) == (None if found is None else Path(found))


def test_a_cgroup_of_no_process_is_none() -> None:
    with pytest.raises(NoCgroup, match="has no cgroups"):
        parent_of("0")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCgroup, match="nowhere cannot be written: No such file"):
        make(tmp_path / "nowhere")


def test_a_kernel_without_cgroup_kill_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoCgroup, match=r"no cgroup\.kill"):
        make(tmp_path)
    assert os.listdir(tmp_path) == []


def test_nothing_is_ended_where_there_is_nothing(tmp_path: Path) -> None:
    assert end_abandoned(tmp_path) == []
    assert end_abandoned(tmp_path / "nowhere") == []


# --- as a user who is not root

NOBODY = 65534

AS_NOBODY = f"""
import os, sys
from pathlib import Path
from tenure.cli.run.guard import cgroup
Path(sys.argv[1], "cgroup.procs").write_text("0")
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
try:
    made = cgroup.make(cgroup.parent_of())
except cgroup.NoCgroup as reason:
    print(reason)
else:
    made.enter()
    print("inside", made.path.parent, made.processes() == [os.getpid()], made.populated, flush=True)
    made.kill()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A cgroup of root's."""
    try:
        made = make(parent_of())
    except NoCgroup as reason:
        pytest.skip(f"no cgroup can be made here: {reason}")
    yield made.path
    made.kill()
    made.remove()
    made.close()


def as_nobody(folder: Path) -> str:
    program = [sys.executable, "-c", AS_NOBODY, str(folder)]
    return subprocess.run(program, capture_output=True, text=True, check=False).stdout.strip()


def test_a_user_gets_no_cgroup_in_what_belongs_to_root(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    assert as_nobody(folder) == f"{folder} cannot be written: Permission denied"


def test_a_user_gets_a_cgroup_in_what_was_delegated(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can delegate")
    for each in (folder, folder / "cgroup.procs"):
        os.chown(each, NOBODY, NOBODY)
    assert as_nobody(folder) == f"inside {folder} True True"
    (left,) = folder.glob("tenure-run-*")
    assert end_abandoned(folder) == []
    assert not left.exists()


def test_a_cgroup_is_not_abandoned_while_its_lock_is_held(folder: Path) -> None:
    inside = make(folder)
    assert end_abandoned(folder) == []
    assert inside.path.exists()
    inside.close()
    assert end_abandoned(folder) == []
    assert not inside.path.exists()
