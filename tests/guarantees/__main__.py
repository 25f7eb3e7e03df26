"""Run the tests of guarantees, and write their results to docs/evidence/guarantee-table.md.

python -m tests.guarantees           run them all, in a few minutes, and write it
python -m tests.guarantees --new     run those that it does not name yet, and add them
python -m tests.guarantees --check   run none: does it name the tests that there are?
"""

from __future__ import annotations

import platform
import sys
import time

import pytest

from tests.guarantees.recorder import Recorder
from tests.guarantees.table import DOCUMENT, RUN, lines_by_place, table, tables

_THEM = ["-q", "-m", "guarantee", "-p", "no:cacheprovider"]


def run_all() -> int:
    """Run all of them; returns pytest's exit code."""
    recorder, began = Recorder(), time.monotonic()
    code = int(pytest.main(_THEM, plugins=[recorder]))
    DOCUMENT.write_text(
        table(
            recorder.shown,
            f"{time.strftime('%Y-%m-%d', time.gmtime())}, {recorder.tests} tests in "
            f"{time.monotonic() - began:.0f} s, Python {platform.python_version()}, "
            f"{platform.system()}.",
        )
    )
    return code


def run_new() -> int:
    """Run what the document does not name as it is; of the rest it is kept that they passed."""
    known = DOCUMENT.read_text().splitlines()
    if "FAILED" in tables(known):
        return run_all()
    there_are = _collected()
    new = {place for place, line in lines_by_place(there_are.shown) if line not in known}
    tests = [test for test, places in there_are.tests_at.items() if places & new]
    ran = Recorder()
    code = int(pytest.main([*_THEM, *tests], plugins=[ran])) if tests else 0
    for claim, places in ran.shown.items():
        there_are.shown[claim].update(places)
    (last_run,) = [line for line in known if line.startswith(RUN)]
    DOCUMENT.write_text(table(there_are.shown, last_run.removeprefix(RUN)))
    return code


def check() -> int:
    """Say on stderr what is out of date; returns 0 if nothing is."""
    new, old = (
        [line for line in text.splitlines() if not line.startswith(RUN)]
        for text in (table(_collected().shown, ""), DOCUMENT.read_text())
    )
    for line in sorted(set(new) ^ set(old)):
        sys.stderr.write(f"{'+' if line in new else '-'} {line}\n")
    return int(new != old)


def _collected() -> Recorder:
    recorder = Recorder()
    if code := int(pytest.main([*_THEM, "-qq", "--collect-only"], plugins=[recorder])):
        sys.exit(code)
    return recorder


if __name__ == "__main__":
    sys.exit({"": run_all, "--new": run_new, "--check": check}[" ".join(sys.argv[1:])]())
