"""Watches of an engine's sessions, and their rows in the store.

The store records which kinds of changes of a name this participant watches, not each watch. When
new kinds have been recorded, their watches are notified once, because earlier changes were not
reported.

Notification between participants: a datagram that means "read the file".

Each participant has a socket in the store's folder. A participant that has written a change
notifies the affected participants. The datagram carries no content; they read the change from the
file. So extra notifications are harmless. A lost one (the socket is full) is compensated by the
next, or by the participant's own tick.

A waiting participant also needs to know when the process of a request before it dies. The kernel
reports the end of a process through a pidfd. This is only a hint: the lock of the participant's
liveness file decides (`LivenessFiles.is_dead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

from tenure.engines._kit.watchers import Watchers
from tenure.engines.sqlite import sessions
from tenure.engines.sqlite.liveness import started
from tenure.engines.sqlite.transaction import DATA, OWNERS
from tenure.errors import TenureError
from tenure.greenlets import close_descriptor

_DATAGRAM = b"!"
_LONGEST = 100  # bytes of a socket path that every system accepts


class DatagramNotifier:
    """Notification socket of one participant, which also sends to the others.

    Args:
        folder: the folder of the store.
        mode: the permissions of the socket.
    """

    def __init__(self, folder: str, mode: int) -> None:
        """Create the socket; it has no address yet."""
        self._folder = folder
        self._mode = mode
        self._directory = -1
        self._path = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._prefix = folder + "/"
        if len(os.fsencode(folder)) > _LONGEST - 25 and sys.platform.startswith("linux"):
            # Socket paths are limited to about 100 bytes: go through a descriptor of the folder.
            self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._prefix = f"/proc/self/fd/{self._directory}/"

    def bind(
        self, participant: int, loop: asyncio.AbstractEventLoop, notified: Callable[[], None]
    ) -> None:
        """Call `notified` on the loop after each notification. Several may share one call.

        If the socket cannot be bound (a path that is too long, a full disk), only the tick remains.
        """
        path = f"{self._folder}/{participant}.sock"
        with contextlib.suppress(OSError):
            self._socket.bind(f"{self._prefix}{participant}.sock")
            self._path = path
            os.chmod(path, self._mode)
        if self._path:
            loop.add_reader(self._socket.fileno(), self._receive, notified)

    def notify(self, participants: Iterable[int]) -> list[int]:
        """Notify participants; return those whose sockets have no receiver."""
        silent = []
        for participant in participants:
            try:
                self._socket.sendto(_DATAGRAM, f"{self._prefix}{participant}.sock")
            except (ConnectionRefusedError, FileNotFoundError):
                silent.append(participant)
            except OSError:  # mostly full: an earlier notification has not been received yet
                continue
        return silent

    def _receive(self, notified: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(8):
                pass
        notified()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop listening, remove the socket from the folder, and close it."""
        if self._path:
            with contextlib.suppress(OSError, RuntimeError):
                loop.remove_reader(self._socket.fileno())
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self.abandon()

    def abandon(self) -> None:
        """Close the socket without removing its file. For a forked child: the parent has it."""
        self._socket.close()
        if self._directory >= 0:
            close_descriptor(self._directory)
            self._directory = -1


class NoNotifier:
    """Stand-in for `DatagramNotifier` in portable mode, whose participants poll."""

    def bind(
        self, participant: int, loop: asyncio.AbstractEventLoop, notified: Callable[[], None]
    ) -> None:
        """Do nothing."""

    def notify(self, participants: Iterable[int]) -> list[int]:  # noqa: ARG002
        """Do nothing: no participant is found without a receiver."""
        return []

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""


class ProcessWatch:
    """Watch of other processes through pidfds, if the kernel has them.

    Args:
        died: called once for each watched participant.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, died: Callable[[int], None]) -> None:
        self._loop = loop
        self._died = died
        self._watched: dict[int, int] = {}

    def __contains__(self, participant: int) -> bool:
        """Return true if a participant is watched."""
        return participant in self._watched

    def watch(self, participant: int, pid: int, start: str) -> None:
        """Watch a participant's process, if the system can. Safe to call twice.

        Args:
            participant: the number passed to `died`.
            pid: its process id.
            start: the start time of the process, as `started` returns it.
        """
        if participant in self._watched or pid == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # the process has ended, or is not visible from here
            return
        # The pidfd refers to one process. Comparing the start time after it was opened excludes
        # another process that has reused the pid.
        if started(pid) != start:
            close_descriptor(fd)
            return
        self._watched[participant] = fd
        self._loop.add_reader(fd, self._end, participant)

    def _end(self, participant: int) -> None:
        self.forget(participant)
        self._died(participant)

    def forget(self, participant: int) -> None:
        """Stop watching a participant."""
        fd = self._watched.pop(participant, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            close_descriptor(fd)

    def clear(self) -> None:
        """Stop watching all participants."""
        for participant in list(self._watched):
            self.forget(participant)


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
