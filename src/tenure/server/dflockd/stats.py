"""What this server's clients have, as the reply to `stats`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tenure.server.dflockd.claims import HELD

if TYPE_CHECKING:
    from tenure.server.dflockd.locks import Locks

__all__ = ["stats"]


def stats(locks: Locks, connections: int, now: float) -> bytes:
    """One line of JSON, of the keys that this server's clients use or have used."""
    told: dict[str, Any] = {
        "connections": connections,
        "locks": [],
        "semaphores": [],
        "idle_locks": [],
        "idle_semaphores": [],
    }
    for key in locks.keys.values():
        mutex = key.limit == 1
        if not key.claims:
            idle = {"key": key.name, "idle_s": round(max(0.0, now - key.used_at), 3)}
            told["idle_locks" if mutex else "idle_semaphores"].append(idle)
            continue
        held = [each for each in key.claims if each.stage is HELD]
        if mutex:
            owner = held[0].holder.connection if held else None
            told["locks"].append(
                {
                    "key": key.name,
                    "owner_conn_id": 0 if owner is None else owner.number,
                    "lease_expires_in_s": round(max(0.0, held[0].deadline - now), 3)
                    if held
                    else 0.0,
                    "waiters": key.waiting,
                }
            )
        else:
            told["semaphores"].append(
                {
                    "key": key.name,
                    "limit": key.limit,
                    "holders": len(held),
                    "waiters": key.waiting,
                }
            )
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
