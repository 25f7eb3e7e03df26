"""Reply to `stats`: keys and claims of this server's clients."""

from __future__ import annotations

import json
from typing import Any

from tenure.server.dflockd.claims import HELD, Key
from tenure.server.dflockd.locks import Locks
from tenure.server.dflockd.names import readable
from tenure.server.limits import LimitReached
from tenure.server.reads import SLICE, Reader

_KINDS = ("locks", "semaphores", "idle_locks", "idle_semaphores")


async def stats(locks: Locks, connections: int, reader: Reader) -> bytes:
    """Return the reply to `stats`: the keys that this server's clients use or have used, as JSON.

    It is built in slices, between which keys may change.

    Raises:
        LimitReached: it would exceed the limit of a client's unread output.
    """
    entries_of: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    most = locks.context.limits.output_bytes // 2
    size = 0
    keys = list(locks.keys.values())
    async with reader.lock:
        while keys:
            async with reader:
                now, work = locks.now(), 0
                while keys and work < SLICE:
                    key = keys.pop()
                    work += 1 + len(key.claims) // 8
                    kind, facts = _describe(key, now)
                    entry = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
                    entries_of[kind].append(entry)
                    size += len(entry)
            if size > most:
                raise LimitReached(
                    f"the reply to stats has more than {most} bytes, which this server's limit "
                    "output_bytes allows",
                    "output_bytes",
                )
    lists = [f'"{kind}":[{",".join(reversed(entries))}]' for kind, entries in entries_of.items()]
    return f'ok {{"connections":{connections},{",".join(lists)}}}\n'.encode()


def _describe(key: Key, now: float) -> tuple[str, dict[str, Any]]:
    """Return the list that a key belongs to, and its entry there."""
    mutex = key.limit == 1
    if not key.claims:
        idle = {"key": readable(key.name), "idle_s": round(max(0.0, now - key.used_at), 3)}
        return "idle_locks" if mutex else "idle_semaphores", idle
    held = [each for each in key.claims if each.stage is HELD]
    if mutex:
        owner = held[0].holder.connection if held else None
        return "locks", {
            "key": readable(key.name),
            "owner_conn_id": 0 if owner is None else owner.number,
            "lease_expires_in_s": round(max(0.0, held[0].deadline - now), 3) if held else 0.0,
            "waiters": key.waiting,
        }
    return "semaphores", {
        "key": readable(key.name),
        "limit": key.limit,
        "holders": len(held),
        "waiters": key.waiting,
    }
