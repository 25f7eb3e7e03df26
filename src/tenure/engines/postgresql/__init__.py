"""``postgresql://``, ``postgres://``: a PostgreSQL database, directly or behind a pooler.

The rows of one schema are the truth, and functions in the database keep the rules: each call is one
transaction and one round trip, by the server's clock. A grant is sent with ``NOTIFY`` to the one
engine that has its session. Behind a transaction pooler, where that cannot be received, the engine
polls.

Modules, in the order to read them in: ``sql/`` has the tables and functions, of which `schema`
makes a store. `session` has what PostgreSQL adds to the sessions of
`tenure.engines._kit.commands`. It sends `statements`, most of them a `batch`, over `connection`,
one socket of libpq, which `connecting` opens and prepares for them. The kit's `pipeline` decides
which of them are under way together. `engine` owns the connections and sessions. `monitor` looks
for what has expired or was missed; it has the watches, and a heartbeat with a connection of its
own. Behind a pooler it does the `polling`. `values` encodes and decodes, `url` parses and explains
errors of the login, and `doctor` examines a store.

Rules:

* Operations that sessions call for while two batches are under way are one statement, in order.
* A mutex is handed on within a session ahead of the database's confirmation (`handoff`).
* Every statement of a session has the token of its attachment, and an older token is refused.
* After a lost connection, sessions are first reattached, under new tokens. Then unanswered
  statements are sent again: requests are identified by their numbers, and changes by theirs, so
  none is made twice.
* Behind a pooler no state is kept in the database's session. On a direct connection these are:
  ``LISTEN``, prepared statements, and a few settings. There is no advisory lock.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.url import needs_extra
from tenure.engines.contract import Engine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """Create the engine of a ``postgresql://`` URL.

    Raises:
        InvalidArgument: the URL is malformed.
        Unsupported: the extra ``tenure[postgresql]`` is not installed.
    """
    with needs_extra("postgresql", "postgresql"):
        from tenure.engines.postgresql.engine import PostgresEngine
        from tenure.engines.postgresql.url import parse

    return PostgresEngine(parse(url), clock)
