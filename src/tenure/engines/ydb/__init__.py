"""``ydb://`` and ``ydbs://``: coordination nodes of YDB, or of ``tenure serve``.

The engine speaks gRPC through grpcio, with messages of `tenure.wire.ydb`. YDB's SDK provides the
identities of a cloud. From the outside in:

* `url` understands the URL; `engine` is the contract's engine, and does the node calls; `database`
  is what its sessions share.
* `session` is the contract's session. Its requests are in `requests`, with the ways out of their
  queues; `joining` and `altering` are the other ways. `watches` tells of changes and losses.
* `members` are the one or more sessions on the server that a session is made of, with the order of
  `operations` over them. A `member` has a stream, again and again, and a `protocol` without I/O.
* `channel` has the `connection` to a server, and `credentials` what it shows.
* `messages` and `errors` are the protocol's words.

``docs/engines/ydb.md`` tells what holds on this engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.clock import Clock
from tenure.engines._kit.extras import needs_extra
from tenure.engines.ydb.url import parse

if TYPE_CHECKING:
    from tenure.engines.ydb.engine import YdbEngine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> YdbEngine:
    """The connector of ``ydb://`` and ``ydbs://``."""
    address = parse(url)
    with needs_extra("ydb", "ydb"):
        from tenure.engines.ydb.engine import YdbEngine  # imports gRPC, which takes its time
    return YdbEngine(address, clock)
