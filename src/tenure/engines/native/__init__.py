"""``tenure://``: tenure's own server, over the native protocol.

Modules import one way, in this order: `calls` (an unanswered request), `connection` (one socket),
`hearing` (dispatch of the server's messages), `link` (the connection of a program and its sessions,
kept by the kit's reconnector), `reconcile` and `operations` (a session's operation queue, replayed
after a reconnect), `watches`, `heartbeat`, `asking` and `session` (the session itself), `engine`.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.extras import needs_extra
from tenure.engines.native.url import parse

with needs_extra("tenure", "native"):
    from tenure.engines.native.engine import NativeEngine

__all__ = ["NativeEngine", "connect"]


def connect(url: str, clock: Clock) -> NativeEngine:
    """The connector of ``tenure://``, ``tenures://`` and ``tenure+unix://``."""
    return NativeEngine(parse(url), clock)
