"""Limits of a node, checked where something that lasts is made.

A transaction of etcd's can count keys, but not compare how many there are. So the keys are counted
first, which costs little as long as they are few; only where they may be too many are the things
themselves counted. Those who begin at the same moment may exceed a limit together, by as many as
they are. Ephemeral semaphores are not counted when they are made: that would slow every lock down.
They count for those who create a lasting one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.etcd import wire
from tenure.errors import InvalidArgument

if TYPE_CHECKING:
    from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.keys import Name
    from tenure.engines.etcd.semaphores import Reader

__all__ = ["check_semaphores", "check_sessions", "count"]

_PAGE = 4096


def count(prefix: bytes) -> bytes:
    """To read how many keys there are under a prefix."""
    return wire.get(wire.range_(prefix, wire.after(prefix), count_only=True))


async def check_sessions(engine: EtcdEngine, path: str, keys: int) -> None:
    """Raise `InvalidArgument` if a node, under whose sessions so many keys are, is full."""
    most = rules.SESSIONS_PER_NODE
    if keys < most:
        return
    prefix = engine.keys.sessions(path)
    there = await _count_those(
        engine.reader(path), prefix, lambda rest: rest if b"/" not in rest else None
    )
    if there >= most:
        raise InvalidArgument(f"the node {path} has {most} sessions, which is the most", node=path)


async def check_semaphores(engine: EtcdEngine, reader: Reader, name: Name) -> None:
    """Raise `InvalidArgument` if there is no such semaphore, and its node has no room for it."""
    most, prefix = rules.SEMAPHORES_PER_NODE, engine.keys.queues(name.path)
    keys, *there = (await reader.read(count(prefix), name.get_limit, name.first_request)).parts
    if keys.count < most or any(part.found for part in there):
        return
    if await _count_those(reader, prefix, lambda rest: rest.partition(b"/")[0]) >= most:
        raise InvalidArgument(
            f"the node {name.path} has {most} semaphores, which is the most",
            node=name.path,
            name=name.name,
        )


async def _count_those(
    reader: Reader, prefix: bytes, thing: Callable[[bytes], bytes | None]
) -> int:
    """Count the different things that the keys under a prefix belong to."""
    start, end = prefix, wire.after(prefix)
    number, last = 0, None
    while True:
        page = wire.get(wire.range_(start, end, limit=_PAGE, keys_only=True))
        found = (await reader.read(page)).parts[0].found
        for kv in found:
            this = thing(kv.key[len(prefix) :])
            if this is not None and this != last:
                number, last = number + 1, this
        if len(found) < _PAGE:
            return number
        start = found[-1].key + b"\0"
