"""Random histories on `memory://`, and on `ydb://` through tenure's server: both answer alike."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tenure.testing.random_histories import histories
from tests.engines.stores import MEMORY_IN_REAL_TIME
from tests.engines.ydb.behind import in_a_file, in_memory, stores_of

MORE = int(os.environ.get("HISTORIES", "1"))
"""How many times as many histories as usual."""

FEW = settings(
    max_examples=6 * MORE,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # in real time, shrinking takes an hour
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)

MANY_SIBLINGS = "?siblings=1000"

TestInMemory = histories(MEMORY_IN_REAL_TIME, stores_of(in_memory, MANY_SIBLINGS)).TestCase
TestInMemory.settings = FEW

TestInAFile = histories(MEMORY_IN_REAL_TIME, stores_of(in_a_file, MANY_SIBLINGS)).TestCase
TestInAFile.settings = FEW
