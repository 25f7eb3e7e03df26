"""Recipes: combinations of the primitives. They run on every engine.

Each takes a `tenure.Session` or a `tenure.Client` (its implicit session on ``/default``) and a
name. Recipes use only public primitives, so programs can define their own in the same way.
"""

from tenure.public import publish as _publish
from tenure.recipes.barrier import Barrier, BrokenBarrier, DoubleBarrier, Party
from tenure.recipes.base import Source, States
from tenure.recipes.config import Codec, SharedConfig, dataclass_codec, json_codec
from tenure.recipes.counter import CountDownLatch, Counter
from tenure.recipes.group import Change, Changes, Group, Joined, Left, Member, Updated
from tenure.recipes.outcome import RunFailed, run_once
from tenure.recipes.pool import Pool, PoolItem
from tenure.recipes.reentrant import InnerLease, ReentrantMutex
from tenure.recipes.registry import Endpoint, ServiceRegistry
from tenure.recipes.rwlock import RWLock

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
