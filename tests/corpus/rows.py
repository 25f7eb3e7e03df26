"""How a check joins the corpus: `row`, beside the check, with the defect that it must see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

import tenure
from tenure.testing.conformance import Stores
from tests.corpus.subjects import SUBJECTS, Check
from tests.engines.stores import Variant
from tests.guarantees.vocabulary import INAPPLICABLE, Fault, Promise, guarantee

IN_THE_CHECK = (AssertionError, TimeoutError, pytest.fail.Exception, tenure.AcquireTimeout)
"""What an assertion, a wait, or ``pytest.raises`` raises."""

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Row:
    """One check of one pain.

    Attributes:
        number: of the pain.
        check: passes on a sound tenure.
        plants: puts the defect in, by engine; ``""`` is one that is the same for every engine.
        not_on: engines for which the check makes no sense, and why.
        on: the only engines for which it does; all of them when empty.
        real_time: it needs a clock that nobody moves.
        shows: the fault and the promises that a row of the guarantee table may take from it.
        seen_as: what the check fails with when the defect is planted. What is asserted or waited
            for in the check itself, usually: anything else, and the plant is broken, or hits
            something that has nothing to do with the pain.
    """

    number: int
    check: Check
    plants: Mapping[str, Plant]
    not_on: Mapping[str, str] = field(default_factory=dict)
    real_time: bool = False
    seen_as: tuple[type[BaseException], ...] = ()
    shows: tuple[Fault, tuple[Promise, ...]] | None = None
    on: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def place(self) -> str:
        """Where the check is: path::name."""
        return f"{self.check.__module__.replace('.', '/')}.py::{self.name}"

    def concerns(self, subject: Variant) -> bool:
        """Whether it is checked there."""
        return subject.engine not in self.not_on and subject.engine in (self.on or [subject.engine])

    def plant_for(self, subject: Variant) -> Plant | None:
        """The defect there; ``None`` when nobody has made one for that engine yet."""
        for where in (subject.engine, subject.behind, ""):
            if where in self.plants:
                return self.plants[where]
        return None

    def marks_on(self, subject: Variant) -> list[pytest.MarkDecorator]:
        """What it shows there."""
        if self.shows is None or (subject.name, self.shows[0]) in INAPPLICABLE:
            return []
        fault, promises = self.shows
        return [guarantee(fault, *promises, on=subject.name, place=self.place)]

    def stores(self, subject: Variant) -> Stores:
        """Where it is checked."""
        return subject.slow_stores if self.real_time else subject.stores


ROWS: list[Row] = []


def row(
    number: int,
    plant: Plant | Mapping[str, Plant],
    *,
    not_on: Mapping[str, str] | None = None,
    real_time: bool = False,
    seen_as: tuple[type[BaseException], ...] = IN_THE_CHECK,
    shows: tuple[Fault, tuple[Promise, ...]] | None = None,
    on: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Add a check to the corpus."""
    plants = plant if isinstance(plant, Mapping) else {"": plant}
    assert {*plants, *(not_on or ()), *on} <= {"", *(subject.engine for subject in SUBJECTS)}

    def note(check: Check) -> Check:
        ROWS.append(Row(number, check, plants, not_on or {}, real_time, seen_as, shows, on))
        return check

    return note


def replacing(owner: object, name: str, by: Any) -> Plant:
    """Plant something in the place of a function."""
    return lambda patch: patch.setattr(owner, name, by)


def together(*plants: Plant) -> Plant:
    """Several of these."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(patch)

    return plant


def does_nothing(*_: Any, **__: Any) -> None:
    """What a forgotten function does."""
