"""What stands between `tenure run` and its command, and ends the command in time.

This file is run as a program of its own, by its path, and imports nothing but the standard
library, so that it starts quickly. It is the command's parent. `tenure run` holds the lease, and
says over a socket until when; the guardian alone decides when the command must end, so that a
`tenure run` that is stopped, stalled or killed cannot keep it from doing so.

Rules:

* Guarded is the command with all its descendants, except daemons: what called setsid() and has
  outlived its parents. (Linux; elsewhere, the command's process group.)
* At `deadline - grace` the guarded get SIGTERM, at the deadline SIGKILL, until none is left.
  The lock counts as lost from the first of these on, and no later deadline is heard.
* When the socket closes, `tenure run` is dead: SIGKILL at once. When the guardian itself dies,
  the kernel kills the command (PR_SET_PDEATHSIG).
* When the command has ended, what it left running is ended as well: SIGTERM, and SIGKILL after
  the grace. Only then is the end reported, so that the lock can be released.
* The deadline is on the clock that counts while the machine is suspended, which no timer
  follows; so the clock is looked at every second.

Lines that it hears: ``deadline SECONDS``, ``signal NUMBER``, ``kill``.
Lines that it says: ``started PID``, ``failed ERRNO``, ``stopped SIGNAL``, ``stuck PID...``,
``ended WAIT-STATUS LOST``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
TICK = 1.0
"""Seconds between two looks at the clock, at the most."""
SWEEP = 0.02
"""Seconds between two looks at what is being ended."""
STUCK = 1.0
"""Seconds after SIGKILL when what is still there is reported."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

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


def now() -> float:
    """The clock of the deadlines."""
    return time.clock_gettime(CLOCK)


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere it does nothing."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(guarded: set[int]) -> dict[int, int]:
    """The living descendants that are no daemons, or are `guarded`: process id to group."""
    session = os.getsid(0)
    groups: dict[int, int] = {}
    daemons: set[int] = set()
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()[:4]
            parent, group, its_session = map(int, numbers)
            if state not in {b"Z", b"X"}:
                pid = int(entry)
                groups[pid] = group
                children.setdefault(parent, []).append(pid)
                if its_session != session:
                    daemons.add(pid)
    # Whose parents are gone has become our child.
    look_at = [pid for pid in children.get(os.getpid(), ()) if pid not in daemons - guarded]
    found: dict[int, int] = {}
    while look_at:
        pid = look_at.pop()
        found[pid] = groups[pid]
        look_at += children.get(pid, ())
    return found


class Guardian:
    """The command, what is known of it, and what is being done about it."""

    def __init__(
        self, control: socket.socket, deadline: float, grace: float, *, foreground: bool
    ) -> None:
        self.control = control
        self.heard: bytes | None = b""  # the beginning of a line; None when the socket is closed
        self.deadline = deadline
        self.grace = grace
        self.foreground = foreground
        self.child = 0
        self.status: int | None = None  # of the command, once it has ended
        self.guarded: set[int] = set()  # what has got a signal to end, as long as it lives
        self.lost = False
        self.kill_at = float("inf")  # set when the command ends, or must
        self.asked = False  # SIGTERM has been sent
        self.killing_since: float | None = None
        self.reported_stuck = False

    # The command

    def start(self, command: list[str]) -> int:
        """Start the command; returns 0, or the errno of why that failed."""
        original = {each: signal.signal(each, signal.SIG_IGN) for each in NOT_FOR_THE_GUARDIAN}
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        failure, says_failure = os.pipe()
        me = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            try:
                self._prepare(original, me)
                os.execvp(command[0], command)  # noqa: S606  what it is for
            except OSError as error:
                os.write(says_failure, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(says_failure)
        with contextlib.suppress(OSError):  # the child does it too; one of them comes first
            os.setpgid(self.child, self.child)
        # Closed by the exec. (One from a dead network mount keeps us here: no command runs yet.)
        errno = os.read(failure, 16)
        os.close(failure)
        return int(errno or 0)

    def _prepare(self, original: Mapping[signal.Signals, object], parent: int) -> None:
        """What the child does before it becomes the command."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was in force
            os._exit(127)
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
        """Note who has ended or stopped; true when there is no descendant at all any more."""
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
        """A signal to the command's process group."""
        if self.status is None:  # else the number may be somebody else's by now
            with contextlib.suppress(OSError):
                os.killpg(self.child, number)

    def left(self) -> dict[int, int]:
        """What is left of the guarded."""
        try:
            return descendants(self.guarded)
        except OSError:  # no /proc here
            return {self.child: self.child} if self.status is None else {}

    def end(self, number: int) -> bool:
        """Send a signal to all that is guarded; false when nothing is left."""
        left = self.left()
        self.guarded = set(left)
        self.send(number)
        for pid, group in left.items():
            with contextlib.suppress(OSError):
                if group != self.child or self.status is not None:
                    os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)  # what is stopped could not act on SIGTERM
        return bool(left)

    # What `tenure run` says, and hears

    def say(self, line: str) -> None:
        """A line to `tenure run`; that it is gone is noticed where it is listened to."""
        with contextlib.suppress(OSError):
            self.control.sendall(line.encode() + b"\n")

    def listen(self) -> None:
        """What `tenure run` has to say, its end included."""
        assert self.heard is not None
        try:
            said = self.control.recv(4096)
        except OSError:
            said = b""
        if not said:
            self.heard = None
            self.lose()
            return
        *lines, self.heard = (self.heard + said).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "deadline" and not self.lost:
                self.deadline = float(value)
            elif word == "signal":
                self.send(int(value))
            elif word == "kill":
                self.lose()

    # Time

    def lose(self, kill_at: float = 0.0) -> None:
        """The lock is gone, or must be taken for it; the command ends by `kill_at`."""
        self.lost = True
        self.kill_at = min(self.kill_at, kill_at)

    def look(self) -> float | None:
        """Do what is due; returns the seconds until the next look, or ``None`` when all is over."""
        alone = self.reap()
        at = now()
        if at >= self.deadline - self.grace and not self.lost:
            self.lose(self.deadline)
        if self.status is not None:
            if alone or not self.left():
                return None
            self.kill_at = min(self.kill_at, at + self.grace)  # now what the command has left
        if at >= self.kill_at:
            self._kill(at)
            return SWEEP
        if self.kill_at < float("inf"):
            if not self.asked:
                self.asked = True
                self.end(signal.SIGTERM)
            return SWEEP
        return min(TICK, self.deadline - self.grace - at)

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
            hearing = [] if self.heard is None else [self.control.fileno()]
            ready, _, _ = select.select([wake, *hearing], [], [], max(pause, 0.0))
            if wake in ready:
                os.read(wake, 4096)
            if self.control.fileno() in ready:
                self.listen()


def wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends or stops."""
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def main(arguments: list[str]) -> None:
    """Run what `tenure.cli.run.guarded` asks for."""
    control, deadline, grace, place, *command = arguments
    guardian = Guardian(
        socket.socket(fileno=int(control)),
        float(deadline),
        float(grace),
        foreground=place == "foreground",
    )
    guardian.control.set_inheritable(False)
    wake = wake_on_child()
    if errno := guardian.start(command):
        guardian.say(f"failed {errno}")
        return
    guardian.say(f"started {guardian.child}")
    guardian.watch_over(wake)
    guardian.say(f"ended {guardian.status} {int(guardian.lost)}")


if __name__ == "__main__":
    main(sys.argv[1:])
