"""The guard of one pytest process: a program that imports nothing but the standard library.

The process writes lines to the guard's standard input: ``SECONDS NAME`` when something begins,
where 0 seconds are no limit. The end of that input is the end of the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_STACKS = 10.0
"""Seconds in which a process has written its stacks, and died of SIGABRT."""
_LOOK = 0.02
"""Seconds between two looks at whether it has."""


def main() -> None:
    process = os.getppid()
    seconds, name = 0.0, ""
    until = 0.0
    unread = b""
    while True:
        remaining = max(0.0, until - time.monotonic()) if seconds else None
        readable, _, _ = select.select([0], [], [], remaining)
        if not readable:
            break
        received = os.read(0, 65536)
        if not received:
            return
        *lines, unread = (unread + received).split(b"\n")
        if lines:
            limit, _, name = lines[-1].decode(errors="replace").partition(" ")
            seconds = float(limit)
            until = time.monotonic() + seconds
    if os.getppid() == process:  # a forked child may keep the input open after its end
        _end(process, seconds, name)


def _end(process: int, seconds: float, name: str) -> None:
    sys.stderr.write(f"\n\nHANGS: {name}: not over after {seconds:g} s, so its process ends.\n")
    sys.stderr.flush()
    condemned = descendants(process) - {os.getpid()}
    _send(process, signal.SIGCONT)
    _send(process, signal.SIGABRT)  # faulthandler writes the stacks
    until = time.monotonic() + _STACKS
    while os.getppid() == process and time.monotonic() < until:
        time.sleep(_LOOK)
    if os.getppid() == process:
        _send(process, signal.SIGKILL)
    for each in condemned:
        _send(each, signal.SIGKILL)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def descendants(process: int) -> set[int]:
    """The living descendants of a process. (Linux; elsewhere there are none.)"""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            state, parent = _stat(int(entry))
            if state in _ALIVE:
                children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    unseen = [process]
    while unseen:
        direct = children.get(unseen.pop(), [])
        found.update(direct)
        unseen += direct
    return found


def is_alive(process: int) -> bool:
    """Whether a process exists and is no zombie. (Linux.)"""
    return _stat(process)[0] in _ALIVE


_ALIVE = frozenset("RSDTtIWP")


def _stat(process: int) -> tuple[str, int]:
    """The state of a process and its parent; the state is empty for one that has gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state.decode(), int(parent)


if __name__ == "__main__":
    main()
