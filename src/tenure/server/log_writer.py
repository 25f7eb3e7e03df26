"""Writing of log lines, on a thread that may be stuck without harm.

A reader of the log that stops reading, or a disk that stalls, blocks the write. Rules:

* `LogWriter.put` never blocks and never fails. Lines that do not fit in the queue are dropped.
* Dropped lines are counted, and the count is written when writing works again.
* The thread writes directly to the file descriptor: a thread stuck in Python's buffered stderr
  would abort the process at exit.
* The owner closes the writer, which waits a bounded time for the last lines.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from queue import Empty, SimpleQueue

from tenure.background import BackgroundThread

MOST_BYTES = 1024 * 1024
"""Maximum bytes of queued lines."""

_BATCH = 64 * 1024  # bytes of one write
_LAST_TIME = 2.0  # seconds for the last lines to be written


class LogWriter:
    """Writer of lines to a file descriptor.

    Lines are put by one thread at a time: a `logging.Handler` has a lock for that.

    Args:
        file: the descriptor; it stays open.
        dropped_line: makes the line with the number of dropped lines.
        most: maximum bytes of queued lines.
    """

    def __init__(
        self, file: int, dropped_line: Callable[[int], bytes], most: int = MOST_BYTES
    ) -> None:
        """Start without lines; the thread starts with the first one."""
        self._file = file
        self._dropped_line = dropped_line
        self._most = most
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # Each counter is written by only one thread, so no lock is needed.
        self._put = 0  # bytes
        self._taken = 0  # bytes
        self._refused = 0  # lines that did not fit
        self._failed = 0  # lines that could not be written
        self._reported = 0  # of both, as reported in the log
        self._closed = False
        self._thread = BackgroundThread("log writer", self._run)

    @property
    def dropped(self) -> int:
        """Number of dropped lines."""
        return self._refused + self._failed

    def put(self, line: bytes) -> None:
        """Queue a line, or drop it if the queue is full."""
        if self._closed or self._put - self._taken + len(line) > self._most:
            self._refused += 1
            return
        self._put += len(line)
        self._lines.put(line)
        self._start()

    def close(self) -> bool:
        """Write the queued lines, and end; false if the write is stuck. Safe to call twice."""
        if self._closed:
            return self._thread.join(0)
        self._closed = True
        self._lines.put(None)
        self._start()
        return self._thread.join(_LAST_TIME)

    def _start(self) -> None:
        # If the system has no more threads, the next line tries again.
        with contextlib.suppress(RuntimeError, MemoryError):
            self._thread.start()

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            lines = []
            size = 0
            while line is not None:
                lines.append(line)
                size += len(line)
                if size >= _BATCH:
                    break
                try:
                    line = self._lines.get_nowait()
                except Empty:
                    break
            self._taken += size
            self._write_counted(b"".join(lines), len(lines))
            dropped = self.dropped
            if dropped > self._reported and self._write(
                self._dropped_line(dropped - self._reported)
            ):
                self._reported = dropped
            if line is None:
                return

    def _write_counted(self, data: bytes, lines: int) -> None:
        if not self._write(data):
            self._failed += lines

    def _write(self, data: bytes) -> bool:
        """Write everything, without a timeout; return false if it cannot be written."""
        rest = memoryview(data)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._file, rest) :]
                except BlockingIOError:  # another process has made the file non-blocking
                    waiting = select.poll()
                    waiting.register(self._file, select.POLLOUT)
                    waiting.poll()
        except OSError:
            return False
        return True


def open_standard_files() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Otherwise a socket or the store's file would get that number, and libraries that write to stderr
    would write there.
    """
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
