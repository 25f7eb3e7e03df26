"""The guardian: the command's parent, which ends the command in time.

`tenure run` holds the lease and sends its deadline over a socket. The guardian alone decides when
the command must end, so that a `tenure run` that is stopped, stalled or killed cannot keep it from
doing so.

Rules:

* Guarded are the command and all its descendants. Daemons (they called setsid() and have outlived
  their parents) are left alone when the command ends by itself, and guarded when the lock is lost.
  (Linux; on other systems the command's process group is guarded.)
* At `deadline - grace` the guarded get SIGTERM, at the deadline SIGKILL, until none is left.
  The lock counts as lost from the first of these on, and later deadlines are ignored.
* When the socket closes, `tenure run` is dead: SIGKILL at once. When the guardian dies, the kernel
  kills the command (PR_SET_PDEATHSIG), and the watchdog kills the rest.
* When the command has ended, what it left running is ended as well: SIGTERM, and SIGKILL after
  the grace. Only then is the end reported, so that the lock can be released.
* The deadline is on the clock that counts while the machine is suspended, which no timer
  follows; so the clock is read every second.

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

__all__ = ["Guardian", "Signals", "ignore_signals"]

STUCK = 1.0
"""Seconds after SIGKILL when what is still there is reported."""

Signals = Mapping[signal.Signals, object]

# They reach the command through `tenure run`.
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
# Python ignores them from its start on; a command expects the default.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def ignore_signals() -> Signals:
    """Ignore what is meant for the command; returns what was in force before."""
    return {each: signal.signal(each, signal.SIG_IGN) for each in NOT_FOR_THE_GUARDIAN}


class Guardian:
    """The command's parent: starts it, signals it, ends it."""

    def __init__(
        self,
        control: socket.socket,
        deadline: Deadline,
        grace: float,
        *,
        foreground: bool,
        cgroup: Cgroup | None,
    ) -> None:
        """Start without a command."""
        self.control = control
        self.received: bytes | None = b""  # the beginning of a line; None when the socket is closed
        self.deadline = deadline
        self.grace = grace
        self.foreground = foreground
        self.cgroup = cgroup
        self.child = 0
        self.status: int | None = None  # of the command, once it has ended
        self.guarded: set[int] = set()  # what has got a signal to end, as long as it lives
        self.lost = False
        self.kill_at = float("inf")  # set when the command ends, or must
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
        """Start the command; returns 0, or the errno of why that failed."""
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
        with contextlib.suppress(OSError):  # the child does it too; one of them comes first
            os.setpgid(self.child, self.child)
        # Closed by the exec. (One from a dead network mount keeps us here: no command runs yet.)
        with open(report, encoding="ascii") as lines:
            said = dict(line.split() for line in lines)
        if "cgroup" in said:
            self._close_cgroup()
            self.cgroup = None
            self.say(f"cgroup {said['cgroup']}")
        if "failed" not in said:
            self.deadline.group = self.child
        return int(said.get("failed", 0))

    def _prepare(self, original: Signals, parent: int, reports: int) -> None:
        """Make the child ready to become the command."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was in force
            os._exit(127)
        if self.cgroup is not None:
            try:
                self.cgroup.enter()
            except OSError as error:
                os.write(reports, f"cgroup {error.errno}\n".encode())
        os.setpgid(0, 0)
        if self.foreground:
            with contextlib.suppress(OSError):  # no stop: SIGTTOU is still ignored
                os.tcsetpgrp(0, os.getpgrp())
        for each, handler in original.items():
            if handler != signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        for each in IGNORED_BY_PYTHON:
            signal.signal(each, signal.SIG_DFL)

    def reap(self) -> bool:
        """Note the processes that have ended or stopped; return true when no descendant is left."""
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
        """Find what is left of the guarded: process id to process group."""
        session = None if self.lost else os.getsid(0)
        try:
            left = descendants(os.getpid(), session=session, known=self.guarded)
            if self.lost and self.cgroup is not None:
                left = dict.fromkeys(self.cgroup.processes(), -1) | left
            return left
        except OSError:  # no /proc here
            return {self.child: self.child} if self.status is None else {}

    def end(self, number: int) -> bool:
        """Send a signal to all that is guarded; false when nothing is left."""
        left = self.left()
        self.guarded = set(left)
        if number == signal.SIGKILL and self.lost and self.cgroup is not None:
            self.cgroup.kill()
        self.send(number)
        send([pid for pid in left if left[pid] != self.child or self.status is not None], number)
        send(left, signal.SIGCONT)  # what is stopped could not act on SIGTERM
        return bool(left)

    # Lines to and from `tenure run`

    def say(self, line: str) -> None:
        """Send a line to `tenure run`; `listen` notices when it is gone."""
        with contextlib.suppress(OSError):
            self.control.sendall(line.encode() + b"\n")

    def listen(self) -> None:
        """Receive lines from `tenure run`; the end of the stream means that it is gone."""
        assert self.received is not None
        try:
            said = self.control.recv(4096)
        except OSError:
            said = b""
        if not said:
            self.received = None
            self.lose()
            return
        *lines, self.received = (self.received + said).split(b"\n")
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
        """Do what is due; returns the seconds until the next look, or ``None`` when all is over."""
        alone = self.reap()
        at = now()
        deadline = self.deadline.at
        if at >= deadline - self.grace and not self.lost:
            self.lose(deadline)
        if self.status is not None:
            if alone or not self.left():
                return None
            self.kill_at = min(self.kill_at, at + self.grace)  # now what the command has left
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
        """Until the command, and all that it left running, is gone."""
        while (pause := self.look()) is not None:
            control = [] if self.received is None else [self.control.fileno()]
            ready, _, _ = select.select([wake, *control], [], [], max(pause, 0.0))
            if wake in ready:
                os.read(wake, 4096)
            if self.control.fileno() in ready:
                self.listen()
