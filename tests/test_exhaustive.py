"""The tests that `make test` leaves out are the ones that CONTRIBUTING.md lists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"pytest\.mark\.exhaustive\b")


def test_contributing_lists_the_places_of_exhaustive_tests() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    cells = re.findall(r"^\| [^|]+ \| (`tests/[^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    rows = [row for cell in cells for row in re.findall(r"`(tests/[\w/.]+)`", cell)]
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if MARK.search(path.read_text()) and path != Path(__file__)
    }
    listed = [Path(row) for row in rows]
    unlisted = {path for path in marked if not {path, *path.parents} & {*listed}}
    empty = {row for row in listed if not any({path, *path.parents} & {row} for path in marked)}
    assert (unlisted, empty) == (set(), set())
