"""Recipes for threads: those of `tenure.recipes`, made from a blocking session or client."""

from tenure.blocking.recipes.wrappers import (
    Barrier,
    Changes,
    CountDownLatch,
    Counter,
    Group,
    RWLock,
    ServiceRegistry,
    SharedConfig,
    Source,
    States,
)
from tenure.public import publish as _publish
from tenure.recipes import (
    Change,
    Codec,
    Endpoint,
    Joined,
    Left,
    Member,
    Updated,
    dataclass_codec,
    json_codec,
)

__all__ = [
    "Barrier",
    "Change",
    "Changes",
    "Codec",
    "CountDownLatch",
    "Counter",
    "Endpoint",
    "Group",
    "Joined",
    "Left",
    "Member",
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
