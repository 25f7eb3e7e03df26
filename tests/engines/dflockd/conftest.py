"""What the tests of this engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.dflockd.servers import InThread, Server, early_server


@pytest.fixture
def ours() -> Iterator[InThread]:
    """Tenure's own server."""
    with InThread() as server:
        yield server


@pytest.fixture(params=["tenure", "dflockd 0.5.0"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Each server that can be had."""
    if request.param == "tenure":
        with InThread() as ours:
            yield ours
    else:
        with early_server() as early:
            yield early
