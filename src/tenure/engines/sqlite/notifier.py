"""Notification between participants: a datagram that means "read the file".

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
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable

from tenure.engines.sqlite.liveness import started
from tenure.greenlets import close_descriptor

_log = logging.getLogger("tenure.sqlite")

_DATAGRAM = b"!"
LONGEST_FOLDER = 75
"""Bytes of a folder whose sockets have paths that every system accepts: at most 100."""


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
        if len(os.fsencode(folder)) > LONGEST_FOLDER and sys.platform.startswith("linux"):
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
        try:
            self._socket.bind(f"{self._prefix}{participant}.sock")
            self._path = path
            os.chmod(path, self._mode)
        except OSError as error:
            _log.debug("no notifications, events are read with the tick: error=%s", error)
        if self._path:
            loop.add_reader(self._socket.fileno(), self._receive, notified)

    def notify(self, participants: Iterable[int]) -> list[int]:
        """Notify participants; return those whose sockets have no receiver."""
        silent = []
        for participant in participants:
            try:
                self._socket.sendto(_DATAGRAM, f"{self._prefix}{participant}.sock")
            except (ConnectionRefusedError, FileNotFoundError) as error:
                silent.append(participant)
                _log.debug("could not notify: peer=%s error=%s", participant, error)
            except BlockingIOError:  # an earlier notification has not been received yet
                continue
            except OSError as error:
                _log.debug("could not notify: peer=%s error=%s", participant, error)
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
