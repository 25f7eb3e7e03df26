"""``tenure://``: tenure's own server, over the native protocol.

Modules, each of which only imports earlier ones: `calls` (an unanswered message), `connection` (one
socket), `reconnector` (the connection of an engine, the server's messages on it, and its sessions),
`reconcile` (what a reconnect has left undone), `heartbeat`, `attachment` (a session's operations,
sent again after a reconnect, and its watches) and `session`, `engine`.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines._kit.url import needs_extra
from tenure.engines.native.url import parse

with needs_extra("tenure", "native"):
    from tenure.engines.native.engine import NativeEngine

__all__ = ["NativeEngine", "connect"]


def connect(url: str, clock: Clock) -> NativeEngine:
    """Create the engine of a ``tenure://``, ``tenures://`` or ``tenure+unix://`` URL."""
    return NativeEngine(parse(url), clock)
