"""The watchdog: the guardian's parent, which ends the command when the guardian cannot.

When the guardian is killed, its descendants in any process group or session become children of the
watchdog, which is a subreaper. When the guardian is stopped, it misses the deadline, which both
share in memory. In both cases the watchdog kills everything and reports the end. Until then it
keeps the inherited descriptors open, and with them the lock that shows an SQLite store that the
holder is alive.

So any two of `tenure run`, watchdog and guardian may be killed at once: the third ends the command.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from pathlib import Path

from .cgroup import Cgroup
from .guardian import Guardian, ignore_signals
from .processes import (
    SWEEP,
    TICK,
    Deadline,
    become_subreaper,
    descendants,
    now,
    send,
    wake_on_child,
)

LATE = 1.0
"""Seconds for the guardian's report, after everything has ended."""


class Watchdog:
    """The parent of a guardian, which does its work if it fails."""

    def __init__(
        self, guardian: int, control: socket.socket, deadline: Deadline, cgroup: Cgroup | None
    ) -> None:
        self.guardian: int | None = guardian  # while it lives
        self.in_order = False  # the guardian has reported, and has exited by itself
        self.control = control
        self.deadline = deadline
        self.cgroup = cgroup

    def watch(self) -> None:
        """Wait for the end of the guardian, or do its work."""
        wake = wake_on_child()
        while self._reap() is not None:
            if now() >= self.deadline.at:
                self._kill(wake, lost=True)
                return
            _pause(wake, min(TICK, self.deadline.at - now()))
        if not self.in_order:
            self._kill(wake, lost=False)

    def _kill(self, wake: int, *, lost: bool) -> None:
        """Kill everything; then, unless the guardian does so, report."""
        ended_at: float | None = None
        while True:
            guardian = self._reap()
            left = self._end()
            if not left and guardian is None:
                break
            if not left:
                ended_at = ended_at or now()
                if now() >= ended_at + LATE:  # it is stopped, and nothing remains to be done
                    os.kill(guardian or 0, signal.SIGKILL)
            _pause(wake, SWEEP)
        if not self.in_order:
            if self.cgroup is not None:
                self.cgroup.remove()
            self._say(f"ended {int(signal.SIGKILL)} {int(lost)}")

    def _end(self) -> bool:
        """Send SIGKILL to everything but the guardian; return false when nothing is left."""
        group = self.deadline.group
        if self.cgroup is not None:
            self.cgroup.kill()
        try:
            left = set(descendants(os.getpid())) - {self.guardian}
        except OSError:  # without /proc, only the process group can be reached
            send([-group] if group else [], signal.SIGKILL)
            return False
        send(left, signal.SIGKILL)
        return bool(left) or (self.cgroup is not None and self.cgroup.populated)

    def _reap(self) -> int | None:
        """Reap ended children; return the guardian while it lives."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.guardian = None
                break
            if pid == 0:
                break
            if pid == self.guardian:
                self.guardian = None
                self.in_order = status == 0
        return self.guardian

    def _say(self, line: str) -> None:
        try:
            self.control.sendall(line.encode() + b"\n")
        except OSError:
            return  # `tenure run` is dead, too


def _pause(wake: int, seconds: float) -> None:
    ready, _, _ = select.select([wake], [], [], max(seconds, 0.0))
    if ready:
        os.read(wake, 4096)


def main(arguments: list[str]) -> None:
    """Start the guardian and watch it; `tenure.cli.run.guarded` documents the arguments."""
    control_fd, at, grace, place, cgroup_path, cgroup_lock, *command = arguments
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    cgroup = None
    if cgroup_path:
        cgroup = Cgroup(Path(cgroup_path), int(cgroup_lock))
        os.set_inheritable(cgroup.lock, False)
    deadline = Deadline(float(at))
    original = ignore_signals()
    become_subreaper()
    child = os.fork()
    if child:
        Watchdog(child, control, deadline, cgroup).watch()
        return
    status = 1
    try:
        foreground = place == "foreground"
        guardian = Guardian(control, deadline, float(grace), foreground=foreground, cgroup=cgroup)
        guardian.run(command, original)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # the watchdog does the rest
    finally:
        os._exit(status)
