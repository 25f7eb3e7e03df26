"""Tenure does not hurt so, on any engine; and each defect, planted, would be seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.corpus.document import DOCUMENT, ROWS, document
from tests.corpus.pains import PAINS, Pain
from tests.corpus.rows import Row
from tests.corpus.subjects import SUBJECTS, run
from tests.engines.stores import Variant


def everywhere() -> Iterator[object]:
    for row in ROWS:
        for subject in SUBJECTS:
            if row.concerns(subject):
                name = f"{row.number}-{row.name}-{subject.name}"
                marks = [*row.marks_on(subject), *subject.marks]
                yield pytest.param(row, subject, id=name, marks=marks)


def once_for_each_engine() -> Iterator[object]:
    for row in ROWS:
        for subject in {subject.engine: subject for subject in reversed(SUBJECTS)}.values():
            own = subject.engine in row.plants or not subject.like
            if row.concerns(subject) and own:
                yield pytest.param(row, subject, id=f"{row.number}-{row.name}-{subject.engine}")


@pytest.mark.parametrize(("row", "subject"), list(everywhere()))
def test_tenure_does_not_hurt_so(row: Row, subject: Variant) -> None:
    run(row.check, row.stores(subject), planted=False)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # what is broken on purpose may complain in any way
@pytest.mark.parametrize(("row", "subject"), list(once_for_each_engine()))
def test_the_defect_would_be_seen(
    row: Row, subject: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = row.plant_for(subject)
    if plant is None:
        pytest.skip(f"nobody has planted {row.number} into {subject.engine} yet")
    plant(monkeypatch)
    with pytest.raises(row.seen_as):
        run(row.check, row.stores(subject), planted=True)


@pytest.mark.parametrize(
    "pain", [each for each in PAINS if each.awaits], ids=lambda pain: f"{pain.number}"
)
def test_it_waits_for_its_engine(pain: Pain) -> None:
    pytest.skip(f"{pain.number} waits for its engine: {pain.awaits}")


def test_each_pain_is_checked_or_waits_for_its_engine() -> None:
    checked = {row.number for row in ROWS}
    assert [pain.number for pain in PAINS] == list(range(1, len(PAINS) + 1))
    assert checked <= {pain.number for pain in PAINS}
    assert not [each for each in PAINS if each.number not in checked and not each.awaits]


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `python -m tests.corpus`"
