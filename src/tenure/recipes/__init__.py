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
from tenure.recipes.pool import Pool, PoolItem
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
    "Joined",
    "Left",
    "Member",
    "Party",
    "Pool",
    "PoolItem",
    "RWLock",
    "ServiceRegistry",
    "SharedConfig",
    "Source",
    "States",
    "Updated",
    "dataclass_codec",
    "json_codec",
]

_publish(__name__, __all__, globals())
