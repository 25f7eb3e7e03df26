"""Who listens to a client's events, and how they are told.

Most programs do not listen: what happens is put into words only for those who do, and
`tenure.events`, which takes long to import, is imported for them alone. So whoever has
something to tell looks at `Listeners.streams` first.

A stream that nobody can read any more is forgotten, closed or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import ref

if TYPE_CHECKING:
    from tenure.events import EventStream

__all__ = ["EventKind", "Listeners"]

EventKind = Literal[
    "Acquired",
    "Closed",
    "Expired",
    "LoopStalled",
    "Lost",
    "Released",
    "Renewed",
    "SessionAttached",
    "SessionDetached",
    "TimedOut",
]
"""The class of an event, in `tenure.events`."""


class Listeners:
    """The streams of one client's events.

    Attributes:
        streams: those that may still be read; empty while nobody listens.
    """

    __slots__ = ("streams",)

    def __init__(self) -> None:
        self.streams: set[ref[EventStream]] = set()

    def open(self, size: int) -> EventStream:
        """A new stream of what happens from now on; `size` events wait for a slow reader."""
        from tenure.events import EventStream

        return EventStream(size, self.streams)

    def tell(self, kind: EventKind, *facts: object) -> None:
        """Tell whoever listens; `facts` are the fields of this kind of event."""
        from tenure import events

        event = getattr(events, kind)(*facts)
        for stream in self._living():
            stream._put(event)

    def close(self) -> None:
        """No more events will come; what is there can still be read."""
        for stream in self._living():
            stream._close()

    def _living(self) -> list[EventStream]:
        return [stream for known in tuple(self.streams) if (stream := known()) is not None]
