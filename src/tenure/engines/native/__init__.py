"""``tenure://``: tenure's own server, over the native protocol.

Modules, each of which only imports earlier ones: `calls` (an unanswered message), `connection` (one
socket), `dispatch` (the server's messages), `reconnector` (the connection of an engine, and its
sessions), `reconcile` and `operation_queue` (a session's operations, sent again after a reconnect),
`watches`, `heartbeat`, `attachment` and `session`, `engine`.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.extras import needs_extra
from tenure.engines.native.url import parse

with needs_extra("tenure", "native"):
    from tenure.engines.native.engine import NativeEngine

__all__ = ["NativeEngine", "connect"]


def connect(url: str, clock: Clock) -> NativeEngine:
    """Create the engine of a ``tenure://``, ``tenures://`` or ``tenure+unix://`` URL."""
    return NativeEngine(parse(url), clock)
