"""The engine keeps the contract; where a second connection hears pushes, too, as a selection shows.

Durable servers, and those with TLS and a password, answer commands no differently; what differs
there is tested in `test_server` and `test_faults`.
"""

from __future__ import annotations

from hypothesis import settings

from tenure.testing.conformance import BEHAVIOURS, Conformance, conformance_tests
from tenure.testing.random_histories import histories
from tests.engines.stores import MEMORY, REDIS, REDIS_RESP2
from tests.engines.test_random_histories import MORE, SLOW
from tests.guarantees import guarantee
from tests.guarantees.conformance import conformance_of

TestRedis = conformance_of("redis", REDIS)

TestRedisWithoutPushesOnTheSameConnection: type[Conformance] = conformance_tests(REDIS_RESP2)

# With two connections only the order of answers and pushes is another one.
_ABOUT_THAT = {"queue", "requests", "timeouts", "watches"}
for _behaviour in BEHAVIOURS.values():
    if _behaviour.play.__module__.rpartition(".")[2] not in _ABOUT_THAT:
        setattr(TestRedisWithoutPushesOnTheSameConnection, f"test_{_behaviour.name}", None)

TestMemoryAndRedis = histories(MEMORY, REDIS).TestCase
TestMemoryAndRedis.settings = settings(
    max_examples=25 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)
TestMemoryAndRedis.pytestmark = [  # type: ignore[attr-defined]  # pytest looks there
    guarantee("none", "one owner", "in order", on="redis")
]

TestMemoryAndRedisOnTwoConnections = histories(MEMORY, REDIS_RESP2).TestCase
TestMemoryAndRedisOnTwoConnections.settings = settings(
    max_examples=10 * MORE, stateful_step_count=40, deadline=None, suppress_health_check=SLOW
)
