"""Moving what commits leave in SQLite's log into the database, beside the event loop.

By itself SQLite does that in some commit, every now and then, and waits for the disk in it. Here a
thread does it, while others go on committing. Only should the log have grown long all the same (it
can be begun anew only at a moment when all of it has been moved), a commit does the rest.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading

from tenure.engines.sqlite import schema
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.url import Address
from tenure.errors import TenureError

__all__ = ["Checkpointer"]

_EVERY = 500
"""Commits of one engine. Where each begins to count is left to chance, so that many programs that
commit only a few times each take their share."""


class Checkpointer:
    """Sees to the log on behalf of one engine."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._guard = Guard()
        self._left = random.randrange(1, _EVERY)
        self._thread: threading.Thread | None = None

    def count(self) -> None:
        """There was a commit."""
        self._left -= 1
        if self._left <= 0 and (self._thread is None or not self._thread.is_alive()):
            self._left = _EVERY
            self._thread = threading.Thread(
                target=self._move, name="tenure-sqlite-checkpoint", daemon=True
            )
            self._thread.start()

    def _move(self) -> None:
        # Whatever fails here is tried again the next time, and told by a commit.
        with contextlib.suppress(sqlite3.Error, TenureError), self._guard:
            connection = schema.connect(self._address)
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                connection.close()

    def close(self) -> None:
        """Wait until it is done."""
        if self._thread is not None:
            self._thread.join()
