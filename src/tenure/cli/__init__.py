"""The command line: `tenure`, also `python -m tenure`.

It needs the extra ``tenure[cli]`` (click and rich). Each command is loaded when it is used.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

__all__ = ["main"]

NEEDS = ("click", "rich")


def main() -> int:
    """Run the command line; returns the exit code."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"tenure: the command line needs {' and '.join(missing)}; "
            "install it with: pip install 'tenure[cli]'\n"
        )
        return 78  # Status.USAGE

    completing = os.environ.get("_TENURE_COMPLETE")
    if completing:
        from tenure.cli.app import tenure
        from tenure.cli.completion import answer

        return answer(tenure, completing)

    from tenure.cli.app import invoke

    return invoke(sys.argv[1:])
