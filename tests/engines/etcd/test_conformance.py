"""`etcd://` keeps the contract, on one member; random histories, compared with the reference."""

from __future__ import annotations

from hypothesis import Phase, settings

from tenure.testing.random_histories import histories
from tests.engines.stores import ETCD, MEMORY_IN_REAL_TIME
from tests.engines.test_random_histories import MORE, SLOW
from tests.guarantees import guarantee
from tests.guarantees.conformance import conformance_of

TestEtcd = conformance_of("etcd", ETCD)

TestMemoryAndEtcd = histories(MEMORY_IN_REAL_TIME, ETCD).TestCase
TestMemoryAndEtcd.settings = settings(
    max_examples=10 * MORE,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # in real time, shrinking takes an hour
    suppress_health_check=SLOW,
)
TestMemoryAndEtcd.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on="etcd")
]
