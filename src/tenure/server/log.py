"""What the server says: one line an event, for people or for machines.

An event is a few fixed words, and *facts*: names with values. ``tell(log, level, "listening",
address=...)`` writes

    2026-11-22T10:00:00.123Z info     listening  address=tenure://127.0.0.1:7070

or, as JSON, an object on one line with ``time``, ``level``, ``event`` and the facts. What clients
have sent is quoted and escaped, so that no client can forge a line; what they could make the server
say a thousand times a second, it says a few times and then how often (``unsaid``). No secret is
ever a fact.
"""

from __future__ import annotations

import json
import logging
import time
from typing import IO, Any, Literal, TypeAlias

__all__ = ["LOGGER", "LogFormat", "LogLevel", "set_up", "tell"]

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LOGGER = logging.getLogger("tenure.server")
"""The server's; each listener has a child of it."""

_OFTEN = 20
"""Lines of one event that are said in a period."""

_PERIOD = 10.0
"""Seconds after which the counting begins anew."""


def tell(log: logging.Logger, level: int, event: str, /, **facts: object) -> None:
    """Say that something happened.

    Args:
        event: fixed words; what varies is a fact.
        facts: anything; a string is escaped, ``None`` left out.
    """
    if log.isEnabledFor(level):
        log.log(level, event, extra={"facts": facts})


def set_up(form: LogFormat, level: LogLevel, stream: IO[str]) -> logging.Handler:
    """Have everything that is logged in this process written to a stream, in that form.

    Returns:
        the handler, which `logging.Logger.removeHandler` on the root logger takes away.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if form == "json" else _Text())
    handler.addFilter(_Seldom())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("tenure").setLevel(level.upper())
    return handler


class _Seldom(logging.Filter):
    """Lets an event through so many times a period, then counts."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, str(record.msg)
        since, times = self._seen.get(key, (record.created, 0))
        # A wall clock that jumps back must not silence anything for long.
        if not 0 <= record.created - since < _PERIOD:
            if times > _OFTEN:
                record.unsaid = times - _OFTEN
            since, times = record.created, 0
        self._seen[key] = since, times + 1
        return times < _OFTEN


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, facts = _content(record)
        line = f"{_moment(record.created)} {record.levelname.lower():<8} {_plain(event)}"
        for name, value in facts.items():
            line += f"  {name}={_quoted(value)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, facts = _content(record)
        told: dict[str, Any] = {
            "time": _moment(record.created),
            "level": record.levelname.lower(),
            "event": event,
            **facts,
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _content(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The words and the facts; a line of another library is words, and says whose it is."""
    facts: dict[str, object] = {
        name: value for name, value in getattr(record, "facts", {}).items() if value is not None
    }
    if not record.name.startswith("tenure.server"):
        facts["logger"] = record.name
    unsaid = getattr(record, "unsaid", 0)
    if unsaid:
        facts["unsaid"] = unsaid
    return record.getMessage(), facts


def _moment(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _plain(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    simple = text.isprintable() and text and not any(each in text for each in " \"'=\\")
    return text if simple else json.dumps(text, ensure_ascii=not text.isprintable())
