"""The command as `tenure run` sees it: a process behind a guardian (`tenure.cli.run.guard`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenure.cli.run.guard.cgroup import Cgroup
from tenure.cli.run.guard.processes import SWEEP, become_subreaper, descendants, send

LATE = 1.0
"""Seconds for the watchdog to exit, after everything has ended."""

GUARDIAN = Path(__file__).with_name("guard") / "__main__.py"


class CannotRun(Exception):
    """Error: the command could not be started; `errno` says why."""

    def __init__(self, errno: int) -> None:
        """Store the error number; the system's text for it is the message."""
        super().__init__(os.strerror(errno))
        self.errno = errno


class CannotGuard(Exception):
    """Error: the guardian could not be started, so the command was not run."""


def check_interpreter() -> str:
    """Return the Python interpreter that runs the guardian.

    Raises:
        CannotGuard: it cannot be found or executed.
    """
    interpreter = sys.executable
    if not interpreter:
        raise CannotGuard("Python does not know its own interpreter (sys.executable is empty)")
    if shutil.which(interpreter) is None:
        raise CannotGuard(f"the interpreter {interpreter} is missing or cannot be executed")
    return interpreter


@dataclass(frozen=True, slots=True)
class CommandEnding:
    """End of the command: its exit code, and whether it ended because the lock was lost."""

    exit_code: int  # like a shell: 128 + n after signal n
    lost: bool


class GuardedCommand:
    """A command under a guardian. `start` makes one.

    Args:
        cgroup: the command's own, if it has one.
        stopped: called with the signal when the command was stopped.
        stuck: called with the ids of processes that survive SIGKILL.
        apart: called when the command could not enter the cgroup, with the reason.
    """

    def __init__(
        self,
        watchdog: subprocess.Popen[bytes],
        control: socket.socket,
        cgroup: Cgroup | None,
        *,
        stopped: Callable[[int], None],
        stuck: Callable[[str], None],
        apart: Callable[[str], None],
    ) -> None:
        """Listen to the guardian that `start` has started."""
        self.group: int | None = None  # the command's process group, once it is started
        self._watchdog = watchdog
        self._control = control
        self._cgroup = cgroup
        self._stopped = stopped
        self._stuck = stuck
        self._apart = apart
        self._alone: asyncio.Task[None] | None = None
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[CommandEnding] = self._loop.create_future()
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
        cgroup: Cgroup | None,
        stopped: Callable[[int], None],
        stuck: Callable[[str], None],
        apart: Callable[[str], None],
    ) -> GuardedCommand:
        """Start a command. The calling process has no other children.

        Args:
            command: the program and its arguments.
            environment: the command's complete environment.
            deadline: the time at which it is killed, on the boot-time clock, unless extended by
                `extend`.
            grace: seconds between SIGTERM and that time.
            foreground: whether it gets the terminal.
            inherit: a descriptor that stays open until it ends.
            cgroup: the cgroup that it is put into.
            stopped: see the class.
            stuck: see the class.
            apart: see the class.

        Raises:
            CannotGuard: there is no interpreter for the guardian.
        """
        interpreter = check_interpreter()
        here, there = socket.socketpair()
        here.setblocking(False)
        lock = None if cgroup is None else cgroup.lock
        kept = [os.dup(each) for each in (inherit, lock) if each is not None]
        become_subreaper()
        try:
            for descriptor in [there.fileno(), *kept]:
                os.set_inheritable(descriptor, True)
            watchdog = subprocess.Popen(
                [
                    *(interpreter, "-I", "-S", str(GUARDIAN)),
                    *(str(there.fileno()), repr(deadline), repr(grace)),
                    "foreground" if foreground else "background",
                    *(("", "-1") if cgroup is None else (str(cgroup.path), str(kept[-1]))),
                    *command,
                ],
                env=environment,
                close_fds=False,  # the command gets the descriptors that `tenure run` inherited
                process_group=0,  # keeps the terminal's signals from the guardian
            )
        except BaseException as error:
            here.close()
            become_subreaper(be=False)
            if isinstance(error, OSError):
                raise CannotGuard(f"{interpreter} cannot be executed: {error.strerror}") from error
            raise
        finally:
            there.close()
            for descriptor in kept:
                os.close(descriptor)
        return cls(watchdog, here, cgroup, stopped=stopped, stuck=stuck, apart=apart)

    def extend(self, deadline: float) -> None:
        """Set a later deadline, after a new proof of the lease."""
        self._send_line(f"deadline {deadline!r}")

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        self._send_line(f"signal {number}")

    def kill(self) -> None:
        """End everything at once, because the lock is lost. From any thread; safe to call twice."""
        self._send_line("kill")
        if not self._ending.done():  # in addition to the guardian, which may be stopped
            if self._cgroup is not None:
                self._cgroup.kill()
            if self.group is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self.group, signal.SIGKILL)

    async def ended(self) -> CommandEnding:
        """Wait for the end of the command and of its remaining processes.

        Raises:
            CannotRun: the command was not started.
            CannotGuard: the guardian was not started.
        """
        return await asyncio.shield(self._ending)

    async def aclose(self) -> None:
        """Kill all remaining processes, and wait for their end."""
        if not self._ending.done():
            self.kill()
            with contextlib.suppress(CannotRun, CannotGuard):
                await self.ended()
        try:
            await asyncio.to_thread(self._watchdog.wait, LATE)
        except subprocess.TimeoutExpired:  # it is stopped, and everything has ended
            self._watchdog.kill()
            self._watchdog.wait()
        become_subreaper(be=False)

    def _send_line(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the listener notices the end of the guardian
            self._control.send(line.encode() + b"\n")

    def _listen(self) -> None:
        try:
            received = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._abandoned()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "started":
                self.group = int(value)
            elif word == "cgroup":
                self._cgroup = None
                self._apart(os.strerror(int(value)))
            elif word == "failed":
                self._fail(CannotRun(int(value)))
            elif word == "stopped":
                self._stopped(int(value))
            elif word == "stuck":
                self._stuck(value)
            elif word == "ended":
                status, lost = map(int, value.split())
                code = os.waitstatus_to_exitcode(status)
                self._end(CommandEnding(code if code >= 0 else 128 - code, bool(lost)))

    def _abandoned(self) -> None:
        """End everything here: guardian and watchdog have both exited without a report."""
        self._close()
        if self.group is None:
            status = self._watchdog.wait()
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            self._fail(CannotGuard(f"its guardian, run by {sys.executable}, ended with {how}"))
        else:
            self._alone = self._loop.create_task(self._end_alone())

    async def _end_alone(self) -> None:
        try:
            while self._kill_descendants():  # noqa: ASYNC110  no event reports their ends
                await asyncio.sleep(SWEEP)
        except Exception as error:
            self._fail(error)
        if self._cgroup is not None:
            self._cgroup.remove()
        self._end(CommandEnding(128 + signal.SIGKILL, lost=False))

    def _kill_descendants(self) -> bool:
        """Send SIGKILL to everything; return false when nothing is left."""
        self.kill()
        try:
            left = descendants(os.getpid())
        except OSError:  # without /proc, only the process group could be reached
            return False
        send(left, signal.SIGKILL)
        return bool(left) or (self._cgroup is not None and self._cgroup.populated)

    def _fail(self, error: Exception) -> None:
        self._close()
        if not self._ending.done():
            self._ending.set_exception(error)

    def _end(self, ending: CommandEnding) -> None:
        self._close()
        if not self._ending.done():
            self._ending.set_result(ending)

    def _close(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()
