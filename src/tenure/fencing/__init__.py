"""Fences: what a resource keeps, so that a holder who comes too late is refused.

A lease says what its holder *believes*. A program that is paused between its last look at the lease
and its write will do that write when it goes on, whatever it had looked at; by then another may
hold the lease and have written. Only the resource can tell the two apart, and this is how: it
remembers the newest fencing token that has written to it, and refuses an older one.

One fence stands before each kind of resource: `SQLFence` before tables, `RedisFence` before keys of
Redis, `Fence` before an object in this process. In all of them:

* The comparison, the remembering and the write are one step, which nothing comes between: one
  transaction, one script, one lock. A comparison beforehand would only be another belief.
* A token is admitted if it is not older than the newest; an equal one is the same holder's next
  write. What is newest never goes back.
* A refusal is `StaleToken`, and nothing has been written.
* A fence knows nothing of the store that leases come from: it is given an integer, or what has one
  as its ``fencing_token``. It stands where the resource is, which may be another program, and
  tokens mean something only among those of one store.
* Every writer goes through the fence. One that does not is not fenced, and not seen.
"""

from tenure.errors import StaleToken
from tenure.fencing.local import Fence
from tenure.fencing.redis import RedisFence
from tenure.fencing.sql import SQLFence
from tenure.fencing.tokens import Fenced

__all__ = ["Fence", "Fenced", "RedisFence", "SQLFence", "StaleToken"]
