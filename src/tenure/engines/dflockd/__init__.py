"""``dflockd://``, ``dflockds://``: mutexes and semaphores on dflockd servers, sharded by key.

A dflockd server knows locks, leases and connections, and no sessions. So a session here is what
one program holds over several connections, and lives as long as it is renewed; each request that it
has been granted lives and dies with its connection.

From the bottom up, each using only those before it: `url` says which servers, `connection` is one
connection, `heartbeat` reads it while the program's loop stands still, `dialing` opens it, `line`
is the order of requests for one key, and `shard` one server with all connections to it.
`semaphores` has the limits that the program has declared, `request` is one request with its
`answers`; `session` and `engine` fulfil the contract.

Rules:

* A key is asked for with a try on the connection that all share. A request that has to wait does so
  on a connection that holds nothing else, and keeps it with the grant: a blocking wait can be ended
  only by closing its connection.
* A closed connection is the loss of all that was held on it, at once. Its waiters join again.
* Requests of one program for one key reach the server in the order in which they were made: each
  step of the one is answered before the next is sent.
* A grant is reported with a proof that is fresh: that of a waiter is renewed first.
* An idle connection sends something before the server takes it for dead. That renews nothing.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.dflockd.engine import DflockdEngine
from tenure.engines.dflockd.url import parse

__all__ = ["DflockdEngine", "connect"]


def connect(url: str, clock: Clock) -> DflockdEngine:
    """The connector of ``dflockd://`` and ``dflockds://``. Raises `InvalidArgument`."""
    return DflockdEngine(parse(url), clock)
