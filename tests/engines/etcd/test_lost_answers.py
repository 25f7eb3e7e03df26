"""What was not answered may have been done, or may be done yet; nothing is done twice, or lost."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

from tenure.testing.conformance import BEHAVIOURS, Stores, conformance_tests
from tenure.testing.random_histories import histories
from tests.engines.etcd.losing import losing_answers
from tests.engines.etcd.servers import a_prefix
from tests.engines.stores import MEMORY_IN_REAL_TIME
from tests.engines.test_random_histories import MORE, SLOW

LOSING = Stores(a_prefix, losing_answers)

TestLosingAnswers = conformance_tests(LOSING)

# What happens to requests; random histories ask for the rest.
_ABOUT_THAT = {"queue", "requests"}
for _behaviour in BEHAVIOURS.values():
    if _behaviour.play.__module__.rpartition(".")[2] not in _ABOUT_THAT:
        setattr(TestLosingAnswers, f"test_{_behaviour.name}", None)

TestMemoryAndEtcdLosingAnswers = histories(
    MEMORY_IN_REAL_TIME, LOSING, compare_withdrawals=False
).TestCase
pytest.mark.exhaustive(TestMemoryAndEtcdLosingAnswers)
TestMemoryAndEtcdLosingAnswers.settings = settings(
    max_examples=3 * MORE,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # in real time, shrinking takes an hour
    suppress_health_check=SLOW,
)
