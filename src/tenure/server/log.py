"""Log of the server: one line for each event, as text or JSON.

An event is a few fixed words, and *facts*: names with values. ``log_event(log, level, "listening",
address=...)`` writes

    2026-11-22T10:00:00.123Z info     listening  address=tenure://127.0.0.1:7070

or, as JSON, an object on one line with ``time``, ``level``, ``event`` and the facts. Text from
clients is quoted and escaped, so that no client can forge a line. Events that clients can cause in
any number are logged a few times and then counted (``unsaid``). Facts never contain secrets.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, Literal, TypeAlias

from tenure.server.log_writer import LogWriter

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
