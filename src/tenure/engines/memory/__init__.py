"""``memory://``: the core on a clock, in one process; the reference for every other engine.

``memory://`` alone is a store of its own for each connection; ``memory://name`` is shared, by that
name, by all connections of the process, on any loop or thread, and lasts until the last of
them is closed.

Rules:

* One lock guards the core. It is held for one command, never across an await.
* Events of a command go to the loop of each connection concerned, in order, one callback per turn
  of that loop. They are never delivered from inside the command.
* Each connection with something attached keeps one timer on its own loop, for the store's next
  deadline, or after a second at most, so that a loop that is stuck delays only itself.
* An event goes to the attachment that was current when it happened: one that has been taken over
  receives its end, and nothing else.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.memory.engine import MemoryEngine
from tenure.errors import InvalidArgument

__all__ = ["MemoryEngine", "connect"]


def connect(url: str, clock: Clock) -> MemoryEngine:
    """Return the engine for a ``memory://`` URL."""
    name = url.partition("://")[2]
    if any(character in name for character in "?#@"):
        raise InvalidArgument(f"memory:// takes a name and nothing else, not {url!r}")
    return MemoryEngine(name.strip("/"), clock)
