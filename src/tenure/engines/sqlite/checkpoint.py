"""Checkpoints of SQLite's write-ahead log, in a separate thread.

By default SQLite runs a checkpoint inside a commit from time to time, and that commit waits for the
disk. Here a thread runs checkpoints concurrently with commits. SQLite can restart the log only when
all of it has been copied to the database. If the log grows long nevertheless, a commit runs the
checkpoint (``wal_autocheckpoint``).

SQLite 3.7.0 to 3.51.2 has a defect, which its documentation calls the WAL-reset bug. A checkpoint
reads the log's length. A commit of another connection then restarts the log, unnoticed by the
checkpoint, which records the old length as copied. A later checkpoint skips that many frames of the
restarted log, and the commits in them are lost.

Rule: a checkpoint runs only inside a read transaction of another connection, which began before it.
This excludes the bug with every version of the library and every other program:

* If the reader reads from the log, no commit can restart the log until the reader ends.
* If the whole log had been copied when the reader began, the reader reads only the database. A
  commit may then restart the log, but no checkpoint can copy anything until the reader ends.

A checkpoint in a commit needs no reader: it runs in the turn, while no other program commits.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable

from tenure.engines.contract import Finding
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import TenureError
from tenure.greenlets import Thread, new_thread

_EVERY = 500
"""Commits of one engine between two checkpoints. Each engine starts counting at a random number, so
that programs with only a few commits also run checkpoints."""

_CORRECTED = {(3, 44): 6, (3, 50): 7}
"""First corrected patch release of the branches before 3.51, if there is one."""


class Checkpointer:
    """Runs the checkpoints of one engine.

    Args:
        address: the store's URL.
        check_in_place: raises if the database was replaced by another file: SQLite finds the log by
            name, and would use it for that file.

    Attributes:
        left: commits until the next checkpoint; `Transaction` counts them.
    """

    def __init__(self, address: SqliteUrl, check_in_place: Callable[[], None]) -> None:
        """Start without a thread; the first checkpoint follows a random number of commits."""
        self._address = address
        self._check_in_place = check_in_place
        self._guard = Guard()
        self.left = random.randrange(1, _EVERY)
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start a checkpoint, unless one is running."""
        if self._thread is None or not self._thread.is_alive():
            self.left = _EVERY
            thread = new_thread(self.checkpoint, "tenure-sqlite-checkpoint")
            # If no thread can be started, the commit is still valid, and the log grows until the
            # next checkpoint is due.
            with contextlib.suppress(RuntimeError, MemoryError):
                thread.start()
                self._thread = thread

    def checkpoint(self) -> None:
        """Run a checkpoint now, in the calling thread."""
        # A checkpoint that fails is repeated the next time. A lasting problem also fails commits,
        # which report it.
        with contextlib.suppress(sqlite3.Error, OSError, TenureError), self._guard:
            self._check_in_place()
            self._copy()
            self._check_in_place()  # which notes what the database contains now

    def _copy(self) -> None:
        with (
            contextlib.closing(schema.connect(self._address)) as reader,
            contextlib.closing(schema.connect(self._address)) as connection,
        ):
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()  # begins the read
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def close(self) -> None:
        """Wait for a running checkpoint to end."""
        if self._thread is not None:
            self._thread.join()


def has_wal_reset_bug(version: tuple[int, int, int]) -> bool:
    """Return whether a release of SQLite has the WAL-reset bug."""
    major, minor, patch = version
    corrected = _CORRECTED.get((major, minor))
    if corrected is not None:
        return patch < corrected
    return (3, 7, 0) <= version < (3, 51, 3)


def examine_library() -> Finding:
    """Describe the library, with a warning if checkpoints of other programs can cause damage."""
    version = sqlite3.sqlite_version
    if not has_wal_reset_bug(sqlite3.sqlite_version_info):
        return Finding("ok", "checkpoints", f"SQLite {version} does not have the WAL-reset bug")
    return Finding(
        "warning",
        "checkpoints",
        f"SQLite {version} has the WAL-reset bug (3.7.0 to 3.51.2). tenure's checkpoints exclude "
        "it. A checkpoint by another program that opens this file, such as a shell or a backup "
        "tool, can still damage the database",
        "let no other program open the file, or upgrade to SQLite 3.51.3, 3.50.7, 3.44.6 or newer",
    )
