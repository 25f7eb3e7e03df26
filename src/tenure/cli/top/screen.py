"""The terminal that `tenure top` uses exclusively, restored in any case.

Rules:

* All changes (alternate screen, cursor, key input) are made in `enter`, and undone in `leave`,
  which runs after a key, an error or a signal.
* Ctrl-Z leaves before stopping, and enters again after continuing. Only SIGKILL leaves the terminal
  changed (`reset` repairs it).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from tenure.cli.output import terminal
from tenure.cli.top.view import Keyboard

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ESCAPE_TIME = 0.05
"""Timeout in seconds for the rest of an escape sequence."""


class Screen:
    """The terminal, for the duration of the ``with`` block.

    Args:
        key: called with each key.
        redraw: called when the screen has another size, or was left and entered again.
        ended: called with the signal that ends the process.
    """

    def __init__(
        self,
        key: Callable[[str], None],
        redraw: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        """Prepare the screen; the terminal is changed only when the block is entered."""
        self._loop = asyncio.get_running_loop()
        self._key, self._redraw, self._ended = key, redraw, ended
        self._keyboard = Keyboard()
        self._live = Live(
            console=terminal(),
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._fd = _keyboard()
        self._settings: list[Any] | None = None
        self._entered = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return terminal().size

    def __enter__(self) -> Screen:
        """Switch the terminal to the screen, and handle its signals."""
        try:
            self.enter()
            for number in ENDING:
                self._loop.add_signal_handler(number, self._ended, number)
            self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            self._loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and the signals."""
        self.leave()
        for number in (*ENDING, signal.SIGTSTP, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        if self._fd is not None and self._fd != 0:
            os.close(self._fd)

    def enter(self) -> None:
        """Take the terminal."""
        self._entered = True
        if self._fd is not None:
            self._settings = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            self._loop.add_reader(self._fd, self._read)
        self._live.start()

    def leave(self) -> None:
        """Restore the terminal. Safe to call twice."""
        if not self._entered:
            return
        self._entered = False
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            self._live.stop()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            if self._settings is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines, replacing the previous ones."""
        if self._entered:
            try:
                self._live.update(Group(*lines), refresh=True)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # The terminal is closed, and its signal is about to arrive.
                self._ended(signal.SIGHUP)

    def _suspend(self) -> None:
        self.leave()
        self._loop.remove_signal_handler(signal.SIGTSTP)  # now the signal stops the process
        os.kill(os.getpid(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)  # continues here
        self.enter()
        self._redraw()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            self._ended(signal.SIGHUP)
            return
        self._press(self._keyboard.feed(data))
        if self._keyboard.waiting:
            self._loop.call_later(ESCAPE_TIME, lambda: self._press(self._keyboard.flush()))

    def _press(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._key(key)


class Notes(logging.Handler):
    """The last warning, which would otherwise overwrite the screen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def __enter__(self) -> Notes:
        root = logging.getLogger()
        self._others, root.handlers = root.handlers, [self]
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().handlers = self._others


def _keyboard() -> int | None:
    """Return the descriptor to read keys from: standard input or /dev/tty, if one of them works."""
    if sys.stdin is not None and sys.stdin.isatty():
        return sys.stdin.fileno()
    with contextlib.suppress(OSError):
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    return None
