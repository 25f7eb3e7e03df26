"""The semaphore of ``effect-distributed-lock`` (Effect, TypeScript), on the same keys of Redis.

`DistributedSemaphore` grants all requested permits or none; `RedisBacking` stores them like the
original, and `ClientBacking` on any of tenure's engines. There is no queue: the first waiter to
retry after a release gets the permits.
"""

from __future__ import annotations

from tenure.interop.effect.client import ClientBacking, RedisBacking
from tenure.interop.effect.permits import (
    Backing,
    BackingError,
    LockLost,
    LosingBacking,
    Permits,
    PushBacking,
)
from tenure.interop.effect.semaphore import (
    DistributedSemaphore,
    LockNotAcquired,
    Retry,
    recurs,
    spaced,
)

__all__ = [
    "Backing",
    "BackingError",
    "ClientBacking",
    "DistributedSemaphore",
    "LockLost",
    "LockNotAcquired",
    "LosingBacking",
    "Permits",
    "PushBacking",
    "RedisBacking",
    "Retry",
    "recurs",
    "spaced",
]
