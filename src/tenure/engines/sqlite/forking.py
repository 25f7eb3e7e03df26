"""A fork waits until no other thread of this process is inside SQLite.

A forked child gets a copy of SQLite's memory at that instant, including locks that other threads
held. Those threads do not exist in the child, so the locks would never be released, and a child
that opened the same file would find it locked for ever. A thread therefore uses a connection only
inside a `Guard`, and a fork acquires all guards first. Each protects what one thread uses at a
time: they cost next to nothing, and only a fork ever waits for one.

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
    """Lock that a thread holds while it uses or opens one connection."""

    __slots__ = ("__weakref__", "acquire", "release")

    def __init__(self) -> None:
        """Create the lock and add it to those that a fork waits for."""
        lock = threading.RLock()
        self.acquire = lock.acquire
        self.release = lock.release
        with _list:
            _all.add(self)

    def __enter__(self) -> None:
        """Take the lock."""
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self.release()


def _before() -> None:
    """Acquire all guards. While it waits for one it holds no other, nor the list.

    A thread inside of one guard may enter another, or make one.
    """
    busy = None
    while True:
        if busy is not None:
            busy.acquire()
            _taken.append(busy)
        _list.acquire()
        others = (guard for guard in list(_all) if guard is not busy)
        busy = next((guard for guard in others if not _try(guard)), None)
        if busy is None:
            return
        _after()


def _try(guard: Guard) -> bool:
    if not guard.acquire(blocking=False):
        return False
    _taken.append(guard)
    return True


def _after() -> None:
    while _taken:
        _taken.pop().release()
    _list.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
