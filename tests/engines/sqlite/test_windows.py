"""Where the system is not one for this engine."""

from __future__ import annotations

import subprocess
import sys

# What Python does not have there is taken away before tenure is imported.
ON_WINDOWS = """
import asyncio, os, sqlite3, sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("register_at_fork", "fork", "geteuid", "O_CLOEXEC", "O_NOFOLLOW", "statvfs"):
    delattr(os, name)

import tenure
from tenure.doctor import examine

for url in ("sqlite:///jobs.db", None):
    try:
        tenure.connect(url)
    except tenure.Unsupported as error:
        print(error)
    (finding,) = (each for each in examine(url) if each.level == "failure")
    print(finding.found, "->", finding.remedy)
"""


def test_on_windows_connecting_and_a_doctor_say_what_to_use_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert len(told) == 4
    for line in told:
        assert line.startswith("sqlite:// needs Linux or macOS (Windows has neither")
        assert line.endswith("a server (redis://, etcd:// or tenure://), or WSL")
