"""Redis and Valkey: one server (``redis://``), behind sentinels (``redis+sentinel://``), a cluster.

All state is in keys of Redis. Each operation is one script and one round trip, with Redis's clock.
A grant is published to the engine that has its session. Messages that may have been missed are
looked up after an interruption, and every few seconds.

Modules, in reading order: `session` extends the sessions of `tenure.engines._kit.commands`. It
sends `commands`, which run the scripts in ``lua/``, over `connection`, one socket; `reconnector`
replaces it when it breaks, `connecting` opens it, and `locating` finds the server. `engine` owns
all of them, and the heartbeat, which has a separate connection, as `confirming` has. `namespace`
handles a loss of data. `values` encodes and decodes, `url` parses, and `doctor` examines a store.

Rules:

* All keys of a namespace have one hash tag, its prefix, so that one node of a cluster has them all.
  Each key of a session or a request is removed by its owner, or has a time to live.
* Concurrent operations of a session are one script, which runs them in order; a failed one does not
  affect the others.
* Every command of a session has the token of its attachment, and an older token is rejected. After
  an interruption, sessions are first reattached, under new tokens. Then unanswered commands are
  sent again: requests and changes are identified by numbers, so none is executed twice.
* Every script removes the expired sessions and requests that it encounters, in the order of their
  expiry.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.url import needs_extra
from tenure.engines.contract import Engine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """Create the engine of a ``redis://`` URL.

    Raises:
        InvalidArgument: the URL is malformed.
        Unsupported: the extra ``tenure[redis]`` is not installed.
    """
    with needs_extra("redis", "redis"):
        from tenure.engines.redis.engine import RedisEngine
    from tenure.engines.redis.url import parse

    return RedisEngine(parse(url), clock)
