"""The terminal from which `tenure run` was started, if any, and its use by the job.

A command in its own process group may read the terminal only while that group is in the foreground.
The command gets the terminal from the start when all standard streams are the terminal. In a
pipeline (`tenure run ... | less`) another program may need it, so the command gets it on request.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

_Settings = list[int | list[bytes | int]]


class Terminal:
    """The controlling terminal of this process, if there is one."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._settings: _Settings | None = None
        with contextlib.suppress(OSError, termios.error):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            self._settings = termios.tcgetattr(self._fd)

    def close(self) -> None:
        """Close the terminal."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def exists(self) -> bool:
        """Return whether this process has a controlling terminal."""
        return self._fd is not None

    @property
    def is_ours(self) -> bool:
        """Return whether our process group is in the foreground."""
        return self._foreground() == os.getpgrp()

    def belongs_to(self, group: int) -> bool:
        """Return whether that process group is in the foreground."""
        return self._foreground() == group

    @property
    def alone(self) -> bool:
        """Return whether we are in the foreground, and all standard streams are terminals."""
        return self.is_ours and all(os.isatty(stream) for stream in range(3))

    def give(self, group: int) -> None:
        """Put a process group into the foreground."""
        if self._fd is not None:
            with contextlib.suppress(OSError), _unstopped():
                os.tcsetpgrp(self._fd, group)

    def take_back(self, group: int) -> bool:
        """Put ourselves into the foreground again if `group` is there; return true if it was."""
        if not self.belongs_to(group):
            return False
        self.give(os.getpgrp())
        return True

    def restore(self) -> None:
        """Undo changes to the terminal's settings by a killed command."""
        if self._fd is not None and self._settings is not None and self.is_ours:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def _foreground(self) -> int | None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                return os.tcgetpgrp(self._fd)
        return None


@contextlib.contextmanager
def _unstopped() -> Iterator[None]:
    """Block SIGTTOU, which stops a background process that changes the foreground group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
