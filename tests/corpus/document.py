"""Text of docs/evidence/pains.md, made from the corpus. `python -m tests.corpus` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.corpus import afar, asking, lines, losing, outside, postgresql, queueing
from tests.corpus.pains import PAINS, Pain
from tests.corpus.rows import ROWS, Row
from tests.corpus.subjects import SUBJECTS

__all__ = ["DOCUMENT", "ROWS", "document"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "pains.md"

THEMES = (losing, asking, queueing, outside, afar, lines, postgresql)
"""The modules whose import fills `ROWS`."""

ROWS.sort(key=lambda row: row.number)

_BEGINNING = """\
# Defects of other locks

<!-- `python -m tests.corpus` writes this file, and a test fails when it is out of date. -->

Each row is a defect of a released project: the numbers are those of its issue tracker, and the
other defects were found by running it. Tenure has a test for each, on every engine that the row
concerns. The test is known to detect the defect: with the defect planted into tenure, an assertion
of the test must fail. The engines are `memory`, `sqlite`, `sqlite` with `durability=full`, `sqlite`
with `portable=true`, `redis`, `postgresql`, `etcd`, and the server with `memory` behind it: as
`tenure` over its native protocol, as `ydb` over YDB's, as `dflockd` over dflockd's, where a check
sees the queues in the store behind the server.
`make test ARGS='-k corpus'` runs all of them, `ARGS='-k NAME'` a single one.

| # | the defect | found in | tenure's answer | our test |
|---|---|---|---|---|
"""


def document() -> str:
    """What the file should say."""
    return _BEGINNING + "".join(_line(pain) for pain in PAINS)


def _line(pain: Pain) -> str:
    tests = [f"`{row.place}`{_where(row)}" for row in ROWS if row.number == pain.number]
    if pain.awaits:
        tests.append(f"*needs an engine that does not exist yet:* {pain.awaits}")
    cells = (str(pain.number), pain.what, pain.others, pain.answer, "; ".join(tests))
    return f"| {' | '.join(cells)} |\n"


def _where(row: Row) -> str:
    if not (row.not_on or row.on):
        return ""
    return f" ({', '.join(subject.name for subject in SUBJECTS if row.concerns(subject))} alone)"
