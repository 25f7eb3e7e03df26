"""Known defects of the SQLite library that this Python uses."""

from __future__ import annotations

import sqlite3

from tenure.engines.contract import Finding

__all__ = ["examine_library", "has_wal_reset_bug"]

_CORRECTED = {(3, 44): 6, (3, 50): 7}
"""First patch release with the correction, of the branches before 3.51 that have one."""


def has_wal_reset_bug(version: tuple[int, int, int]) -> bool:
    """Return whether a release of SQLite has the WAL-reset bug (see `checkpoint`)."""
    major, minor, patch = version
    corrected = _CORRECTED.get((major, minor))
    if corrected is not None:
        return patch < corrected
    return (3, 7, 0) <= version < (3, 51, 3)


def examine_library() -> Finding:
    """Describe the library, with a warning where other programs' checkpoints can do harm."""
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
