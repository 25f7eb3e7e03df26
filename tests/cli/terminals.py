"""A terminal with a person at it: a pseudo terminal, what is typed there, what is seen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cli.programs import TENURE

PATIENCE = 60.0
"""Seconds after which a text that was not seen makes a test fail, with all that was seen."""


class Screen:
    """The master's side of a pseudo terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = ""
        self.master = master

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> str:
        """Look until the text is there; what stood before it is returned, both are gone then."""
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            left = max(end - time.monotonic(), 0)
            assert select.select([self.master], [], [], left)[0], (text, self.seen)
            self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def rest(self) -> str:
        """All that comes until the program has ended."""
        try:
            while True:
                self._read()
        except OSError:  # the last one has closed the terminal
            pass
        seen, self.seen = self.seen, ""
        return seen

    def _read(self) -> None:
        data = os.read(self.master, 4096)
        if not data:
            raise OSError("the terminal is closed")
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")


@contextmanager
def on_terminal(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, *, columns: int = 100
) -> Iterator[Screen]:
    """Run a program on a terminal of its own, without echo."""
    master, slave = pty.openpty()
    settings = termios.tcgetattr(slave)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    without_columns = {k: v for k, v in environment.items() if k not in {"COLUMNS", "NO_COLOR"}}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**without_columns, "TERM": "xterm-256color"},
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  nothing else can
    )
    os.close(slave)
    try:
        yield Screen(master, process)
    finally:
        process.kill()
        os.close(master)
        process.wait()


class Shell(Screen):
    """An interactive shell with job control. Its prompt is the last exit code, as in ``<0>``."""

    def enter(self, line: str) -> None:
        self.type(line + "\n")

    def prompt(self) -> int:
        """Wait for the next prompt; the exit code in it."""
        self.wait_for("<")
        return int(self.wait_for(">"))


@contextmanager
def shell(environment: Mapping[str, str], folder: Path) -> Iterator[Shell]:
    """A shell in which `tenure` is the command line."""
    bash = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
    with on_terminal(bash, {**environment, "PS1": "<$?>", "PS2": ""}, folder) as screen:
        at_shell = Shell(screen.master, screen.process)
        assert at_shell.prompt() == 0
        words = " ".join(f"'{word}'" for word in TENURE)
        at_shell.enter(f'tenure() {{ {words} "$@"; }}; ulimit -c 0')
        assert at_shell.prompt() == 0
        yield at_shell
