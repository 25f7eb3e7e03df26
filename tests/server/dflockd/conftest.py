"""The stores behind the listener: one that answers at once, and one that answers later."""

from __future__ import annotations

import itertools

import pytest

from tenure.engines.contract import Engine
from tenure.engines.memory import MemoryEngine
from tenure.testing import VirtualClock
from tenure.testing.faults import FaultyEngine, Way

_stores = itertools.count()


@pytest.fixture(params=["at once", "later"])
def engine(request: pytest.FixtureRequest, clock: VirtualClock) -> Engine:
    """A store of its own, not open."""
    inner = MemoryEngine(f"dflockd-{next(_stores)}", clock)
    if request.param == "at once":
        return inner
    return FaultyEngine(inner, Way(delay=lambda: 0.003))
