"""Fences: checks of fencing tokens at a resource, which reject late writes of former holders.

A program can be paused between its last check of the lease and its write. When it continues,
another client may hold the lease and may have written. Only the resource can detect that: it stores
the newest fencing token used for a write, and rejects older ones.

Each kind of resource has a fence: `SQLFence` for tables, `RedisFence` for keys of Redis, `Fence`
for an object in this process. In all of them:

* The comparison, the update of the newest token and the write are one atomic step: one transaction,
  one script, one lock. Otherwise another write could come between them.
* A token is admitted if it is not older than the newest; an equal token is the same holder's next
  write. The newest token never decreases.
* A rejected write raises `StaleToken`, and nothing is written.
* A fence takes an integer, or an object with a ``fencing_token``. It does not contact the store of
  the leases. Tokens of different stores cannot be compared.
* Every writer must use the fence. A write that bypasses it is neither checked nor recorded.
"""

from tenure.errors import StaleToken
from tenure.fencing.local import Fence
from tenure.fencing.redis import RedisFence
from tenure.fencing.sql import SQLFence
from tenure.fencing.tokens import Fenced

__all__ = ["Fence", "Fenced", "RedisFence", "SQLFence", "StaleToken"]
