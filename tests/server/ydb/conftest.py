"""The stores behind the server."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"
