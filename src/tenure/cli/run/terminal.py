"""The terminal that `tenure run` was started from, if any, and who of its job may use it.

A command in a process group of its own may read the terminal only while that group is the
foreground one. It gets it from the start when the terminal is all it talks to; in a pipeline
(`tenure run ... | less`) somebody else may need it, and so it gets it when it asks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

__all__ = ["Terminal"]

_Settings = list[int | list[bytes | int]]


class Terminal:
    """The controlling terminal of this process, or nothing at all."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._settings: _Settings | None = None
        with contextlib.suppress(OSError, termios.error):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            self._settings = termios.tcgetattr(self._fd)

    def close(self) -> None:
        """Forget it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self._fd is not None

    @property
    def ours(self) -> bool:
        """Whether our process group is in the foreground."""
        return self._foreground() == os.getpgrp()

    @property
    def alone(self) -> bool:
        """Whether the terminal is all that our standard streams are connected to."""
        return self.ours and all(os.isatty(stream) for stream in range(3))

    def give(self, group: int) -> None:
        """Put a process group into the foreground."""
        if self._fd is not None:
            with contextlib.suppress(OSError), _unstopped():
                os.tcsetpgrp(self._fd, group)

    def take_back(self, group: int) -> bool:
        """Put ourselves into the foreground again, if `group` is there; true if it was."""
        if self._foreground() != group:
            return False
        self.give(os.getpgrp())
        return True

    def restore(self) -> None:
        """Undo what a killed command has made of the terminal's settings."""
        if self._fd is not None and self._settings is not None and self.ours:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def _foreground(self) -> int | None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                return os.tcgetpgrp(self._fd)
        return None


@contextlib.contextmanager
def _unstopped() -> Iterator[None]:
    """Who changes the foreground from the background is stopped, unless SIGTTOU is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
