"""Log of the server: one line for each event, as text or JSON.

An event is a few fixed words, and *facts*: names with values. ``log_event(log, level, "listening",
address=...)`` writes

    2026-11-22T10:00:00.123Z info     listening  address=tenure://127.0.0.1:7070

or, as JSON, an object on one line with ``time``, ``level``, ``event`` and the facts. Text from
clients is quoted and escaped, so that no client can forge a line. Events that clients can cause in
any number are logged a few times and then counted (``unsaid``). Facts never contain secrets.

**Writing** (`LogWriter`) is done on a thread that may be stuck without harm. A reader of the log
that stops reading, or a disk that stalls, blocks the write. Rules:

* `LogWriter.put` never blocks and never fails. Lines that do not fit in the queue are dropped.
* Dropped lines are counted, and the count is written when writing works again.
* The thread writes directly to the file descriptor: a thread stuck in Python's buffered stderr
  would abort the process at exit.
* The owner closes the writer, which waits a bounded time for the last lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

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


LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LOGGER = logging.getLogger("tenure.server")
"""The server's logger; each listener has a child of it."""

_OFTEN = 20
"""Lines of one event that are logged in a period."""

_PERIOD = 10.0
"""Length of that period in seconds."""


def log_event(log: logging.Logger, level: int, event: str, /, **facts: object) -> None:
    """Log an event.

    Args:
        log: the logger.
        level: as in `logging`.
        event: a constant text; variable parts are facts.
        facts: values of any type; strings are escaped, ``None`` is omitted.
    """
    if log.isEnabledFor(level):
        log.log(level, event, extra={"facts": facts})


def set_up(form: LogFormat, level: LogLevel, file: int) -> logging.Handler:
    """Write all log records of this process to a file descriptor, in that form.

    Logging never blocks: lines that cannot be written in time are dropped and counted.

    Returns:
        The handler. `logging.Handler.close` waits a bounded time for the last lines.
    """
    handler = _Handler(_Json() if form == "json" else _Text(), file)
    handler.addFilter(_Seldom())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("tenure").setLevel(level.upper())
    return handler


def log_uncaught() -> None:
    """Log what Python itself would write to stderr, which could block.

    These are warnings, the errors of threads, and those that no caller can catch.
    """
    logging.captureWarnings(True)

    def unraisable(caught: sys.UnraisableHookArgs) -> None:
        _log_error(caught.err_msg or "an error that no caller can catch", caught.exc_value)

    def of_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_type is not SystemExit:
            _log_error("a thread has ended with an error", caught.exc_value)

    sys.unraisablehook = unraisable
    threading.excepthook = of_thread


def _log_error(event: str, error: BaseException | None) -> None:
    LOGGER.error(event, exc_info=error, extra={"facts": {}})


class _Handler(logging.Handler):
    """Handler that passes lines to a `LogWriter`."""

    def __init__(self, formatter: logging.Formatter, file: int) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = LogWriter(file, self._dropped_line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception as error:  # errors of logging itself would be written to stderr
            line = self._line(_record("a log line cannot be written", why=repr(error)))
        self._writer.put(line)

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="backslashreplace") + b"\n"

    def _dropped_line(self, count: int) -> bytes:
        return self._line(_record("log lines were dropped", count=count))


def _record(event: str, **facts: object) -> logging.LogRecord:
    record = LOGGER.makeRecord(LOGGER.name, logging.WARNING, "", 0, event, (), None)
    record.facts = facts
    return record


class _Seldom(logging.Filter):
    """Filter that passes so many lines of an event per period, then counts."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "always", False):
            return True
        key = record.name, str(record.msg)
        since, times = self._seen.get(key, (record.created, 0))
        # A wall clock that is set back must not suppress events for long.
        if not 0 <= record.created - since < _PERIOD:
            if times > _OFTEN:
                record.unsaid = times - _OFTEN
            since, times = record.created, 0
        self._seen[key] = since, times + 1
        return times < _OFTEN


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, facts = _content(record)
        line = f"{moment(record.created)} {record.levelname.lower():<8} {_plain(event)}"
        for name, value in facts.items():
            line += f"  {name}={_quoted(value)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, facts = _content(record)
        entry: dict[str, Any] = {
            "time": moment(record.created),
            "level": record.levelname.lower(),
            "event": event,
            **facts,
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _content(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Return the event and the facts; the text of another library is an event, with its logger."""
    facts: dict[str, object] = {
        name: value for name, value in getattr(record, "facts", {}).items() if value is not None
    }
    if not record.name.startswith("tenure.server"):
        facts["logger"] = record.name
    unsaid = getattr(record, "unsaid", 0)
    if unsaid:
        facts["unsaid"] = unsaid
    return record.getMessage(), facts


def moment(seconds: float) -> str:
    """Format a time in seconds since the epoch."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _plain(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    simple = text.isprintable() and text and not any(each in text for each in " \"'=\\")
    return text if simple else json.dumps(text, ensure_ascii=not text.isprintable())
