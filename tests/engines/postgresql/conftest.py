"""Fixtures of the tests of this engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.postgresql.servers import PostgresServer, a_server


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """Run a server of the test's own, which writes every commit to the disk."""
    with a_server() as running:
        yield running
