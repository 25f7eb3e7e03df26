"""Restoring a store in tests: over the one that is there, and of an earlier version."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tenure.engines.sqlite.restore import Restored, restore


def again(url: str, file: Path, **how: Any) -> Restored:
    """Restore over the store that is there."""
    return restore(url, str(file), force=True, **how)


def change(file: Path, **values: object) -> None:
    """Set columns of what a file says of itself."""
    with closing(sqlite3.connect(file)) as shell:
        for column, value in values.items():
            shell.execute(f"UPDATE meta SET {column} = ?", (value,))
        shell.commit()


def told(path: Path, column: str) -> Any:
    with closing(sqlite3.connect(path)) as shell:
        return shell.execute(f"SELECT {column} FROM meta").fetchone()[0]


def as_of_version_2(path: Path) -> None:
    with closing(sqlite3.connect(path)) as shell:
        for column in (
            *("identity", "longest_window", "quarantine"),
            *("quarantined_until", "saved_at"),
        ):
            shell.execute(f"ALTER TABLE meta DROP COLUMN {column}")
        shell.execute("DROP TABLE rates")
        shell.execute("PRAGMA user_version = 2")
