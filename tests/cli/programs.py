"""Running `tenure`, mostly as a process, and talking with the commands that it runs.

Nothing here sleeps to let something happen: a command says on its output when it is there, and
`eventually` asks until something is so, which the hang guard of the tests limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tenure.cli.app import invoke

HOST = socket.gethostname()
TENURE = [sys.executable, "-W", "error", "-m", "tenure"]

# A command under `tenure run`: it says that it is there, and which signals it gets.
LISTENER = """
import os, signal, sys
heard, noted = os.pipe()
os.set_blocking(noted, False)
signal.set_wakeup_fd(noted)  # with a handler alone, one that comes as a wait begins is not noticed
for number in (1, 2, 3, 10, 12, 15, 28):
    signal.signal(number, lambda *_: None)
os.write(1, b"there %d\\n" % os.getpid())
while True:
    for number in os.read(heard, 100):
        os.write(1, (signal.Signals(number).name + "\\n").encode())
"""


class Running:
    """A started `tenure`, and the command under it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def line(self) -> str:
        """What it says next."""
        return self.output.readline().rstrip("\n")

    def say(self, text: str = "go") -> None:
        """A line for it to read."""
        self.input.write(text + "\n")
        self.input.flush()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code, and what it said on stderr."""
        _, said = self.process.communicate()
        return self.process.returncode, said


class Tenure:
    """The command line on a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/store.db"
        self.environment: Mapping[str, str] = {
            **os.environ,
            "TENURE_URL": self.url,
            "COLUMNS": "200",
        }
        self._started: list[subprocess.Popen[str]] = []

    def __call__(
        self, *arguments: str, says: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [*TENURE, *arguments],
            input=says,
            stdin=subprocess.DEVNULL if says is None else None,
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            cwd=self.folder,
            check=False,
        )

    def inside(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same, within this process: quicker, for what needs no process of its own."""
        output, errors = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            code = invoke(arguments)
        return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())

    def json(self, *arguments: str) -> Any:
        """What it prints, as JSON."""
        run = self if asyncio._get_running_loop() else self.inside  # one loop at a time
        done = run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: str, **options: Any) -> Running:
        """Start it, with pipes to all its streams, in a process group of its own."""
        process = subprocess.Popen(
            [*TENURE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
            process_group=0,
            **options,
        )
        self._started.append(process)
        return Running(process)

    def hold(self, *options: str, name: str = "nightly") -> Running:
        """Start a holder of a lock, which is there, and ends with the exit code it is told."""
        running = self.start(
            *("run", "--lock", name, *options, "--"),
            *("sh", "-c", "echo there; read code; exit $code"),
        )
        assert running.line() == "there"
        return running

    def waiting(self, name: str = "nightly") -> int:
        """How many wait."""
        return len(self.json("describe", name)["waiters"])

    def close(self) -> None:
        for process in self._started:
            # Stopped or not; its command goes with it.
            process.kill()
            process.communicate()


def eventually(so: Callable[[], object]) -> None:
    """Ask until it is so."""
    while not so():
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
    return False


def state(pid: int) -> str:
    """The state of a process as in ps; empty when there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def child_of(pid: int) -> int:
    """The only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def guards_of(running: Running) -> tuple[int, int]:
    """The watchdog and the guardian of a `tenure run` whose command has started."""
    watchdog = child_of(running.process.pid)
    return watchdog, child_of(watchdog)


def together(*pids: int) -> None:
    """Kill processes at once: none of them does anything after the first is dead.

    They are given parents first. The kernel continues what is stopped when its parent dies, because
    a process group that has lost its last parent could not be continued by anybody else.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(state(pid) == "T" for pid in pids))
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)


def listener(*options: str) -> list[str]:
    """The arguments that run a command which says what signals it gets."""
    return ["run", "--lock", "nightly", *options, "--", sys.executable, "-c", LISTENER]


def pid_of(line: str) -> int:
    """The process id in what a command says when it is there."""
    word, pid = line.split()
    assert word == "there"
    return int(pid)


STOP, CONT, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
