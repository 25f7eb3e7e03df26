"""Events of a client's sessions and leases, for logs, metrics and traces.

`Client.events` returns them as a bounded stream. Reading them has no effect on the client. A slow
reader loses the oldest events, and the stream counts them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Literal
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
    "LossCause",
    "Lost",
    "NotAcquired",
    "Outcome",
    "Released",
    "Renewed",
    "Requested",
    "SessionAttached",
    "SessionDetached",
    "TimedOut",
]


Outcome = Literal["acquired", "timed_out", "rejected", "withdrawn", "cancelled", "failed"]
"""End of a wait.

* ``acquired``: the lease was granted (`Acquired`).
* ``timed_out``: it was not granted within the timeout (`TimedOut`).
* ``rejected``: it was to be granted at once or not at all, and was not free.
* ``withdrawn``: the program withdrew the request, or no longer needed it.
* ``cancelled``: the waiting task was cancelled, or its thread interrupted.
* ``failed``: the store, the session or the request failed.
"""

LossCause = Literal[
    "session_expired", "session_closed", "evicted", "deleted", "removed", "late_release"
]
"""Cause of a loss.

* ``session_expired``: the session ended, because the store could not be reached in time, the
  program was stopped, or an administrator ended it.
* ``session_closed``: the program closed the session or the client.
* ``evicted``: an administrator took the request out of its queue.
* ``deleted``: the semaphore was deleted.
* ``removed``: the store's queue no longer contained the request, for another reason.
* ``late_release``: only the release showed that the request had left its queue.
"""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a session.

    Attributes:
        node: the path of the session's node.
        session_id: the session's id; 0 in events of a wait while the session is being attached.
    """

    node: str
    session_id: int


@dataclass(frozen=True, slots=True)
class Requested(Event):
    """A wait has begun: the program requests a lease.

    Each wait has one end: `Acquired`, `TimedOut` or `NotAcquired`. So the number of waiters is that
    of these events less that of the ends. A lease that is granted at once has both events.
    """

    name: str


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
class NotAcquired(Event):
    """A wait ended after `waited` seconds without a lease, and not by its timeout.

    Attributes:
        outcome: how it ended.
        reason: the reason in words; empty if there is none to add.
    """

    name: str
    waited: float
    outcome: Outcome
    reason: str


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

    Attributes:
        cause: the kind of reason, for statistics.
    """

    name: str
    fencing_token: int | None
    reason: str
    cause: LossCause


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
    """The event loop was stuck for `seconds`; the keeper thread renewed meanwhile.

    A pause that prevents no renewal, or one of less than two seconds, is not reported.
    """

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
