"""``dflockd://``, ``dflockds://``: mutexes and semaphores on dflockd servers, sharded by key.

A dflockd server has locks, leases and connections, but no sessions. A session here is a group of
requests of one program over several connections. It lives while it is renewed, and each granted
request lives while its connection does.

From the bottom up, each module using only those before it: `url` parses the URL; `connection` opens
one connection, and is it; `shard` is one server with all connections to it. `semaphores` has the
program's declared limits, `request` is one request; `session`, which also reads the connections
while the program's loop is stuck, and `engine` implement the contract.

Rules:

* A request is first tried on the shared connection. If it has to wait, it waits on a connection
  without other locks, and keeps that connection for its lease: only closing the connection ends a
  blocking wait.
* When a connection is closed, everything held on it is lost at once. Its waiters join again.
* Requests of one program for one key reach the server in order: each operation is answered before
  the next is sent.
* A grant is reported with a fresh proof: the grant of a waiter is renewed first.
* An idle connection sends a request before the server closes it. That renews nothing.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.dflockd.engine import DflockdEngine
from tenure.engines.dflockd.url import parse

__all__ = ["DflockdEngine", "connect"]


def connect(url: str, clock: Clock) -> DflockdEngine:
    """Return an engine for a ``dflockd://`` or ``dflockds://`` URL. Raises `InvalidArgument`."""
    return DflockdEngine(parse(url), clock)
