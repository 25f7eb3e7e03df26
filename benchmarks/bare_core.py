"""The core alone: no clock, no lock, no asyncio; and what a long queue does to it."""

from __future__ import annotations

import time

from tenure.core.store import Store
from tenure.model import EPHEMERAL_LIMIT

PAIRS = 50_000


def pairs_per_second() -> float:
    """Uncontended acquire and release of one mutex."""
    store = Store()
    session = store.attach("/default", "", 30.0, "process", b"", 0.0)
    start = time.perf_counter()
    for number in range(1, PAIRS + 1):
        store.enqueue(session, number, "bench", EPHEMERAL_LIMIT, b"", None, True, 0.0, number)
        store.withdraw(session, number, 0.0)
    return PAIRS / (time.perf_counter() - start)
