"""YDB's coordination API over gRPC, so that YDB's clients in any language work without changes.

From the bottom up: `http2`, `transport` and `calls` (HTTP/2 and gRPC, with their limits),
`messages` (YDB's), `core` (a session's conversation, without I/O, with `requests`, `watches`,
`operations` and `long_replies`), `session` (a stream: a conversation and its store, with its
attaching, output and pings), `registry` (the listener's sessions and their clients), `listener`
(with the calls about nodes).
"""

from tenure.server.ydb.listener import YdbListener
from tenure.server.ydb.messages import DATABASE

__all__ = ["DATABASE", "YdbListener"]
