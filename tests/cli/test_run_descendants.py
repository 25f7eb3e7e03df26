"""What the guards of `tenure run` find of a command's descendants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenure.cli.run.guard.processes import become_subreaper, descendants

PASSES_ON = """
import os, sys
sys.stdin.readline()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc here")


@linux
def test_a_process_is_found_whose_parent_ends_while_the_guard_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listdir = os.listdir
    process = subprocess.Popen(
        [sys.executable, "-c", PASSES_ON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    successor = 0

    def listed_just_before(folder: str) -> list[str]:
        nonlocal successor
        found = listdir(folder)
        if not successor:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            successor = int(process.stdout.readline())
            process.wait()
        return found

    become_subreaper()
    try:
        with process, monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listed_just_before)
            assert successor in descendants(os.getpid())
        os.waitpid(successor, 0)
    finally:
        become_subreaper(be=False)
