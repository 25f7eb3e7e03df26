"""Random histories on two engines: whatever is asked, both answer alike."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tenure.testing.random_histories import histories
from tests.engines.stores import DURABLE_SQLITE, MEMORY, SERVED_MEMORY, SERVED_SQLITE, SQLITE
from tests.guarantees import guarantee

MORE = int(os.environ.get("HISTORIES", "1"))
"""How many times as many histories as usual; to let a machine search overnight."""

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

TestMemoryAndItself = histories(MEMORY, MEMORY).TestCase
TestMemoryAndItself.settings = settings(
    max_examples=30 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)

TestMemoryAndSQLite = histories(MEMORY, SQLITE).TestCase
TestMemoryAndSQLite.settings = settings(
    max_examples=60 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)

TestMemoryAndSQLite.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on="sqlite")
]

TestMemoryAndDurableSQLite = histories(MEMORY, DURABLE_SQLITE).TestCase
TestMemoryAndDurableSQLite.settings = settings(
    max_examples=30 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)
TestMemoryAndDurableSQLite.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on="sqlite-full")
]

TestMemoryAndServedMemory = histories(MEMORY, SERVED_MEMORY).TestCase
TestMemoryAndServedMemory.settings = settings(
    max_examples=20 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)

TestMemoryAndServedMemory.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on="tenure")
]

TestMemoryAndServedSQLite = histories(MEMORY, SERVED_SQLITE).TestCase
TestMemoryAndServedSQLite.settings = settings(
    max_examples=20 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)
