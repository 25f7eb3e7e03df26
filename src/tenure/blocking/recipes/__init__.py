"""Recipes for threads: those of `tenure.recipes`, made from a blocking session or client."""

from tenure.blocking.recipes.outcome import run_once
from tenure.blocking.recipes.wrappers import (
    Barrier,
    Changes,
    CountDownLatch,
    Counter,
    DoubleBarrier,
    Group,
    InnerLease,
    Party,
    Pool,
    PoolItem,
    ReentrantMutex,
    RWLock,
    ServiceRegistry,
    SharedConfig,
    Source,
    States,
)
from tenure.public import publish as _publish
from tenure.recipes import (
    BrokenBarrier,
    Change,
    Codec,
    Endpoint,
    Joined,
    Left,
    Member,
    RunFailed,
    Updated,
    dataclass_codec,
    json_codec,
)

__all__ = [
    "Barrier",
    "BrokenBarrier",
    "Change",
    "Changes",
    "Codec",
    "CountDownLatch",
    "Counter",
    "DoubleBarrier",
    "Endpoint",
    "Group",
    "InnerLease",
    "Joined",
    "Left",
    "Member",
    "Party",
    "Pool",
    "PoolItem",
    "RWLock",
    "ReentrantMutex",
    "RunFailed",
    "ServiceRegistry",
    "SharedConfig",
    "Source",
    "States",
    "Updated",
    "dataclass_codec",
    "json_codec",
    "run_once",
]

_publish(__name__, __all__, globals())
