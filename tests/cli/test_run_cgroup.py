"""Cgroups of `tenure run`: where one is made, and why not."""

from __future__ import annotations

import os
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
