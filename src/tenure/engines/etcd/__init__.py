"""``etcd://``, ``etcds://``: an etcd cluster, 3.4 or newer.

The keys of etcd are the truth, and its transactions the only way in which they change. A session
is a lease. A request is a key under it, and its place in the queue the revision at which that was
created. A waiter watches what stands before it.

From the bottom up:

* ``url`` names the members; ``wire`` encodes commands, ``answers`` decodes what comes back, and
  ``keys`` has the layout of the store.
* ``frames``, ``http2`` and ``calls`` are a small gRPC client without I/O; ``channel`` is the
  connection to one member, and ``members`` are all of them.
* ``watching`` has the one stream of watches, ``renewing`` keeps leases alive, ``late`` takes out
  waiters of programs that are gone; ``cluster`` is what all sessions of an engine share.
* ``attachment`` is a session's lease, key and commands, and the order of its operations;
  ``transactions``, ``waiting`` and ``requests`` are its requests, ``semaphores`` the rest of what
  it does, and ``watch_cache`` its watches; ``session`` joins them, ``attaching`` begins one.
* ``admin`` is for nodes and administrators, ``doctor`` for examinations, ``engine`` the contract.

Rules:

* A request concludes that it owns only from the state at a revision of a majority, read under the
  number of its own attachment. An event of a watch is a reason to look.
* Every transaction of a session compares the number of its attachment. What was not answered is
  asked again only after the session has been attached anew, under the next number.
* One request a transaction: two that are put in one would share a revision, and so a place.
* Nothing is granted without a majority. Without one, waiters wait or time out, and holders keep
  what they hold for as long as their lease was proven, and not longer.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.extras import needs_extra
from tenure.engines.contract import Engine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """The connector of ``etcd://`` and ``etcds://``.

    Raises:
        InvalidArgument: there is something wrong with the URL.
        Unsupported: the extra ``tenure[etcd]`` is not installed.
    """
    with needs_extra("etcd", "etcd"):
        from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.url import parse

    return EtcdEngine(parse(url), clock)
