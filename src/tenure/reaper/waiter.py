"""Process that waits for the death of a program. `tenure.reaper.program` runs this file.

Lines received: ``+KEY WINDOW JSON`` registers or replaces an orphan-to-be, ``-KEY`` withdraws it,
``program JSON`` has the program's environment, ``linger`` makes it wait also for the last process
that has the program's end of the socket. One byte is sent when it is watching.

Arguments: the id of the program, and the seconds without sessions after which the process leaves.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

TYPE_CHECKING = False  # the module typing takes memory
if TYPE_CHECKING:
    from socket import socket
    from typing import Any

PIDFD, CONTROL = 3, 4
"""Descriptors that the program passes; without pidfds, the first is the null device."""

WATCHING = b"w"

HURRY = 5.0
"""Seconds for the attempts to end the sessions after a SIGTERM, as of a service manager."""

SAYING = 0.5
"""Seconds for a connection to send last words."""

ALL_SAID = 2.0
"""Seconds for all of them."""

MOST_SAID = 50
"""Number of sessions with last words; the engine, with one connection, ends the others."""


class Waiter:
    """State of the process.

    Attributes:
        orphans: the registered sessions by key, each with its window and its JSON.
        hurried: whether a service manager wants the process to end.
    """

    def __init__(self, program: int, idle: float) -> None:
        """Start without sessions; `program` is the id of the process."""
        self.program = program
        self.idle = idle
        self.environment = b"{}"
        self.orphans: dict[bytes, tuple[float, bytes]] = {}
        self.hurried = False
        self.linger = False
        self.closed = False  # the socket has ended
        self.refused = False  # by this process, which then stays until the program dies
        self._received = b""

    def hurry(self, *_: object) -> None:
        """Shorten the attempts."""
        self.hurried = True

    @property
    def window(self) -> float:
        """The longest window of the registered sessions."""
        return max((window for window, _ in self.orphans.values()), default=0.0)

    def wait(self) -> bool:
        """Wait for the death of the program; false if there is nothing to be done."""
        wait, died = _death_of(self.program)
        os.write(CONTROL, WATCHING)
        while True:
            ready = wait(not self.closed, self._longest_wait())
            if not self._read():
                return False
            if died():
                if not self._read():  # what it sent last
                    return False
                break
            if ready:
                continue
            if self.closed and not self.refused:
                return False  # not renewed since: the program's image was replaced by an exec
            self._refuse()
            if not self._read() or not self.orphans:
                return False
        while self.linger and not self.closed:
            if not select.select([CONTROL], [], [], self.window)[0] or not self._read():
                return False
        return bool(self.orphans)

    def _longest_wait(self) -> float | None:
        """Seconds until the process leaves, if nothing happens."""
        if self.closed and not self.refused:
            return self.window + 1
        return None if self.orphans or self.linger else self.idle

    def _refuse(self) -> None:
        """Receive no more lines than were sent. The program starts another process for the next."""
        from _socket import AF_UNIX, SHUT_RD, SOCK_STREAM, socket

        control = socket(AF_UNIX, SOCK_STREAM, 0, CONTROL)
        control.shutdown(SHUT_RD)
        control.detach()
        self.refused = True

    def _read(self) -> bool:
        """Process what has been received; false if the process cannot stay."""
        while not self.closed and select.select([CONTROL], [], [], 0)[0]:
            try:
                received = os.read(CONTROL, 1 << 16)
            except ConnectionError:
                received = b""
            self.closed = not received
            *lines, self._received = (self._received + received).split(b"\n")
            if not all(map(self._process, lines)):
                return False
        return True

    def _process(self, line: bytes) -> bool:
        word, _, rest = line.partition(b" ")
        if word == b"program":
            self.environment = rest
            # A child of the program would be seen by its wait(): it adopts orphans itself.
            return os.getppid() != self.program
        if word == b"linger":
            self.linger = True
        elif word[:1] == b"-":
            self.orphans.pop(word[1:], None)
        elif word[:1] == b"+":
            window, _, value = rest.partition(b" ")
            self.orphans[word[1:]] = float(window), value
        return True


def _death_of(program: int) -> tuple[Callable[[bool, float | None], bool], Callable[[], bool]]:
    """Return a function that waits for an event, and one that returns whether the program is dead.

    The first waits for the socket, too, if its first argument is true. It returns false on timeout.
    """
    if sys.platform == "darwin":
        queue = select.kqueue()
        exits = select.kevent(program, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        queue.control([exits], 0, 0)  # before the first line, so while the program lives
        death = queue.fileno()
    else:
        death = PIDFD

    def wait(socket: bool, timeout: float | None) -> bool:
        return bool(select.select([death, CONTROL] if socket else [death], [], [], timeout)[0])

    return wait, lambda: bool(select.select([death], [], [], 0)[0])


def _say_all(orphans: list[dict[str, Any]]) -> list[socket]:
    """Send the last words of the sessions that have any, and return the connections.

    The engine, whose import takes longer than all the rest, makes sure of their effect.
    """
    from time import monotonic

    until = monotonic() + ALL_SAID
    connections: list[socket] = []
    for orphan in orphans:
        place, words = orphan.pop("place", None), orphan.pop("words", "")
        timeout = min(SAYING, until - monotonic())
        if place is not None and timeout > 0 and len(connections) < MOST_SAID:
            connection = _say(place, bytes.fromhex(words), timeout)
            if connection is not None:
                connections.append(connection)
    return connections


def _say(place: Any, words: bytes, timeout: float) -> socket | None:
    """Send last words on a new connection, and return it; ``None`` if that failed."""
    from socket import AF_UNIX, create_connection, socket

    try:
        if isinstance(place, str):
            connection = socket(AF_UNIX)
            connection.settimeout(timeout)
            connection.connect(place)
        else:
            connection = create_connection(tuple(place), timeout)
        connection.sendall(words)
    except OSError:
        return None
    return connection


def main() -> None:
    """Wait, end the sessions, and leave."""
    waiter = Waiter(int(sys.argv[1]), float(sys.argv[2]))
    os.setsid()  # no signal of the program's terminal or process group arrives
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, waiter.hurry)
    os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))
    if not waiter.wait():
        return
    import json

    environment = json.loads(waiter.environment)
    orphans = [json.loads(value) for _, value in waiter.orphans.values()]
    connections = _say_all(orphans)  # they stay open until the end
    sys.path[:] = environment["path"]
    try:
        os.chdir(environment["folder"])  # files in the URL may be relative to it
    except OSError:
        os.chdir("/")
    # Without the client, which the package imports: that takes as long as all the rest.
    package = type(sys)("tenure")
    package.__path__ = [environment["package"]]
    sys.modules["tenure"] = package
    from tenure.reaper.ending import end

    end(orphans, lambda: HURRY if waiter.hurried else waiter.window)
    del connections


if __name__ == "__main__":
    main()
