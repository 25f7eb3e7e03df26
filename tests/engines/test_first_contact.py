"""First contact: processes that connect to a new store at the same moment all get it.

None of them is refused, a lock excludes between all of them, and its tokens rise.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.first_contact import PATIENCE, Meetings, meetings
from tests.engines.stores import VARIANTS, Variant

_MOST = 16
_SHARED = [
    pytest.param(each, id=each.name, marks=each.marks)
    for each in VARIANTS
    if each.engine != "memory"
]


@pytest.fixture(scope="module")
def few() -> Iterator[Meetings]:
    with meetings(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def many() -> Iterator[Meetings]:
    with meetings(_MOST) as processes:
        yield processes


@pytest.mark.parametrize("variant", _SHARED)
def test_processes_that_meet_at_a_new_store_share_it(variant: Variant, few: Meetings) -> None:
    for _ in range(3):
        with variant.slow_stores.empty() as url:
            few.meet([url] * 4)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)  # behind a pooler each waiter polls
@pytest.mark.parametrize("variant", _SHARED)
def test_a_thousand_new_stores_refuse_none_of_many_processes(
    variant: Variant, many: Meetings
) -> None:
    for number in range(1000):
        with variant.slow_stores.empty() as store:
            url = store
            if variant.engine == "postgresql":  # beside the suite's attacks, little gets its turn
                url += f"{'&' if '?' in url else '?'}connect_timeout={PATIENCE:g}"
            many.meet([url] * (2 + number % (_MOST - 1)))
