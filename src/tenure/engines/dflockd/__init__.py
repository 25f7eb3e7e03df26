"""``dflockd://``, ``dflockds://``: mutexes and semaphores on dflockd servers, sharded by key.

A dflockd server knows locks, leases and connections, and no sessions. A session here is a group of
requests of one program over several connections. It lives as long as it is renewed. Each granted
request lives as long as its connection.

From the bottom up, each module using only those before it: `url` parses the URL; `connection` is
one connection, `heartbeat` reads it while the program's loop is stuck, and `dialing` opens it;
`shard` is one server with all connections to it. `semaphores` has the limits that the program has
declared, `request` is one request with its `states` and `answers`; `session` and `engine`
implement the contract.

Rules:

* A request is first tried on the shared connection. One that has to wait does so on a connection
  that holds nothing else, and keeps that connection with the lease: only closing the connection
  ends a blocking wait.
* Closing a connection loses everything that was held on it, at once. Its waiters join again.
* Requests of one program for one key reach the server in the order in which they were made: each
  operation is answered before the next is sent.
* A grant is reported with a fresh proof: that of a waiter is renewed first.
* An idle connection sends something before the server closes it. That renews nothing.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.dflockd.engine import DflockdEngine
from tenure.engines.dflockd.url import parse

__all__ = ["DflockdEngine", "connect"]


def connect(url: str, clock: Clock) -> DflockdEngine:
    """Return an engine for a ``dflockd://`` or ``dflockds://`` URL. Raises `InvalidArgument`."""
    return DflockdEngine(parse(url), clock)
