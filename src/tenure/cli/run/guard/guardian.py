"""The guardian: the command's parent, which ends the command in time.

`tenure run` holds the lease and sends its deadline over a socket. Only the guardian decides when
the command must end, so it ends in time even when `tenure run` is stopped, stalled or killed.

Rules:

* The command and all its descendants are guarded. Daemons (they called setsid() and have outlived
  their parents) survive when the command ends by itself, and are ended when the lock is lost.
  (Linux; on other systems the command's process group is guarded.)
* The guarded processes get SIGTERM at `deadline - grace`, and SIGKILL from the deadline until none
  is left. The lock counts as lost from that SIGTERM, and later deadlines are ignored.
* When the socket closes, `tenure run` is dead: SIGKILL at once. When the guardian dies, the kernel
  kills the command (PR_SET_PDEATHSIG), and the watchdog kills the rest.
* When the command has ended, its remaining processes are ended too: SIGTERM, and SIGKILL after the
  grace. Only then is the end reported, so that the lock can be released.
* The deadline is on a clock that advances while the machine is suspended. Timers do not, so the
  clock is read every second.

Lines received: ``deadline SECONDS``, ``signal NUMBER``, ``kill``.
Lines sent: ``cgroup ERRNO`` (the command could not enter it), ``started PID``, ``failed ERRNO``,
``stopped SIGNAL``, ``stuck PID...``, ``ended WAIT-STATUS LOST``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping

from .cgroup import Cgroup
from .processes import (
    PR_SET_PDEATHSIG,
    SWEEP,
    TICK,
    Deadline,
    become_subreaper,
    descendants,
    now,
    prctl,
    send,
    wake_on_child,
)

STUCK = 1.0
"""Seconds after SIGKILL until surviving processes are reported."""

Signals = Mapping[signal.Signals, object]

# Sent to the command by `tenure run`.
NOT_FOR_THE_GUARDIAN = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
# Python ignores them from its start; a command expects the default.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def ignore_signals() -> Signals:
    """Ignore signals that are meant for the command, and return the previous handlers."""
    return {each: signal.signal(each, signal.SIG_IGN) for each in NOT_FOR_THE_GUARDIAN}


class Guardian:
    """The command's parent, which starts, signals and ends it."""

    def __init__(
        self,
        control: socket.socket,
        deadline: Deadline,
        grace: float,
        *,
        foreground: bool,
        cgroup: Cgroup | None,
    ) -> None:
        self.control = control
        self.received: bytes | None = b""  # the beginning of a line; None when the socket is closed
        self.deadline = deadline
        self.grace = grace
        self.foreground = foreground
        self.cgroup = cgroup
        self.child = 0
        self.status: int | None = None  # of the command, once it has ended
        self.guarded: set[int] = set()  # processes that received a signal to end, until they exit
        self.lost = False
        self.kill_at = float("inf")  # set when the command has ended, or must end
        self.terminated = False  # SIGTERM has been sent
        self.killing_since: float | None = None
        self.reported_stuck = False

    # The command

    def run(self, command: list[str], original: Signals) -> None:
        """Run the command to its end, and report that."""
        wake = wake_on_child()
        become_subreaper()
        if errno := self.start(command, original):
            self._close_cgroup()
            self.say(f"failed {errno}")
            return
        self.say(f"started {self.child}")
        self.watch_over(wake)
        self._close_cgroup()
        self.say(f"ended {self.status} {int(self.lost)}")

    def _close_cgroup(self) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()

    def start(self, command: list[str], original: Signals) -> int:
        """Start the command; return 0, or the errno of the failure."""
        report, reports = os.pipe()
        me = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            try:
                self._prepare(original, me, reports)
                os.execvp(command[0], command)  # noqa: S606  what it is for
            except OSError as error:
                os.write(reports, f"failed {error.errno}\n".encode())
            finally:
                os._exit(127)
        os.close(reports)
        with contextlib.suppress(OSError):  # the child does it too, and either may be first
            os.setpgid(self.child, self.child)
        # Closed by the exec. (An exec from a dead network mount blocks here: no command runs yet.)
        with open(report, encoding="ascii") as lines:
            received = dict(line.split() for line in lines)
        if "cgroup" in received:
            self._close_cgroup()
            self.cgroup = None
            self.say(f"cgroup {received['cgroup']}")
        if "failed" not in received:
            self.deadline.group = self.child
        return int(received.get("failed", 0))

    def _prepare(self, original: Signals, parent: int, reports: int) -> None:
        """Prepare the child for becoming the command."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the request took effect
            os._exit(127)
        if self.cgroup is not None:
            try:
                self.cgroup.enter()
            except OSError as error:
                os.write(reports, f"cgroup {error.errno}\n".encode())
        os.setpgid(0, 0)
        if self.foreground:
            with contextlib.suppress(OSError):  # does not stop: SIGTTOU is still ignored
                os.tcsetpgrp(0, os.getpgrp())
        for each, handler in original.items():
            if handler != signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        for each in IGNORED_BY_PYTHON:
            signal.signal(each, signal.SIG_DFL)

    def reap(self) -> bool:
        """Record ended and stopped processes; return true when no descendant is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid != self.child:
                continue
            if os.WIFSTOPPED(status):
                self.say(f"stopped {os.WSTOPSIG(status)}")
            else:
                self.status = status

    def send(self, number: int) -> None:
        """Send a signal to the command's process group."""
        if self.status is None:  # else the number may be in use again
            with contextlib.suppress(OSError):
                os.killpg(self.child, number)

    def left(self) -> dict[int, int]:
        """Find the remaining guarded processes: process id to process group."""
        session = None if self.lost else os.getsid(0)
        try:
            left = descendants(os.getpid(), session=session, known=self.guarded)
            if self.lost and self.cgroup is not None:
                left = dict.fromkeys(self.cgroup.processes(), -1) | left
            return left
        except OSError:  # no /proc here
            return {self.child: self.child} if self.status is None else {}

    def end(self, number: int) -> bool:
        """Send a signal to all guarded processes; return false when none is left."""
        left = self.left()
        self.guarded = set(left)
        if number == signal.SIGKILL and self.lost and self.cgroup is not None:
            self.cgroup.kill()
        self.send(number)
        send([pid for pid in left if left[pid] != self.child or self.status is not None], number)
        send(left, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
        return bool(left)

    # Lines to and from `tenure run`

    def say(self, line: str) -> None:
        """Send a line to `tenure run`; `listen` notices when it has exited."""
        with contextlib.suppress(OSError):
            self.control.sendall(line.encode() + b"\n")

    def listen(self) -> None:
        """Receive lines from `tenure run`; the end of the stream means that it has exited."""
        assert self.received is not None
        try:
            received = self.control.recv(4096)
        except OSError:
            received = b""
        if not received:
            self.received = None
            self.lose()
            return
        *lines, self.received = (self.received + received).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "deadline" and not self.lost:
                self.deadline.at = float(value)
            elif word == "signal":
                self.send(int(value))
            elif word == "kill":
                self.lose()

    # Time

    def lose(self, kill_at: float = 0.0) -> None:
        """Count the lock as lost; the command ends by `kill_at`."""
        self.lost = True
        self.kill_at = min(self.kill_at, kill_at)

    def look(self) -> float | None:
        """Do what is due; return the seconds until the next check, or ``None`` at the end."""
        alone = self.reap()
        at = now()
        deadline = self.deadline.at
        if at >= deadline - self.grace and not self.lost:
            self.lose(deadline)
        if self.status is not None:
            if alone or not self.left():
                return None
            # Next, the processes that the command left.
            self.kill_at = min(self.kill_at, at + self.grace)
        if at >= self.kill_at:
            self._kill(at)
            return SWEEP
        if self.kill_at < float("inf"):
            if not self.terminated:
                self.terminated = True
                self.end(signal.SIGTERM)
            return SWEEP
        return min(TICK, deadline - self.grace - at)

    def _kill(self, at: float) -> None:
        if self.killing_since is None:
            self.killing_since = at
        left = self.end(signal.SIGKILL)
        if left and not self.reported_stuck and at >= self.killing_since + STUCK:
            self.reported_stuck = True
            self.say("stuck " + " ".join(map(str, sorted(self.guarded))))

    def watch_over(self, wake: int) -> None:
        """Wait until the command and all its remaining processes have ended."""
        while (pause := self.look()) is not None:
            control = [] if self.received is None else [self.control.fileno()]
            ready, _, _ = select.select([wake, *control], [], [], max(pause, 0.0))
            if wake in ready:
                os.read(wake, 4096)
            if self.control.fileno() in ready:
                self.listen()
