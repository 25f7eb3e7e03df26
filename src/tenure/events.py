"""Events of a client's sessions and leases, for logs, metrics and traces.

`Client.events` returns them as a bounded stream. Reading them has no effect on the client. A slow
reader loses the oldest events, and the stream counts them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from weakref import ref

from tenure._client.handles import AsyncHandle
from tenure.public import publish

__all__ = [
    "Acquired",
    "Closed",
    "Event",
    "EventStream",
    "Expired",
    "LoopStalled",
    "Lost",
    "Released",
    "Renewed",
    "SessionAttached",
    "SessionDetached",
    "TimedOut",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a session.

    Attributes:
        node: the path of the session's node.
        session_id: the session's id.
    """

    node: str
    session_id: int


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """A lease was granted, `waited` seconds after its request."""

    name: str
    fencing_token: int | None
    waited: float


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """A request was withdrawn after `waited` seconds, its timeout."""

    name: str
    waited: float


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The program released a lease after holding it for `held_for` seconds.

    A `Lost` follows if the store answers that the release came too late.
    """

    name: str
    fencing_token: int | None
    held_for: float


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """A lease was lost, for the reason `reason`.

    It follows `Released` if only the release revealed the loss.
    """

    name: str
    fencing_token: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A session was proven alive; its leases are valid until `deadline` on the client's clock."""

    deadline: float


@dataclass(frozen=True, slots=True)
class SessionAttached(Event):
    """A session has been attached, for the first time or again."""


@dataclass(frozen=True, slots=True)
class SessionDetached(Event):
    """A session has lost contact to its store and tries to attach again."""


@dataclass(frozen=True, slots=True)
class Expired(Event):
    """A session ended without being closed, for the reason `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """A session has been closed by the program."""


@dataclass(frozen=True, slots=True)
class LoopStalled(Event):
    """The event loop was stuck for `seconds`; the keeper thread renewed meanwhile."""

    seconds: float


class EventStream(AsyncHandle):
    """A bounded stream of events: an async iterator and an async context manager.

    Attributes:
        dropped: number of events dropped because they were not read in time.
    """

    def __init__(self, size: int, streams: set[ref[EventStream]]) -> None:
        """Start empty, and register in `streams`, which refers to it weakly."""
        self.dropped = 0
        self._events: deque[Event] = deque()
        self._size = size
        self._wake = asyncio.Event()
        self._closed = False
        # Only its reader keeps it alive: after a `break` out of a bare loop it is dropped.
        self._streams = streams
        self._myself = ref(self, streams.discard)
        streams.add(self._myself)

    def _put(self, event: Event) -> None:
        if len(self._events) == self._size:
            self._events.popleft()
            self.dropped += 1
        self._events.append(event)
        self._wake.set()

    def _close(self) -> None:
        """Close the stream; events in it can still be read."""
        self._closed = True
        self._streams.discard(self._myself)
        self._wake.set()

    async def __aenter__(self) -> EventStream:
        """Enter the block that closes the stream at its end."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the stream."""
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening. Safe to call twice; events in the stream can still be read."""
        self._close()

    def __aiter__(self) -> EventStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event and return it, the oldest first."""
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    def _put_back(self, event: Event) -> None:
        """Return an event to the stream, after its reader was interrupted."""
        self._events.appendleft(event)


publish("tenure", ["EventStream"], globals())
