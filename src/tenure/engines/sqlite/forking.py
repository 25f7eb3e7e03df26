"""A fork waits until no other thread of this process is inside SQLite.

A forked child gets a copy of SQLite's memory as it was at that instant: of the locks that its
threads had, too, and nobody is there to give those back. A child that opened the same file would
find it locked for ever. So whoever works with a connection does so inside a `Guard`, and a fork
takes all of them first. Each guards what one thread uses at a time: they cost next to nothing,
and only a fork ever waits for one.

A guard may be entered again by the thread that is inside, so that a signal handler that forks in
the middle of a transaction does not wait for itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

__all__ = ["Guard"]

_all: weakref.WeakSet[Guard] = weakref.WeakSet()
_list = threading.RLock()  # guards the set; a fork has it from before to after
_taken: list[Guard] = []


class Guard:
    """What a thread is inside of while it works with one connection, or opens one."""

    __slots__ = ("__weakref__", "acquire", "release")

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire = lock.acquire
        self.release = lock.release
        with _list:
            _all.add(self)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _before() -> None:
    _list.acquire()
    for guard in list(_all):
        guard.acquire()
        _taken.append(guard)


def _after() -> None:
    while _taken:
        _taken.pop().release()
    _list.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
