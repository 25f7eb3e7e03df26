"""Semaphores declared by one program, and checks of names and requests.

dflockd stores a limit only while there are requests. So the program's limits are stored here, for
all of its sessions.
"""

from __future__ import annotations

from collections.abc import Callable

from tenure.core import refusals, rules
from tenure.engines.dflockd.shard import Shard, cannot
from tenure.errors import (
    EngineError,
    InvalidArgument,
    SemaphoreBusy,
    SemaphoreNotFound,
    TenureError,
    Unsupported,
)
from tenure.model import EPHEMERAL_LIMIT, SemaphoreDescription
from tenure.wire import lines
from tenure.wire.lines import Reply, is_key

_KEY_BYTES = 255
"""Maximum bytes of a key on all servers: early ones count the end of the line."""


def check_name(name: str, node: str) -> None:
    """Check that every dflockd server accepts a name.

    Raises:
        InvalidArgument: no engine accepts it.
        Unsupported: it is not a valid key of dflockd.
    """
    rules.check_name(name, node)
    if not is_key(name) or len(name.encode()) > _KEY_BYTES:
        raise cannot(
            f"lock {name[:80]!r}: a key has no white space and at most {_KEY_BYTES} bytes",
            node,
            name,
        )


class DeclaredSemaphores:
    """Limits of the semaphores declared by a program.

    Args:
        shard_of: returns the server of a key.
    """

    def __init__(self, shard_of: Callable[[str], Shard]) -> None:
        self._shard_of = shard_of
        self._limits: dict[str, int] = {}

    async def find(self, name: str) -> SemaphoreDescription | None:
        """Return a server's description of a name, if it knows the name."""
        described = await self._shard_of(name).semaphores()
        return next((each for each in described if each.name == name), None)

    async def create(self, node: str, name: str, limit: int, *, exist_ok: bool) -> None:
        """Declare a limit. Raises `SemaphoreExists` if another limit, or any, is declared."""
        lines.check_limit(limit)
        known = self._limits.get(name)
        if known is None:
            known = await self._limit_in_use(name)
        if known is not None and (known != limit or not exist_ok):
            raise refusals.semaphore_exists(node, name, known)
        self._limits[name] = limit

    async def _limit_in_use(self, name: str) -> int | None:
        found = await self.find(name)
        if found is None or not (found.held or found.waiting):
            return None
        return 1 if found.ephemeral else found.limit

    async def delete(self, node: str, name: str) -> None:
        """Forget a limit. Raises `SemaphoreBusy` and `SemaphoreNotFound`."""
        if await self._limit_in_use(name) is not None:
            raise SemaphoreBusy(
                f"{name!r} on {node} has owners or waiters; release it first", node=node, name=name
            )
        if self._limits.pop(name, None) is None:
            raise _not_declared(node, name)

    async def describe(self, node: str, name: str) -> SemaphoreDescription:
        """Describe a semaphore of a server, or of this program. Raises `SemaphoreNotFound`."""
        found = await self.find(name)
        if found is not None:
            return found
        limit = self._limits.get(name)
        if limit is None:
            raise _not_declared(node, name)
        return SemaphoreDescription(name, b"", limit, 0, ephemeral=False, waiting=0)

    def limit_for(self, node: str, name: str, count: int, *, ephemeral: bool) -> int:
        """Return the limit to send with a request, after checking the request."""
        limit = self._limits.get(name)
        if ephemeral:
            if limit is not None:
                rules.check_kind(True, False, node, name)
            rules.check_count(count, EPHEMERAL_LIMIT, node, name)
            if count != EPHEMERAL_LIMIT:
                raise cannot("share an ephemeral semaphore", node, name)
            return 1
        if limit is None:
            raise _not_declared(node, name)
        rules.check_count(count, limit, node, name)
        if count != 1:
            raise cannot("give more than one token to a request", node, name)
        return limit

    def check_shrink(self, node: str, name: str, count: int) -> None:
        """Check that a request keeps its count."""
        most = 1 if name in self._limits else EPHEMERAL_LIMIT
        rules.check_shrink(count, most, most, node, name)
        if count != most:
            raise cannot("shrink a request", node, name)


def uncounted(shard: Shard, node: str, name: str) -> Unsupported:
    """Return the error for a server that only has mutexes."""
    return Unsupported(
        f"semaphore {name!r} on {node}: {shard} runs dflockd 0.x, which has none. Use dflockd 1.0 "
        "or newer, or tenure's own server.",
        node=node,
        name=name,
    )


def refusal(shard: Shard, reply: Reply, node: str, name: str, limit: int) -> TenureError:
    """Return the error for a request that a server rejected."""
    if reply.status == "error_limit_mismatch":
        return InvalidArgument(
            f"{name!r} is in use on {shard} with another limit than {limit} (a mutex has 1). Use "
            "the same limit, or another name for one of the two.",
            node=node,
            name=name,
        )
    why = {
        "error_max_locks": "it has its maximum of keys. Raise the server's --max-locks",
        "error_max_waiters": "it has its maximum of waiters. Raise the server's --max-waiters",
    }.get(reply.status, f"it replied {reply.status!r}")
    return EngineError(
        f"{shard} rejected the request for {name!r}: {why}",
        node=node,
        name=name,
    )


def _not_declared(node: str, name: str) -> SemaphoreNotFound:
    return SemaphoreNotFound(
        f"semaphore {name!r} on {node}: this program has not declared it. Call "
        "create(limit, exist_ok=True), because dflockd keeps a limit only with requests.",
        node=node,
        name=name,
    )
