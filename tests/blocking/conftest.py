"""Stores for the blocking API, which each test gets for itself."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure import blocking

_numbers = itertools.count(1)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that nobody else uses."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'blocking.db'}"
    return f"memory://blocking-{next(_numbers)}"


@pytest.fixture
def client(url: str) -> Iterator[blocking.Client]:
    with blocking.connect(url) as client:
        yield client


@pytest.fixture
def eye(url: str) -> Iterator[blocking.Client]:
    """Another program's client of the same store."""
    with blocking.connect(url) as eye:
        yield eye


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test closes its clients, and with the last of them the thread is gone."""
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "tenure-blocking" not in names
    assert not [name for name in names if name.startswith("test-")]
