"""Streams of a client's events, and their delivery.

Most programs do not read events. An event is created only if there is a stream, and
`tenure.events`, which is slow to import, is imported only then. So callers of `Listeners.emit`
check `Listeners.streams` first.

A stream is dropped when the program has no reference to it, closed or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from weakref import ref

if TYPE_CHECKING:
    from tenure.events import EventStream

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
        streams: the streams that may still be read.
    """

    __slots__ = ("streams",)

    def __init__(self) -> None:
        self.streams: set[ref[EventStream]] = set()

    def open(self, size: int) -> EventStream:
        """Return a new stream of events from now on, which keeps up to `size` unread events."""
        from tenure.events import EventStream

        return EventStream(size, self.streams)

    def emit(self, kind: EventKind, *facts: object) -> None:
        """Put an event into each stream; `facts` are the fields of this kind of event."""
        from tenure import events

        event = getattr(events, kind)(*facts)
        for stream in self._living():
            stream._put(event)  # noqa: SLF001  its public methods are the reader's

    def close(self) -> None:
        """Close the streams. Events that they contain can still be read."""
        for stream in self._living():
            stream._close()  # noqa: SLF001  as above

    def _living(self) -> list[EventStream]:
        return [stream for known in tuple(self.streams) if (stream := known()) is not None]
