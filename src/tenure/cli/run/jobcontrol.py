"""Job control: effect of Ctrl-Z, `fg` and `bg` on a command in its own process group.

When the command is stopped from the keyboard, or because it may not use the terminal, `tenure run`
stops as well, so that the shell shows its prompt. The lease is not renewed then: a suspended job
loses its lock after the recovery window, and is killed. A command stopped by SIGSTOP was stopped on
purpose, and keeps its lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Protocol

from tenure.cli.run.terminal import Terminal

WANTS_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


class _Command(Protocol):
    @property
    def group(self) -> int | None: ...

    def signal(self, number: int) -> None: ...


class JobControl:
    """The command's place in the shell's job.

    Attributes:
        in_foreground: whether the command should have the terminal when the job has it.
        command: the command, once it is started.
    """

    command: _Command

    def __init__(self) -> None:
        self._terminal = Terminal()
        self.in_foreground = self._terminal.alone

    def stopped(self, number: int) -> None:
        """Handle a stop of the command by a signal."""
        group = self.command.group
        if number == signal.SIGSTOP or not self._terminal.exists or group is None:
            return
        if number in WANTS_TERMINAL:
            self.in_foreground = True
            # If `fg` has meanwhile given it the terminal, this report of the stop is outdated.
            if self._terminal.is_ours or self._terminal.belongs_to(group):
                self.continued()
                return
        self._terminal.take_back(group)
        self._suspend(number)
        # We have been continued, or could not be stopped: nothing would continue us. A command that
        # would only be stopped again stays stopped until a SIGCONT.
        if number not in WANTS_TERMINAL or self._terminal.is_ours:
            self.continued()

    def _suspend(self, number: int) -> None:
        """Stop the whole job, like a stop by the terminal."""
        loop = asyncio.get_running_loop()
        command = self.command
        handled = loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(0, number)
        if handled:
            loop.add_signal_handler(signal.SIGTSTP, command.signal, signal.SIGTSTP)

    def continued(self, _number: int = signal.SIGCONT) -> None:
        """Continue the command, perhaps in the foreground."""
        group = self.command.group
        if self.in_foreground and self._terminal.is_ours and group is not None:
            self._terminal.give(group)
        self.command.signal(signal.SIGCONT)

    def close(self) -> None:
        """Take the terminal back after the end of the command, with its settings restored."""
        group = self.command.group
        if group is not None and self._terminal.take_back(group):
            self._terminal.restore()
        self._terminal.close()
