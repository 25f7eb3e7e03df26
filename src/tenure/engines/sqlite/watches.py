"""Watches of an engine's sessions, and their rows in the store.

The store records which kinds of changes of a name this participant watches, not each watch. When
new kinds have been recorded, their watches are notified once, because earlier changes were not
reported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

from tenure.engines._kit.watchers import Watchers
from tenure.engines.sqlite import sessions
from tenure.engines.sqlite.transaction import DATA, OWNERS
from tenure.errors import TenureError

Name = tuple[int, str]
"""A semaphore: the number of its node, and its name."""


class SqliteWatch:
    """One watch of a session."""

    __slots__ = ("_changed", "kinds", "session", "stopped")

    def __init__(self, session: Hashable, kinds: int, changed: Callable[[], None]) -> None:
        self.session = session
        self.kinds = kinds
        self.stopped = False
        self._changed = changed

    def notify(self) -> None:
        """Report a change."""
        if not self.stopped:
            self._changed()


class SqliteWatches:
    """The watches of one engine. Iterates over the watched names.

    Args:
        do: runs an operation in the background; it returns a future if the operation was deferred.
    """

    def __init__(self, do: Callable[..., asyncio.Future[Any] | None]) -> None:
        """Start without watches; `do` runs an operation on the store."""
        self._do = do
        self._watches: Watchers[Name, Hashable, SqliteWatch] = Watchers()
        self._counts: dict[Name, dict[int, int]] = {}  # number of watches of each kind
        self._unknown: dict[Name, list[SqliteWatch]] = {}  # not in the store yet

    def __len__(self) -> int:
        """Return the number of watches."""
        return len(self._watches)

    def __iter__(self) -> Iterator[Name]:
        """Iterate over the watched names."""
        return iter(self._watches)

    def kinds(self, name: Name) -> int:
        """Return the watched kinds of a name, as a bit set."""
        return sum(kind for kind, count in self._counts.get(name, {}).items() if count)

    def changed(self, name: Name, kind: int) -> None:
        """Report a change to the watches of its kind."""
        for watch in self._watches.on(name):
            if watch.kinds & kind:
                watch.notify()

    def add(
        self, session: Hashable, name: Name, kinds: int, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin a watch; return the function that ends it."""
        watch = SqliteWatch(session, kinds, changed)
        before = self.kinds(name)
        self._watches.add(name, session, watch)
        self._count(name, watch, 1)
        try:
            if self.kinds(name) != before:
                self._write(name, [watch])
            elif name in self._unknown:
                self._unknown[name].append(watch)
        except BaseException:
            self._remove(name, watch)
            raise
        return partial(self._remove, name, watch)

    def forget(self, session: Hashable) -> None:
        """End the watches of a session."""
        for name, watch in self._watches.of(session):
            self._remove(name, watch)

    def _remove(self, name: Name, watch: SqliteWatch) -> None:
        if watch.stopped:
            return
        watch.stopped = True
        before = self.kinds(name)
        self._watches.remove(name, watch.session, watch)
        self._count(name, watch, -1)
        if self.kinds(name) != before:
            with contextlib.suppress(TenureError):  # extra notifications are harmless
                self._write(name, [])

    def _count(self, name: Name, watch: SqliteWatch, change: int) -> None:
        counts = self._counts.setdefault(name, dict.fromkeys((DATA, OWNERS), 0))
        for kind in counts:
            if watch.kinds & kind:
                counts[kind] += change
        if name not in self._watches:
            del self._counts[name]

    def _write(self, name: Name, new: list[SqliteWatch]) -> None:
        """Write the watched kinds of a name to the store; `new` are the watches that need it."""

        def known(_: object) -> None:
            if self._unknown.get(name) is new:
                del self._unknown[name]
            for watch in new:
                watch.notify()

        answer = self._do(sessions.watch, *name, self.kinds(name))
        if answer is not None:
            self._unknown[name] = new
            answer.add_done_callback(known)
