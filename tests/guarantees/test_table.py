"""The guarantee table is of the tests as they are, and says what came of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.guarantees import DURABLE_SQLITE, MEMORY, SQLITE, broken, guarantee
from tests.guarantees.recorder import Shown
from tests.guarantees.table import DOCUMENT, table, tables
from tests.guarantees.vocabulary import Claim


def cell(shown: Shown, engine: str, fault: str) -> list[str]:
    """A line of an engine's table."""
    lines = table(shown, "now").split(f"\n## {engine}\n")[1].splitlines()
    return next(line.split(" | ") for line in lines if line.startswith(f"| {fault}"))


@pytest.mark.exhaustive  # `make check` does it
def test_the_document_names_the_tests_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.guarantees", "--check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=DOCUMENT.parents[2],
    )
    assert done.returncode == 0, f"run `python -m tests.guarantees --new`:\n{done.stderr[-3000:]}"


def test_nothing_that_should_hold_is_known_to_have_failed() -> None:
    assert "FAILED" not in tables(DOCUMENT.read_text().splitlines())


def test_a_cell_tells_what_came_of_its_tests() -> None:
    holds = Claim(SQLITE, "killed", "one owner")
    shown: Shown = {
        holds: {"a": "passed", "b": "passed"},
        Claim(SQLITE, "killed", "in order"): {"a": "passed", "b": "failed"},
        Claim(SQLITE, "killed", "tokens rise"): {"c": "skipped"},
        Claim(SQLITE, "killed", "nothing leaks", holds=False): {"d": "passed"},
    }
    _, one_owner, in_order, tokens, in_time, _, leaks, go_on, _, _ = cell(
        shown, "`sqlite://`", "a holder's"
    )
    assert (one_owner, in_order, tokens) == ("**yes** 2", "FAILED", "skipped")
    assert (leaks, in_time, go_on) == ("**no** 1", "", "?")
    assert cell(shown, "`memory://`", "a holder's")[1] == "·"


def test_a_mark_says_what_can_be_so() -> None:
    mark = guarantee("killed", "one owner", on=(SQLITE, DURABLE_SQLITE)).mark
    assert [each.engine for each in mark.kwargs["claims"]] == [SQLITE, DURABLE_SQLITE]
    assert not broken("killed", "one owner", on=SQLITE).mark.kwargs["claims"][0].holds
    with pytest.raises(AssertionError, match="not at stake"):
        guarantee("killed", "loss reported", on=SQLITE)
    with pytest.raises(AssertionError, match="said not to concern"):
        guarantee("killed", "one owner", on=MEMORY)
    with pytest.raises(AssertionError, match="what holds"):
        guarantee("killed", on=SQLITE)
