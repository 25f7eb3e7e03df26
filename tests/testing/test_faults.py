"""The engine over a bad network is an engine: whatever the network does, the contract holds."""

from __future__ import annotations

from random import Random

import pytest

from tenure.clock import Clock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.testing.conformance import Stores, conformance_tests
from tenure.testing.faults import FaultyEngine, Way
from tests.engines.stores import MEMORY, MEMORY_IN_REAL_TIME


def near(url: str, clock: Clock) -> Engine:
    return FaultyEngine(connect_engine(url, clock), Way(repeats=lambda: True))


def far(url: str, clock: Clock) -> Engine:
    random = Random(0)
    return FaultyEngine(
        connect_engine(url, clock),
        Way(lambda: random.uniform(0.0, 0.003), lambda: random.random() < 0.5),
    )


def lagging(url: str, clock: Clock) -> Engine:
    return FaultyEngine(connect_engine(url, clock), Way(lag=lambda: 0.02))


# In virtual time nothing may take a while: it is checked what happens at the very moment.
TestNear = conformance_tests(Stores(MEMORY.empty, near, virtual=True))
TestLagging = conformance_tests(Stores(MEMORY_IN_REAL_TIME.empty, lagging))
TestFar = conformance_tests(Stores(MEMORY_IN_REAL_TIME.empty, far))
pytest.mark.exhaustive(TestLagging)
pytest.mark.exhaustive(TestFar)
