"""Random histories on two engines: whatever is asked, both answer alike."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from tenure.testing.random_histories import histories
from tests.engines.stores import MEMORY, MEMORY_IN_REAL_TIME, VARIANTS, Histories, Variant
from tests.guarantees import guarantee

MORE = int(os.environ.get("HISTORIES", "1"))
"""How many times as many histories as usual; to let a machine search overnight."""

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
IN_REAL_TIME = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking would take an hour


def _compared(variant: Variant, how: Histories) -> Any:
    reference = MEMORY if how.quick else MEMORY_IN_REAL_TIME
    case: Any = histories(
        reference, how.make() if how.make is not None else variant.stores
    ).TestCase
    case.settings = settings(
        max_examples=how.number * MORE,
        stateful_step_count=40 if how.quick else 30,
        deadline=None,
        phases=tuple(Phase) if how.quick else IN_REAL_TIME,
        suppress_health_check=SLOW,
    )
    case.pytestmark = [*variant.marks]
    if variant.title and variant.engine != "memory":
        case.pytestmark += [guarantee("none", "one owner", "in order", on=variant.name)]
    return case


for _each in VARIANTS:
    if _each.histories is not None:
        globals()[f"TestMemoryAnd{_each.label}"] = _compared(_each, _each.histories)
