"""Delivery of a client's events: to the streams of a program, and to the sinks of its telemetry.

Most programs read no events. An event is created only if there is a stream, and `tenure.events`,
which is slow to import, is imported only then. So callers of `Listeners.emit` check
`Listeners.streams` and `Listeners.sinks` first, where time matters.

* A **stream** is bounded, and loses events. It is dropped when the program has no reference to it,
  closed or not.
* A **sink** is called for each event, at once, on the loop of the client. So its counts are exact.
  Its failures are logged, and have no effect on a lease.

**Waits.** A wait begins with the request (`Requested`), and has one end: `Acquired`, `TimedOut` or
`NotAcquired`. Both are reported where the state of the request changes. A caller whose session is
still being attached waits too, before there is a request: see `request.UnsentRequest`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import ref

from tenure.background import Failures
from tenure.errors import Misuse, SessionClosed

if TYPE_CHECKING:
    from tenure.events import EventStream, Outcome

EventKind = Literal[
    "Acquired",
    "Closed",
    "Expired",
    "LoopStalled",
    "Lost",
    "NotAcquired",
    "Released",
    "Renewed",
    "Requested",
    "SessionAttached",
    "SessionDetached",
    "TimedOut",
]
"""The class of an event, in `tenure.events`."""

SinkEventKind: TypeAlias = EventKind | Literal["Queued", "Renewing", "Sent"]
"""Kind of a report to a sink: an event's class, or one of three that streams do not have.

* ``Queued``: the store has put the request into a queue.
* ``Renewing``: a renewal was sent. Its field is by how many seconds it was late.
* ``Sent``: the request was sent after its wait had begun. Its field is the `UnsentRequest`.
"""

_log = logging.getLogger("tenure")


Handler: TypeAlias = "Callable[[Any, Any, Any], None]"
"""Processes an event.

It gets the session, or ``None`` while that is being attached; the request, sent or not, if the
event is about one; and the fields that this class of event adds, in their order.
"""


class ReportingSession(Protocol):
    """A session, as named in an event."""

    @property
    def id(self) -> int: ...


class Sink(Protocol):
    """Receiver of all events of one client, on its loop. It must not block."""

    @property
    def destination(self) -> object:
        """Destination of its reports. A client has one sink of each type for it."""
        ...

    @property
    def handlers(self) -> Mapping[SinkEventKind, Handler]:
        """The functions that process the events, by their kinds. It needs no other kinds."""
        ...

    def closed(self) -> None:
        """End: the client is closed, or the sink was removed. Safe to call twice."""


class Listeners:
    """The streams and the sinks of one client's events.

    Args:
        now: reads the client's clock.
        soon: schedules a call on the client's loop, from any thread.

    Attributes:
        streams: the streams that may still be read.
        sinks: the sinks, in the order of their addition.
        unsent: functions that end the waits for a session, each with the error of its end.
    """

    __slots__ = ("_adding", "_failures", "now", "sinks", "soon", "streams", "unsent")

    def __init__(
        self, now: Callable[[], float], soon: Callable[[Callable[[], object]], None]
    ) -> None:
        self.now = now
        self.soon = soon
        self.streams: set[ref[EventStream]] = set()
        self.sinks: tuple[Sink, ...] = ()
        self.unsent: dict[Callable[[BaseException], None], None] = {}
        self._adding = threading.Lock()
        self._failures = Failures("telemetry", _log)

    def open(self, size: int) -> EventStream:
        """Return a new stream of events from now on, which keeps up to `size` unread events."""
        from tenure.events import EventStream

        return EventStream(size, self.streams)

    def add(self, *sinks: Sink) -> None:
        """Add sinks.

        Raises:
            Misuse: there is a sink of that type with the same destination.
        """
        with self._adding:
            for sink in sinks:
                if any(
                    type(each) is type(sink) and each.destination is sink.destination
                    for each in self.sinks
                ):
                    raise Misuse(
                        "the client is instrumented already; stop() its instrumentation first"
                    )
            self.sinks += sinks

    def remove(self, *sinks: Sink) -> None:
        """Remove sinks. Safe to call twice. From any thread."""
        with self._adding:
            self.sinks = tuple(each for each in self.sinks if each not in sinks)

    def emit(
        self,
        kind: EventKind,
        node: str,
        session: ReportingSession | None,
        request: object,
        facts: tuple[object, ...],
    ) -> None:
        """Report an event; `facts` are the fields that this kind of event adds."""
        if self.sinks:
            self.report(kind, session, request, *facts)
        if self.streams:
            from tenure import events

            event = getattr(events, kind)(node, 0 if session is None else session.id, *facts)
            for stream in self._living():
                stream._put(event)  # noqa: SLF001  its public methods are the reader's

    def report(
        self,
        kind: SinkEventKind,
        session: ReportingSession | None,
        request: object,
        *facts: object,
    ) -> None:
        """Report something to the sinks alone."""
        for sink in self.sinks:
            handler = sink.handlers.get(kind)
            if handler is not None:
                try:
                    handler(session, request, facts)
                except Exception as error:
                    self._failures.report(error)

    def close(self) -> None:
        """Close the streams, and the sinks. Events in the streams can still be read."""
        for end in tuple(self.unsent):  # of callers that have not run since the end
            end(SessionClosed("the client was closed"))
        for stream in self._living():
            stream._close()  # noqa: SLF001  as above
        sinks, self.sinks = self.sinks, ()
        for sink in sinks:
            with self._failures.contained():
                sink.closed()

    def _living(self) -> list[EventStream]:
        return [stream for known in tuple(self.streams) if (stream := known()) is not None]


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a wait that ends because of `error`."""
    if isinstance(error, TimeoutError):
        return "timed_out"
    return "failed" if isinstance(error, Exception) else "cancelled"


def reason_of_end(error: BaseException) -> str:
    """Return the reason of a wait's end in words."""
    if isinstance(error, asyncio.CancelledError):
        return "the task was cancelled"
    return str(error) or type(error).__name__
