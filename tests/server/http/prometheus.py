"""Programs of Prometheus, for tests; without them the tests are skipped."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Where a program of Prometheus is."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: apt-get install prometheus")
    return found
