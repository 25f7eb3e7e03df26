"""A planted defect: `tenure run` with a guardian that leaves the deadline to `tenure run`.

``deaf_guardian.py tenure ARGUMENTS...`` is the command line with such a guardian. Run with other
arguments this file is that guardian: it is started by its path, and the original is named by an
environment variable.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

_ORIGINAL = "GUARDIAN_TO_BE_DEAFENED"


def main() -> None:
    if sys.argv[1] == "tenure":
        from tenure.cli import main as command_line
        from tenure.cli.run import guarded

        os.environ[_ORIGINAL] = str(guarded.GUARDIAN)
        guarded.GUARDIAN = Path(__file__)
        del sys.argv[1]
        sys.exit(command_line())
    runpy.run_path(os.environ[_ORIGINAL])  # finds the guardian's modules, and does no more
    deadline = importlib.import_module("guard.processes").Deadline
    deadline.at = property(lambda _: float("inf"), deadline.at.fset)
    importlib.import_module("guard.watchdog").main(sys.argv[1:])


if __name__ == "__main__":
    main()
