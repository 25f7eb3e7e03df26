"""How a run went: for people as a page of text, for scripts as JSON.

A run has *passed* when nothing was violated, every process did as it was told, and there was
enough going on for that to mean something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.figures import ENOUGH, Figures, Spread, measure
from tenure.testing.history import History, Truth, Violation, check, load

_SLACK = 1.0
"""Seconds that a busy machine may take to let a process run that has something to learn."""

_SHOWN = 5
"""How many violations are told at length."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a run.

    Attributes:
        folder: where its histories are.
        engine, seed: as they were asked for.
        figures: what was measured.
        violations: what the checker found.
        failures: of processes, and of the store to settle.
        not_done: the faults that could not be inflicted at all, and why.
    """

    folder: Path
    engine: str
    seed: int
    figures: Figures
    violations: Sequence[Violation]
    failures: Sequence[str]
    not_done: Mapping[str, str]

    @property
    def enough(self) -> bool:
        """Whether there were as many acquisitions as a run must have to count."""
        return self.figures.rate >= ENOUGH

    @property
    def passed(self) -> bool:
        """Whether the run counts and found nothing."""
        return self.enough and not self.violations and not self.failures

    def to_json(self) -> str:
        """For scripts."""
        figures = self.figures
        return json.dumps(
            {
                "passed": self.passed,
                "enough": self.enough,
                "engine": self.engine,
                "seed": self.seed,
                "folder": str(self.folder),
                **asdict(figures),
                "operations": figures.operations,
                "acquisitions_per_second": figures.rate,
                "violations": [str(each) for each in self.violations],
                "failures": list(self.failures),
                "not_done": dict(self.not_done),
            },
            indent=1,
        )

    def to_text(self) -> str:
        """For people."""
        return "\n".join([*self._table(), "", *self._troubles(), self._verdict()])

    def _table(self) -> list[str]:
        figures = self.figures
        gap = figures.unavailable
        rows = [
            ("engine, seed", f"{self.engine}, {self.seed}"),
            ("duration", f"{figures.duration:.0f} s, {figures.processes} processes in all"),
            ("operations", _operations(figures)),
            ("acquisitions", f"{figures.acquisitions}, {figures.rate:.0f} a second"),
            ("faults", f"{sum(figures.faults.values())}: {_counts(figures.faults)}"),
        ]
        if figures.missed:
            rows.append(("no occasion for", _counts(figures.missed)))
        rows += [("not done", f"{what}: {why}") for what, why in self.not_done.items()]
        rows += [
            ("violations", str(len(self.violations))),
            (
                "longest unavailability",
                "none"
                if gap is None
                else f"{gap.seconds:.2f} s: {gap.name!r}, from {gap.since:.1f} s on, during "
                f"{', '.join(gap.during) or 'no fault'}",
            ),
            ("losses", str(figures.losses)),
            ("time to notice a loss", _spread(figures.noticed)),
            ("time to take over from a killed holder", _spread(figures.taken_over)),
            ("time to take over from a stopped holder", _spread(figures.from_stopped)),
            ("time to end a deadlock", _spread(figures.deadlocks)),
            ("histories", str(self.folder)),
        ]
        width = max(len(what) for what, _ in rows)
        return [f"{what:<{width}}  {value}" for what, value in rows]

    def _troubles(self) -> list[str]:
        lines = list(self.failures)
        for violation in self.violations[:_SHOWN]:
            lines += [str(violation), ""]
        if len(self.violations) > _SHOWN:
            lines.append(f"... and {len(self.violations) - _SHOWN} more violations")
        return lines

    def _verdict(self) -> str:
        if self.violations:
            return "FAILED: promises were broken; the timelines above say which"
        if self.failures:
            return "FAILED: processes did not do what they should"
        if not self.enough:
            return (
                f"DOES NOT COUNT: {self.figures.rate:.0f} acquisitions a second are too few to "
                f"mean anything; it takes {ENOUGH:.0f}"
            )
        return "passed"


def examine(folder: Path) -> Report:
    """Check the histories in a run's folder, and measure.

    Raises:
        FileNotFoundError: it is no folder of a run that came to its end.
    """
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    history = load(sorted(folder.glob("*.history")), slack=_SLACK)
    faults = [(each["name"], each["begun"], each["ended"], each["done"]) for each in run["faults"]]
    failures = list(run["failures"])
    if not run["settled"]:
        failures.append("the store did not settle after the faults were healed: no truth was told")
    figures = measure(history, run["begun"], run["ended"], faults)
    failures += figures.too_late
    return Report(
        folder=folder,
        engine=run["engine"],
        seed=run["seed"],
        figures=figures,
        violations=check(_until_the_truth(history)),
        failures=failures,
        not_done=run["not_done"],
    )


def _until_the_truth(history: History) -> History:
    """Without what the processes did after that, to end."""
    truths = [record.at for record in history.records if isinstance(record, Truth)]
    if not truths:
        return history
    kept = [record for record in history.records if record.at <= truths[-1]]
    return History(kept, history.skew, history.slack)


def _operations(figures: Figures) -> str:
    return (
        f"{figures.operations}: {figures.requests} requests, {figures.takes} takes of rates, "
        f"{figures.calls} calls on data, {figures.observations} observations"
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "nothing to measure"
    p50, p99, most = (1e3 * each for each in (spread.p50, spread.p99, spread.greatest))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms (of {spread.number})"
