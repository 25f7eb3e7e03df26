"""YDB's coordination API over gRPC, so that YDB's clients in any language work without changes.

From the bottom up: `frames`, `http2`, `transport` and `calls` (HTTP/2 and gRPC, with their limits),
`messages` (YDB's), `core` (a session's conversation, without I/O, with `requests`, `watches`,
`operations`, `turns`, `answers`, `long_replies`), `session` (a stream: a conversation and its
store, with its `output` and `pings`) with `attaching`, `registry` (the listener's sessions),
`returning` (their clients) and `departures` (sessions that are being detached), `nodes` (the other
calls), `listener`.
"""

from tenure.server.ydb.listener import YdbListener
from tenure.server.ydb.paths import DATABASE

__all__ = ["DATABASE", "YdbListener"]
