"""Engines of a checkout that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tenure.engines

SOURCES = Path(tenure.engines.__file__).parents[2]


def test_a_checkout_that_is_not_installed_has_all_engines() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCES)!r})\n"
        "import tenure, tenure.engines\n"
        "print(tenure.connect('sqlite:////x/y.db').url, *tenure.engines.schemes())"
    )
    # Without site-packages there is no metadata of an installed tenure.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["sqlite:////x/y.db", *sorted(tenure.engines.BUILT_IN)]
