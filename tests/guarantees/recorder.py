"""What the marked tests are, and what came of them: a plugin for one run of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from tests.guarantees.vocabulary import DURABLE_SQLITE, PORTABLE_SQLITE, SQLITE, Claim

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]
Shown: TypeAlias = dict[Claim, dict[str, Outcome]]
"""Of every claim the places of the tests that show it, and what came of them."""

_WORST: tuple[Outcome, ...] = ("failed", "skipped", "passed")


class Recorder:
    """Notes what the marked tests show.

    Attributes:
        shown: what was run. Of tests that were only collected it is taken that they pass.
        tests: how many tests that were.
        tests_at: by a test's id for pytest, the places that it counts for.
    """

    def __init__(self) -> None:
        self.shown: Shown = {}
        self.tests = 0
        self.tests_at: dict[str, set[str]] = {}
        self._items: dict[str, pytest.Item] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = len(session.items)
        for item in session.items:
            self._items[item.nodeid] = item
            self._note(item, "passed")
            self.tests_at[item.nodeid] = {place for _, place in _claims(item)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._note(self._items[report.nodeid], report.outcome)

    def _note(self, item: pytest.Item, outcome: Outcome) -> None:
        for claim, place in _claims(item):
            places = self.shown.setdefault(claim, {})
            places[place] = min(places.get(place, outcome), outcome, key=_WORST.index)


def _claims(item: pytest.Item) -> Iterator[tuple[Claim, str]]:
    engine = _chosen_by_url(item)
    for mark in item.iter_markers("guarantee"):
        place = mark.kwargs["place"] or _place(item)
        for claim in mark.kwargs["claims"]:
            if engine in {None, claim.engine}:
                yield claim, place


def _chosen_by_url(item: pytest.Item) -> str | None:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    chosen = parameters.get("url", parameters.get("query"))
    if chosen is None:
        return None
    if "portable=true" in chosen:
        return PORTABLE_SQLITE
    return DURABLE_SQLITE if "durability=full" in chosen else SQLITE


def _place(item: pytest.Item) -> str:
    """path::name, without parameters."""
    path = Path(item.path).relative_to(item.config.rootpath)
    return "::".join([path.as_posix(), *item.nodeid.split("[")[0].split("::")[1:]])
