"""The command as `tenure run` sees it: a process behind a guardian (`tenure.cli.run.guardian`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CannotRun", "Ending", "GuardedCommand"]

GUARDIAN = Path(__file__).with_name("guardian.py")


class CannotRun(Exception):
    """The command could not be started; `errno` says why."""

    def __init__(self, errno: int) -> None:
        super().__init__(os.strerror(errno))
        self.errno = errno


@dataclass(frozen=True, slots=True)
class Ending:
    """How the command ended, and whether that was because the lock was lost."""

    exit_code: int  # a shell's: 128 + n after signal n
    lost: bool


class GuardedCommand:
    """A command under a guardian. `start` makes one.

    Args:
        stopped: called with the signal when the command was stopped.
        stuck: called with process ids that live on after SIGKILL.
    """

    def __init__(
        self,
        guardian: subprocess.Popen[bytes],
        control: socket.socket,
        *,
        stopped: Callable[[int], None],
        stuck: Callable[[str], None],
    ) -> None:
        self.group: int | None = None  # the command's process group, once it is started
        self._guardian = guardian
        self._control = control
        self._stopped = stopped
        self._stuck = stuck
        self._heard = b""
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[Ending] = self._loop.create_future()
        self._loop.add_reader(control, self._listen)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        deadline: float,
        grace: float,
        foreground: bool,
        inherit: int | None,
        stopped: Callable[[int], None],
        stuck: Callable[[str], None],
    ) -> GuardedCommand:
        """Start a command.

        Args:
            deadline: when it is killed, on the boot-time clock, unless `extend` moves that.
            grace: seconds before that when it is asked to end.
            foreground: it gets the terminal.
            inherit: a descriptor that it keeps open until it ends.
        """
        here, there = socket.socketpair()
        here.setblocking(False)
        kept = [] if inherit is None else [os.dup(inherit)]
        try:
            for descriptor in [there.fileno(), *kept]:
                os.set_inheritable(descriptor, True)
            guardian = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(GUARDIAN)),
                    *(str(there.fileno()), repr(deadline), repr(grace)),
                    "foreground" if foreground else "background",
                    *command,
                ],
                env=environment,
                close_fds=False,  # the descriptors that `tenure run` was given are the command's
                process_group=0,  # what the terminal sends is not for the guardian
            )
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            for descriptor in kept:
                os.close(descriptor)
        return cls(guardian, here, stopped=stopped, stuck=stuck)

    def extend(self, deadline: float) -> None:
        """The lease is proven further."""
        self._say(f"deadline {deadline!r}")

    def signal(self, number: int) -> None:
        """A signal to the command's process group."""
        self._say(f"signal {number}")

    def kill(self) -> None:
        """The lock is lost: end everything at once. From any thread; safe to call twice."""
        self._say("kill")
        if self.group is not None and not self._ending.done():
            with contextlib.suppress(OSError):  # beside the guardian, which may be stopped itself
                os.killpg(self.group, signal.SIGKILL)

    async def ended(self) -> Ending:
        """Wait for the end of the command and of what it left running.

        Raises:
            CannotRun: it was never started.
        """
        return await asyncio.shield(self._ending)

    async def aclose(self) -> None:
        """Kill what still runs, and see the guardian end."""
        if not self._ending.done():
            self.kill()
            with contextlib.suppress(CannotRun):
                await self.ended()
        self._guardian.wait()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the end of the guardian is noticed by listening
            self._control.send(line.encode() + b"\n")

    def _listen(self) -> None:
        try:
            said = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            # The guardian was killed, and the kernel killed the command with it.
            self.kill()
            self._end(Ending(128 + signal.SIGKILL, lost=False))
            return
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "started":
                self.group = int(value)
            elif word == "failed":
                self._fail(int(value))
            elif word == "stopped":
                self._stopped(int(value))
            elif word == "stuck":
                self._stuck(value)
            elif word == "ended":
                status, lost = map(int, value.split())
                code = os.waitstatus_to_exitcode(status)
                self._end(Ending(code if code >= 0 else 128 - code, bool(lost)))

    def _fail(self, errno: int) -> None:
        self._close()
        self._ending.set_exception(CannotRun(errno))

    def _end(self, ending: Ending) -> None:
        self._close()
        self._ending.set_result(ending)

    def _close(self) -> None:
        self._loop.remove_reader(self._control)
        self._control.close()
