"""What the tests of this engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.redis.servers import Server, a_server


@pytest.fixture
def server() -> Iterator[Server]:
    """One of the test's own, without persistence."""
    with a_server() as running:
        yield running


@pytest.fixture
def durable() -> Iterator[Server]:
    """One that writes everything to disk before it answers."""
    with a_server("--appendonly", "yes", "--appendfsync", "always") as running:
        yield running
