"""``etcd://``, ``etcds://``: an etcd cluster, 3.4 or newer.

The keys of etcd are the truth, and its transactions the only way in which they change. A session
is a lease. A request is a key under it, and its place in the queue the revision at which that was
created. Who waits watches what stands before it.

From the bottom up: ``url`` says where the members are, ``wire`` what is said to them and
``answers`` what they say, ``keys`` where everything lies; ``frames``, ``http2`` and ``calls`` are
as much of gRPC as that needs, ``channel`` is the way to one member and ``members`` are all of them,
``watching`` is the one stream of watches, and ``renewing`` keeps leases alive; ``requests``,
``semaphores`` and ``lookout`` are what a session does, ``session`` is one attachment, ``attaching``
how one comes about; ``admin`` is for nodes and administrators, ``doctor`` for examinations, and
``engine`` holds it all together.

Rules:

* A request concludes that it owns only from the state at a revision of a majority, read under the
  number of its own attachment. An event of a watch is a reason to look.
* Every transaction of a session compares the number of its attachment. What was not answered is
  asked again only after the session has been attached anew, under the next number.
* One request a transaction: two that are put in one would share a revision, and so a place.
* Nothing is granted without a majority: without one, who wants something waits, or times out; who
  holds something keeps it for as long as its lease was proven, and not longer.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import Unsupported

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """The connector of ``etcd://`` and ``etcds://``.

    Raises:
        InvalidArgument: there is something wrong with the URL.
        Unsupported: the extra ``tenure[etcd]`` is not installed.
    """
    _check_installed()
    from tenure.engines.etcd.engine import EtcdEngine
    from tenure.engines.etcd.url import parse

    return EtcdEngine(parse(url), clock)


def _check_installed() -> None:
    try:
        import hpack  # noqa: F401  only to see whether it is there
    except ImportError as error:
        raise Unsupported("etcd:// needs the package hpack; pip install 'tenure[etcd]'") from error
