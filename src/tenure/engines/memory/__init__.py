"""``memory://``: the core with a clock, in one process; the reference for every other engine.

``memory://`` is one store for the process, and ``memory://name`` is another one. All connections of
the process with that URL share it, on any loop or thread, and it exists until the last of them is
closed. A forked child begins with empty stores.

Rules:

* Connections to ``memory://`` with a clock of their own, as in tests, share a store with those of
  the same clock alone, since its deadlines are times of that clock.
* One lock guards the core. It is held for one command, never across an await.
* Events of a command are delivered on the loops of their connections, in order, with one callback
  per iteration of the loop. They are never delivered from inside the command.
* Each connection with an attached session has a timer on its own loop, for the store's next
  deadline, or after at most a second, so that a stuck loop delays only itself.
* An event is delivered to the attachment that was current when it occurred: an attachment that has
  been taken over only receives its end.
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
