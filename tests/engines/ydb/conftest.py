"""Fixtures of the tests of this engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.ydb.behind import Server, in_memory


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a server whose store is in memory."""
    with in_memory() as store:
        server = Server(store)
        server.start()
        yield server
        server.stop()
