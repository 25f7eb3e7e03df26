"""The table of guarantees, which `python -m tests.guarantees` makes from a run of marked tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.guarantees.recorder import Shown
from tests.guarantees.vocabulary import (
    CONCERNS,
    ENGINES,
    FAULTS,
    INAPPLICABLE,
    PROMISES,
    Claim,
    Engine,
    Fault,
    Promise,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "guarantee-table.md"

RUN = "Last run: "
"""How the one line begins that depends on when and where the tests were run."""

_BEGINNING = """\
# Guarantees under each fault

<!-- `python -m tests.guarantees` writes this file, by running the tests that it names. -->

These tables show for each engine which guarantees hold under which fault. No cell is written by
hand: it counts the tests that show the guarantee. They are named below the tables, and passed when
this page was written. [Guarantees](../explanation/guarantees.md) says why they hold.

| cell | meaning |
|---|---|
| **yes** 3 | 3 tests show that it holds |
| **no** 1 | a test shows that it does *not* hold, as the documents say |
| FAILED, skipped | it should hold, and a test of it failed, or could not be run here |
| ? | not shown: it may hold, but no test shows it |
| · | does not apply to this engine; the reason is below the table |
| (blank) | the fault cannot affect it |

"""


def table(shown: Shown, run: str) -> str:
    """The whole document.

    Args:
        run: when and where the tests were run.
    """
    parts = [_BEGINNING, *_legend(), f"\n{RUN}{run}\n"]
    for engine, title in ENGINES.items():
        parts += _of_engine(engine, title, shown)
    return "".join([*parts, "\n## The tests\n", *_tests(shown)])


def _legend() -> Iterator[str]:
    yield "| column | guarantee |\n|---|---|\n"
    for promise, meaning in PROMISES.items():
        yield f"| {promise} | {meaning} |\n"


def _of_engine(engine: Engine, title: str, shown: Shown) -> Iterator[str]:
    yield f"\n## {title}\n\n| fault | {' | '.join(PROMISES)} |\n|---|{'---|' * len(PROMISES)}\n"
    for fault, meaning in FAULTS.items():
        cells = [_cell(engine, fault, promise, shown) for promise in PROMISES]
        yield f"| {meaning} | {' | '.join(cells)} |\n"
    reasons: dict[str, list[str]] = {}
    for (concerned, fault), reason in INAPPLICABLE.items():
        if concerned == engine:
            reasons.setdefault(reason, []).append(FAULTS[fault])
    for reason, faults in reasons.items():
        yield f"\nDoes not apply ({'; '.join(faults)}): {reason}.\n"


def _cell(engine: Engine, fault: Fault, promise: Promise, shown: Shown) -> str:
    if promise not in CONCERNS[fault]:
        return ""
    if (engine, fault) in INAPPLICABLE:
        return "·"
    for holds, word in ((False, "**no**"), (True, "**yes**")):
        places = shown.get(Claim(engine, fault, promise, holds), {})
        outcomes = set(places.values())
        if "failed" in outcomes:
            return "FAILED"
        if outcomes == {"skipped"}:
            return "skipped"
        if places:
            return f"{word} {len(places)}"
    return "?"


def tables(lines: list[str]) -> str:
    """The part of the document that has the tables of the engines, of its lines."""
    return "\n".join(lines).partition(RUN)[2].partition("\n## The tests\n")[0]


def lines_by_place(shown: Shown) -> Iterator[tuple[str, str]]:
    """Which test each line of the list of tests is about."""
    for line in "".join(_tests(shown)).splitlines():
        if line.startswith("- `"):
            yield line.split("`")[1], line


def _tests(shown: Shown) -> Iterator[str]:
    for fault, meaning in FAULTS.items():
        places: dict[str, dict[str, list[str]]] = {}
        for claim in sorted(shown, key=_in_order):
            if claim.fault == fault:
                for place in shown[claim]:
                    engines = places.setdefault(place, {}).setdefault(_what(claim), [])
                    engines.append(claim.engine)
        if places:
            yield f"\n**{meaning}**\n\n"
        for place, what in sorted(places.items()):
            holds = "; ".join(f"{each} ({', '.join(on)})" for each, on in what.items())
            yield f"- `{place}`: {holds}\n"


def _what(claim: Claim) -> str:
    return claim.promise if claim.holds else f"not: {claim.promise}"


def _in_order(claim: Claim) -> tuple[int, int]:
    return list(PROMISES).index(claim.promise), list(ENGINES).index(claim.engine)
