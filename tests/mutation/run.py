"""Runs mutmut on a group of modules, in a copy of the repository.

mutmut reads its settings from the pyproject.toml of the folder where it runs, and leaves its
mutants there. So each group has a folder of its own, with a copy of the sources and the tests;
what mutmut found out there is used again until one of the copied files is another.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.mutation.groups import ROOT, Group
from tests.mutation.mutants import Mutant, look_up
from tests.mutation.results import KILLED, SURVIVED, TIMED_OUT, UNTESTED, Module, merge, modules

SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "--timeout=15"]
timeout_multiplier = 4
timeout_constant = 20
track_dependencies = false
"""
"""A test that hangs fails after 15 seconds; what keeps even that from happening is killed after
four times what the tests usually take, and 80 seconds."""

_VERDICTS = {0: SURVIVED, 5: UNTESTED, 33: UNTESTED} | dict.fromkeys(
    [-24, -9, 24, 36, 152, 255], TIMED_OUT
)
"""What mutmut's exit codes mean. Any other is that of a failure, or of tests that a mutant has
taken down with it."""

_NONE = "no-such-mutant"


def run(group: Group, *, sample: int | None, seed: int, workers: int) -> None:
    """Judge the mutants of a group, `sample` of each module, and keep what came of it."""
    _prepare(group, workers)
    chosen = dict(_chosen(group, sample, seed))
    names = [name for of_one in chosen.values() for name in of_one]
    if not names:
        raise SystemExit(f"mutmut has made no mutants of {group.name}: see what it said above")
    _mutmut(group, names, workers)
    merge(_judged(group, chosen, None if sample is None else seed))


def run_survivors(group: Group, *, workers: int) -> None:
    """Judge those again that survived the last run, which new tests may kill."""
    _prepare(group, workers)
    tried = {
        module: [name for name, code in codes.items() if code is not None]
        for module, codes in _verdicts(group)
    }
    if not any(tried.values()):
        raise SystemExit(f"nothing of {group.name} is judged, or what judges has changed: run it")
    lived = [
        name
        for _, codes in _verdicts(group)
        for name, code in codes.items()
        if code is not None and _VERDICTS.get(code) in {SURVIVED, UNTESTED}
    ]
    seeds = {module.name: module.seed for module in modules()}
    if lived:
        _mutmut(group, lived, workers)
    for judged in _judged(group, tried, None):
        merge([replace(judged, seed=seeds.get(judged.name))])


def _prepare(group: Group, workers: int) -> None:
    """Make the mutants and find the tests of each; what is there already stays."""
    _copy(group)
    _mutmut(group, [_NONE], workers)  # which it looks for after that, and does not find


def _copy(group: Group) -> None:
    """Copy what is needed, without touching what is the same there already."""
    folder = group.folder
    (folder / "mutants" / "src").mkdir(parents=True, exist_ok=True)
    for part in ("src", "tests"):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(folder / "mutants" / "tests", ignore_errors=True)
    without = ["-k", f"not {group.without}"] if group.without else []
    settings = SETTINGS.format(
        modules=json.dumps([f"src/tenure/{each}" for each in group.modules]),
        tests=json.dumps([*group.tests, *without]),
    )
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)


def _mutmut(group: Group, names: Iterable[str], workers: int) -> None:
    environment = os.environ | {
        "CI": "1",  # Hypothesis tries the same examples for every mutant
        "PYTHONPATH": str(group.folder / "mutants" / "src"),
    }
    program = Path(sys.executable).with_name("mutmut")
    subprocess.run(
        [program, "run", "--max-children", str(workers), *names],
        cwd=group.folder,
        env=environment,
        check=False,  # what it leaves behind says how far it came
    )


def _verdicts(group: Group) -> Iterator[tuple[str, dict[str, int | None]]]:
    """(module, mutmut's exit code for each of its mutants), as they are by now."""
    mutants = group.folder / "mutants"
    for meta in sorted((mutants / "src").rglob("*.py.meta")):
        module = str(meta.relative_to(mutants / "src").with_suffix(""))
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        if codes:
            yield module, codes


def _chosen(group: Group, sample: int | None, seed: int) -> Iterator[tuple[str, list[str]]]:
    for module, codes in _verdicts(group):
        names = sorted(codes)
        if sample is not None and sample < len(names):
            names = sorted(random.Random(f"{seed} {module}").sample(names, sample))
        yield module, names


def _judged(group: Group, chosen: dict[str, list[str]], seed: int | None) -> Iterator[Module]:
    for module, codes in _verdicts(group):
        verdicts = {
            name: _VERDICTS.get(code, KILLED)
            for name in chosen[module]
            if (code := codes[name]) is not None
        }
        lived = [name for name, what in verdicts.items() if what in {SURVIVED, UNTESTED}]
        mutants: list[Mutant] = look_up(group.folder / "mutants" / "src" / module, module, lived)
        yield Module(
            module,
            all=len(codes),
            tried=len(verdicts),
            killed=sum(what == KILLED for what in verdicts.values()),
            timed_out=sum(what == TIMED_OUT for what in verdicts.values()),
            seed=seed,
            survivors=mutants,
        )
