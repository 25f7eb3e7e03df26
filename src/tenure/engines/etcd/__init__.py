"""``etcd://``, ``etcds://``: an etcd cluster, 3.4 or newer.

All state is in etcd's keys, and only transactions change it. A session is a lease. A request is a
key under that lease; its place in the queue is the revision at which the key was created. A waiter
watches the request before it.

From the bottom up:

* ``url`` names the members; ``wire`` encodes commands, ``answers`` decodes answers and classifies
  failures, and ``keys`` has the layout of the store.
* ``http2`` is the protocol without I/O, ``grpc`` the calls on one connection, and ``members`` the
  channels to all members.
* ``watching`` has the stream of watches; ``cluster`` has the services that all sessions share: it
  keeps leases alive, and removes overdue waiters of other programs.
* ``attachment`` is a session's lease, key and transactions, in the order of its operations;
  ``request`` and ``requests`` are its requests, ``semaphores`` its operations on semaphores, and
  ``watch_cache`` its watches; ``session`` joins them.
* ``admin`` has the operations on nodes and of administrators, ``doctor`` the diagnosis, ``engine``
  the contract, and the attaching of sessions.

Rules:

* A request concludes that it is an owner only from a state at a revision of a majority, read under
  the number of its own attachment. An event of a watch only triggers a read.
* Every transaction of a session compares its attach number. An unanswered transaction is sent again
  only after the session has been reattached under the next number.
* A transaction puts only one request: two would share a revision, and so a place in the queue.
* Without a majority nothing is granted: waiters wait or time out, and holders keep their leases
  only until the proven deadline.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.url import needs_extra
from tenure.engines.contract import Engine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """Make the engine of an ``etcd://`` or ``etcds://`` URL.

    Raises:
        InvalidArgument: the URL is wrong.
        Unsupported: the extra ``tenure[etcd]`` is not installed.
    """
    with needs_extra("etcd", "etcd"):
        from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.url import parse

    return EtcdEngine(parse(url), clock)
