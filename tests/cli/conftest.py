"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import Tenure


@pytest.fixture
def tenure(tmp_path: Path) -> Iterator[Tenure]:
    """The command line on a store of its own; what was started is ended with the test."""
    command_line = Tenure(tmp_path)
    yield command_line
    command_line.close()
