"""Processes: the clock of their deadlines, their descendants, and the signals that end them."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
TICK = 1.0
"""Longest time between two readings of the clock, in seconds; timers do not count a suspension."""
SWEEP = 0.02
"""Seconds between two checks of processes that are being ended."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def now() -> float:
    """Read the clock of the deadlines."""
    return time.clock_gettime(CLOCK)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Does nothing on systems other than Linux."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_subreaper(*, be: bool = True) -> None:
    """Adopt descendants whose parents end, or stop adopting. Linux only."""
    prctl(PR_SET_CHILD_SUBREAPER, int(be))


def descendants(
    root: int, *, session: int | None = None, known: Iterable[int] = ()
) -> dict[int, int]:
    """Find the living descendants of a process: process id to process group.

    Args:
        root: the process, which is not in the result.
        session: omit daemons: children of `root` outside this session, with their descendants.
            ``None`` omits none.
        known: processes that are not daemons, in any session.

    Raises:
        OSError: /proc is not available.
    """
    groups: dict[int, int] = {}
    apart: set[int] = set()
    children: dict[int, list[int]] = {}
    seen: set[str] = set()
    # A process may fork and end while the list is read, so repeat until no new one is found.
    while new := [each for each in os.listdir("/proc") if each.isdecimal() and each not in seen]:
        seen.update(new)
        for entry in new:
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                state, *numbers = file.read().rpartition(b")")[2].split()[:4]
                parent, group, its_session = map(int, numbers)
                if state not in {b"Z", b"X"}:
                    pid = int(entry)
                    groups[pid] = group
                    children.setdefault(parent, []).append(pid)
                    if session is not None and its_session != session:
                        apart.add(pid)
    # A process whose parents have ended is a child of the root, which is a subreaper.
    daemons = apart.difference(known)
    look_at = [pid for pid in children.get(root, ()) if pid not in daemons]
    found: dict[int, int] = {}
    while look_at:
        pid = look_at.pop()
        found[pid] = groups[pid]
        look_at += children.get(pid, ())
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes that may have ended, or belong to another user."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def wake_on_child() -> int:
    """Return a descriptor that becomes readable when a child ends or stops."""
    wake, wakes = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


class Deadline:
    """The deadline and the command's process group, in memory shared with forked processes."""

    _LAYOUT = struct.Struct("dq")

    def __init__(self, at: float) -> None:
        """Share the deadline `at`, without a process group yet."""
        self._memory = mmap.mmap(-1, self._LAYOUT.size)
        self.group = 0  # until the command is started
        self.at = at

    @property
    def at(self) -> float:
        """The deadline, on the clock that `now` reads."""
        return float(self._LAYOUT.unpack_from(self._memory)[0])

    @at.setter
    def at(self, at: float) -> None:
        struct.pack_into("d", self._memory, 0, at)

    @property
    def group(self) -> int:
        """The command's process group, or 0."""
        return int(self._LAYOUT.unpack_from(self._memory)[1])

    @group.setter
    def group(self, group: int) -> None:
        struct.pack_into("q", self._memory, 8, group)
