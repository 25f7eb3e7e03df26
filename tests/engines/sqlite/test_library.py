"""Known defects of the SQLite library."""

from __future__ import annotations

import sqlite3

import pytest

from tenure.engines.sqlite.checkpoint import examine_library, has_wal_reset_bug


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
        ((4, 0, 0), False),
    ],
)
def test_the_releases_with_the_wal_reset_bug_are_known(
    version: tuple[int, int, int], affected: bool
) -> None:
    assert has_wal_reset_bug(version) is affected


@pytest.mark.parametrize(("version", "level"), [((3, 46, 1), "warning"), ((3, 51, 3), "ok")])
def test_a_doctor_warns_of_a_release_with_the_bug(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], level: str
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    monkeypatch.setattr(sqlite3, "sqlite_version", ".".join(map(str, version)))
    finding = examine_library()
    assert finding.level == level
    assert finding.found.startswith(f"SQLite {sqlite3.sqlite_version} ")
    if level == "warning":
        assert "WAL-reset bug" in finding.found
        assert "another program" in finding.found
        assert "3.51.3" in finding.remedy
