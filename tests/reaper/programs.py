"""Programs that hold a lock, and their reapers, as the tests see them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tenure.reaper.program import WAITER

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 20.0


def reapers_of(program: int) -> list[int]:
    """The ids of the reapers of a process."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if WAITER.encode() in words and words[-3] == str(program).encode():
                found.append(int(each.parent.name))
    return found


async def ends(process: int) -> None:
    """Wait until a process, which need not be a child, has ended."""
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = await asyncio.to_thread(select.select, [watched], [], [], PATIENCE)
        assert ready, f"process {process} lives"
    finally:
        os.close(watched)


class Program:
    """A process that holds a lock on the node /default."""

    def __init__(self, url: str, name: str, window: float, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.reaper.holder", url, name, str(window), *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.reaper = 0

    @classmethod
    @contextlib.contextmanager
    def holding(
        cls,
        url: str,
        window: float = 30.0,
        *options: str,
        name: str = "a",
        watched: bool = True,
    ) -> Iterator[Program]:
        """A program that has the lock, and its reaper, which is watching."""
        program = cls(url, name, window, *options)
        try:
            assert program.line().startswith("holds")
            if watched:
                assert program.tell("settled") == "settled"
                (program.reaper,) = reapers_of(program.id)
            yield program
        finally:
            program.process.kill()
            program.process.communicate()

    @property
    def id(self) -> int:
        """Its process id."""
        return self.process.pid

    def line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def tell(self, what: str) -> str:
        """Let it do something, and return its line about that, if it says one."""
        self.do(what)
        return self.line()

    def do(self, what: str) -> None:
        """Let it do something about which it says nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    @property
    def resident(self) -> int:
        """The resident memory of its reaper, in KiB."""
        lines = Path(f"/proc/{self.reaper}/status").read_text(encoding="ascii").splitlines()
        return next(int(each.split()[1]) for each in lines if each.startswith("VmRSS"))

    def stop(self) -> None:
        """Stop it, and return when it is stopped."""
        os.kill(self.id, signal.SIGSTOP)
        os.waitid(os.P_PID, self.id, os.WSTOPPED)

    def kill(self) -> None:
        """Kill it, and return when it is dead."""
        self.process.kill()
        self.process.wait()
