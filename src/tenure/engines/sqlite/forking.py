"""Guards, so that a fork waits until no other thread of this process is inside SQLite.

A forked child gets a copy of SQLite's memory, including locks held by other threads. Those threads
do not exist in the child, so the locks would never be released, and the child would find the file
locked for ever. So a thread uses a connection only inside a `Guard`, and a fork acquires all guards
first. Guards are uncontended and cheap, because a connection is used by one thread at a time; only
a fork, and an opening beside another one in the same process, ever waits for one.

A guard is re-entrant, so that a signal handler that forks during a transaction does not wait for
itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

_all: weakref.WeakSet[Guard] = weakref.WeakSet()
_list = threading.RLock()  # guards the set; held during a fork
_taken: list[Guard] = []


class Guard:
    """Lock that a thread holds while it uses or opens one connection."""

    __slots__ = ("__weakref__", "acquire", "release")

    def __init__(self) -> None:
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
    """Acquire all guards. While waiting for one, hold no other, nor the list.

    A thread inside one guard may enter another, or create one.
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


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
