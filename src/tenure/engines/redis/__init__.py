"""``redis://``, ``rediss://``, ``redis+unix://``, ``redis+sentinel://``: one Redis or Valkey.

The keys of Redis are the truth. Each operation is one script and one round trip, by Redis's own
clock. A grant is published to the one engine that has its session. Messages that may have been
missed are looked up after a gap, and every few seconds.

Modules, in the order to read them in: `session` has what Redis adds to the sessions of
`tenure.engines._kit.commands`. It sends `commands`, which run the scripts in ``lua/``, over
`connection`, one socket; `reconnector` replaces it when it breaks, and `connecting` opens it.
`engine` owns all of them; its bases are `administration` and `attaching`. `namespace` judges a
loss of data. `heartbeat` and `confirming` have connections of their own. `values` encodes and
decodes, `url` parses.

Rules:

* All keys of a namespace have one hash tag, its prefix. Each key of a session or a request has an
  owner that removes it, or a time to live.
* Operations that a session calls for together are one script, which runs them in order; one that
  fails leaves the others alone.
* Every command of a session has the token of its attachment, and an older token is refused. After
  a gap, sessions are first reattached, under new tokens. Then unanswered commands are sent
  again: requests are identified by their numbers, and changes by theirs, so none is made twice.
* Every script removes the expired sessions and requests that it meets, in the order of their
  expiry.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.extras import needs_extra
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
