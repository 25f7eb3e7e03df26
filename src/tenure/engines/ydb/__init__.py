"""``ydb://`` and ``ydbs://``: coordination nodes of YDB, or of ``tenure serve``.

The engine uses gRPC through grpcio, with messages of `tenure.wire.ydb`. YDB's SDK provides cloud
credentials. From the top down:

* `url` parses the URL. `engine` implements the contract's engine and the calls about nodes.
* `session` implements the contract's session. Its requests are in `requests`, with their removal
  from the queues; `joining` adds and changes them. `watches` reports changes and losses.
* `members` are the server sessions that make up a session. Each keeps a stream open, with a
  `protocol` without I/O.
* `database` keeps the connection to a server, with its tokens.
* `messages` and `errors` translate the protocol's messages and statuses.

``docs/engines/ydb.md`` describes the properties of this engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.clock import Clock
from tenure.engines._kit.url import needs_extra
from tenure.engines.ydb.url import parse

if TYPE_CHECKING:
    from tenure.engines.ydb.engine import YdbEngine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> YdbEngine:
    """Return an engine for a ``ydb://`` or ``ydbs://`` URL. Raises `InvalidArgument`."""
    address = parse(url)
    with needs_extra("ydb", "ydb"):
        from tenure.engines.ydb.engine import YdbEngine  # imports gRPC, which is slow
    return YdbEngine(address, clock)
