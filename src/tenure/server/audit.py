"""Audit log: administrative actions, rejected logins and changed credentials.

Each record is a JSON object on one line: ``time``, ``event``, ``identity``, ``kind`` (of the
identity), ``source`` (the client's address), and the object of the action. Records go to a separate
file or, without one, to the server's log.

Rules:

* Recording never blocks and never fails: a thread writes the file (`LogWriter`); records that do
  not fit in its queue are dropped and counted.
* An action is recorded when its outcome is known. If the client disconnects before, or the server
  is closed, the outcome is ``unknown``: the store may have carried it out.
* Rejected logins and failed actions, which any client can repeat without end, are recorded a few
  times for each source and then only counted, so that no client can fill the disk.
* A record contains no token and no data of a semaphore.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tenure.errors import InvalidArgument
from tenure.server.auth.identity import Identity
from tenure.server.log import LogWriter, moment

_OFTEN = 20  # recorded failures of one source in a period
_PERIOD = 10.0  # seconds
_SOURCES = 1000  # sources that are counted apart in a period
_LONGEST = 1000  # characters of one value
_OTHERS = "other sources"


class Audit:
    """Audit log of one server.

    Args:
        logger: gets the records if there is no file, and the errors of the file.
        path: the path of the file, which is created with mode 0600 if it is missing.

    Raises:
        InvalidArgument: the file cannot be opened.
    """

    def __init__(self, logger: logging.Logger, path: str | None = None) -> None:
        """Open the file at `path`, or use the log if it is ``None``."""
        self._logger = logger
        self._path = path
        self._file = -1
        self._writer: LogWriter | None = None
        self._counts: dict[tuple[str, Identity | None, str | None], int] = {}
        self._counting_since = time.monotonic()
        if path is not None:
            self._file = _open(path)
            self._writer = LogWriter(self._file, _dropped_line)

    @property
    def dropped(self) -> int:
        """Number of dropped records."""
        return 0 if self._writer is None else self._writer.dropped

    def record(
        self, event: str, identity: Identity | None, source: str | None, /, **facts: object
    ) -> None:
        """Record an event.

        Args:
            event: the name of the event.
            identity: the identity that caused it; ``None`` for the server itself and for an unknown
                client.
            source: the client's address; ``None`` for the server itself.
            facts: the object of the action and its details; ``None`` is omitted.
        """
        entry: dict[str, object] = {
            "identity": None if identity is None else identity.name,
            "kind": None if identity is None else identity.kind,
            "source": source,
            **{name: _short(value) for name, value in facts.items() if value is not None},
        }
        if self._writer is not None:
            self._writer.put(_line(event, entry))
        elif self._logger.isEnabledFor(logging.INFO):
            extra = {"facts": {"action": event, **entry}, "always": True}
            self._logger.info("audit", extra=extra)

    @contextmanager
    def action(
        self, event: str, identity: Identity | None, source: str | None, /, **facts: object
    ) -> Iterator[dict[str, object]]:
        """Record an action of a client with its outcome, at the end of the block.

        The block may add facts. If it sets ``outcome`` to ``None``, because nothing was done,
        nothing is recorded.
        """
        facts["outcome"] = "done"
        try:
            yield facts
        except Exception as error:
            facts.update(outcome="failed", why=str(error))
            raise
        except BaseException:  # cancelled: the store may have carried it out
            facts["outcome"] = "unknown"
            raise
        finally:
            failed = facts["outcome"] == "failed"
            found = facts["outcome"] is not None
            if failed and not self._is_seldom("more actions failed", identity, source):
                found = False
            if found:
                self.record(event, identity, source, **facts)

    def refused_login(self, source: str, why: object, **facts: object) -> None:
        """Record a rejected client."""
        if self._is_seldom("more logins refused", None, source):
            self.record("login refused", None, source, why=str(why), **facts)

    def _is_seldom(self, event: str, identity: Identity | None, source: str | None) -> bool:
        """Return true if a failure is to be recorded individually; else count it for `event`."""
        now = time.monotonic()
        if now - self._counting_since >= _PERIOD:
            self._record_counts()
            self._counting_since = now
        key = event, identity, _host(source)
        if key not in self._counts and len(self._counts) >= _SOURCES:
            key = event, None, _OTHERS
        self._counts[key] = count = self._counts.get(key, 0) + 1
        return count <= _OFTEN

    def _record_counts(self) -> None:
        counts, self._counts = self._counts, {}
        for (event, identity, host), count in counts.items():
            if count > _OFTEN:
                self.record(event, identity, host, count=count - _OFTEN)

    def reopen(self) -> None:
        """Continue in the file of that name, which may have been renamed.

        Raises:
            InvalidArgument: it cannot be opened; the former file is used.
        """
        if self._path is not None:
            file = _open(self._path)
            # The writer's descriptor stays the same, so a concurrent write is not disturbed.
            os.dup2(file, self._file, inheritable=False)
            os.close(file)

    def close(self) -> None:
        """Write the queued records, in bounded time. Safe to call twice."""
        self._record_counts()
        if self._writer is not None and self._writer.close() and self._file >= 0:
            os.close(self._file)
            self._file = -1


def _host(source: str | None) -> str | None:
    """Return a client's address without its port."""
    return source if source is None else source.rpartition(":")[0] or source


def _short(value: object) -> object:
    """Shorten a text that a client may have made long."""
    if isinstance(value, str) and len(value) > _LONGEST:
        return value[:_LONGEST] + "..."
    return value


def _open(path: str) -> int:
    try:
        # Not blocking: a pipe without a reader raises an error instead of blocking.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise InvalidArgument(f"the audit log {path} cannot be opened: {error.strerror}") from None


def _line(event: str, entry: dict[str, Any]) -> bytes:
    record = {"time": moment(time.time()), "event": event, **entry}
    return json.dumps(record, default=str).encode() + b"\n"


def _dropped_line(count: int) -> bytes:
    return _line("records were dropped", {"count": count})
