"""How a participant is woken: a datagram that says nothing but "look at the file".

Each participant has a socket in the store's folder. Who has written something that concerns it
rings; what it was is read from the file, so that a ring too many or too few does no harm. One
that is lost (the socket is full) is made up for by the next, or by the participant's own tick.

A participant that waits also wants to hear when one that stands before it dies. The kernel tells
that through a pidfd. It is a hint like the other: what counts is the lock (`Lives.is_dead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable

from tenure.engines.sqlite.life import started

__all__ = ["Bell", "Deathwatch"]

_RING = b"!"
_LONGEST = 100  # bytes of a socket's path that every system takes


class Bell:
    """One participant's bell, and its hand on those of the others.

    Args:
        folder: of the store.
        mode: permissions of the socket.
    """

    def __init__(self, folder: str, mode: int) -> None:
        self._folder = folder
        self._mode = mode
        self._directory = -1
        self._path = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._prefix = folder + "/"
        if len(os.fsencode(folder)) > _LONGEST - 25 and sys.platform.startswith("linux"):
            # The name of a socket is short, and a path may be long: go through a descriptor.
            self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._prefix = f"/proc/self/fd/{self._directory}/"

    def hang(self, participant: int) -> None:
        """Make it possible to be rung. Without it (the path is too long here) the tick must do."""
        path = f"{self._folder}/{participant}.sock"
        with contextlib.suppress(OSError):
            self._socket.bind(f"{self._prefix}{participant}.sock")
            self._path = path
            os.chmod(path, self._mode)

    def ring(self, participants: Iterable[int]) -> list[int]:
        """Wake participants; returns those that nobody answers for."""
        silent = []
        for participant in participants:
            try:
                self._socket.sendto(_RING, f"{self._prefix}{participant}.sock")
            except (ConnectionRefusedError, FileNotFoundError):
                silent.append(participant)
            except OSError:  # full: it has been rung before, and has not looked yet
                continue
        return silent

    def listen(self, loop: asyncio.AbstractEventLoop, rung: Callable[[], None]) -> None:
        """Have `rung` called whenever it has been rung."""
        if self._path:
            loop.add_reader(self._socket.fileno(), self._hear, rung)

    def _hear(self, rung: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(8):
                pass
        rung()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the bell down."""
        if self._path:
            with contextlib.suppress(OSError, RuntimeError):
                loop.remove_reader(self._socket.fileno())
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: close, and leave the file to the parent."""
        self._socket.close()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


class Deathwatch:
    """Hears of the deaths of other processes, where the kernel tells them.

    Args:
        died: called with the participant, once for each that is watched.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, died: Callable[[int], None]) -> None:
        self._loop = loop
        self._died = died
        self._watched: dict[int, int] = {}

    def __contains__(self, participant: int) -> bool:
        return participant in self._watched

    def watch(self, participant: int, pid: int, start: str) -> None:
        """Watch a participant's process. Safe to call twice."""
        if participant in self._watched or pid == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # gone, or not to be seen from here
            return
        # Asked now, the number cannot be given to another process any more without our noticing.
        if started(pid) != start:
            os.close(fd)
            return
        self._watched[participant] = fd
        self._loop.add_reader(fd, self._gone, participant)

    def _gone(self, participant: int) -> None:
        self.forget(participant)
        self._died(participant)

    def forget(self, participant: int) -> None:
        """Watch a participant no more."""
        fd = self._watched.pop(participant, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def clear(self) -> None:
        """Watch nobody any more."""
        for participant in list(self._watched):
            self.forget(participant)
