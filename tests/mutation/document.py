"""Writes the figures and the survivors into docs/evidence/mutation.md, below its mark."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from tests.mutation.groups import HERE, ROOT, groups
from tests.mutation.mutants import Mutant
from tests.mutation.results import Module, modules

DOCUMENT = ROOT / "docs" / "evidence" / "mutation.md"
MARK = re.compile(r"(<!-- from here on it is written .*? -->\n).*", re.DOTALL)


def write() -> int:
    """Write the document; returns 1 when a survivor has no reason yet."""
    DOCUMENT.write_text(rendered())
    without = unexplained()
    for mutant in without:
        sys.stderr.write(f"no reason: {mutant.function}: {mutant.was}  ->  {mutant.made}\n")
    return 1 if without else 0


def rendered() -> str:
    """The document as it should be: what is above the mark as it is, and the rest anew."""
    found = modules()
    text = "\n".join([*_figures(found), "", *_survivors(found), "", *_not_run(found)])
    return MARK.sub(lambda mark: f"{mark[1]}\n{text}\n", DOCUMENT.read_text())


def unexplained() -> list[Mutant]:
    """The survivors for which `survivors.toml` has no reason."""
    return [mutant for each in modules() for mutant in each.survivors if reason(mutant) is None]


def reason(mutant: Mutant) -> str | None:
    """Why that survivor is left alone, if `survivors.toml` says so."""
    for entry in _entries():
        if fnmatchcase(mutant.function, entry["function"]) and fnmatchcase(
            mutant.made, entry["made"]
        ):
            return str(entry["reason"])
    return None


def _entries() -> list[dict[str, str]]:
    table = tomllib.loads((HERE / "survivors.toml").read_text())
    entries: list[dict[str, str]] = table.get("survivor", [])
    return entries


def _figures(found: list[Module]) -> Iterator[str]:
    yield "| module | mutants | tried | killed | of these by the time limit | survived | killed % |"
    yield "| --- | --: | --: | --: | --: | --: | --: |"
    for module in found:
        drawn = f" (seed {module.seed})" if module.seed is not None else ""
        yield _row(
            f"`{module.name}`",
            module.all,
            f"{module.tried}{drawn}",
            module.killed + module.timed_out,
            module.timed_out,
            len(module.survivors),
            _percent(module),
        )
    if found:
        yield _row("all", *_totals(found), _percent(*found))
        yield ""
        yield f"Python {', '.join(sorted({module.python for module in found}))}."


def _totals(found: list[Module]) -> tuple[int, ...]:
    return (
        sum(module.all for module in found),
        sum(module.tried for module in found),
        sum(module.killed + module.timed_out for module in found),
        sum(module.timed_out for module in found),
        sum(len(module.survivors) for module in found),
    )


def _percent(*of: Module) -> str:
    tried = sum(module.tried for module in of)
    killed = sum(module.killed + module.timed_out for module in of)
    return f"{100 * killed / tried:.1f}" if tried else ""


def _survivors(found: list[Module]) -> Iterator[str]:
    yield "## The survivors"
    yield ""
    yield "| function | was | made | why it is left alone |"
    yield "| --- | --- | --- | --- |"
    for module in found:
        for mutant in module.survivors:
            why = reason(mutant) or "**not looked at yet**"
            function = mutant.function.removeprefix("tenure.")
            yield _row(f"`{function}`", _code(mutant.was), _code(mutant.made), why)


def _code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`{text}`" if text else ""


def _not_run(found: list[Module]) -> Iterator[str]:
    yield "## What has not been run"
    yield ""
    names = {module.name for module in found}
    missing = [
        f"`{name}`"
        for group in groups().values()
        for path in group.paths()
        if (name := str(path.relative_to(ROOT / "src"))) not in names and path.name != "__init__.py"
    ]
    part = [f"`{module.name}`" for module in found if module.tried < module.all]
    yield f"Not at all: {', '.join(missing) or 'nothing of the groups'}."
    if part:
        yield f"By a sample only: {', '.join(part)}."


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"
