"""A planted defect: `tenure run` with a guardian that leaves the deadline to `tenure run`.

``deaf_guardian.py tenure ARGUMENTS...`` is the command line with such a guardian. Run with other
arguments this file is that guardian: it is started by its path and finds no modules, so that what
it changes is named by an environment variable.
"""

from __future__ import annotations

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
    module = runpy.run_path(os.environ[_ORIGINAL])
    look = module["Guardian"].look

    def look_at_no_deadline(self: object) -> object:
        self.deadline = float("inf")  # type: ignore[attr-defined]
        return look(self)

    module["Guardian"].look = look_at_no_deadline
    module["main"](sys.argv[1:])


if __name__ == "__main__":
    main()
