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
still being attached waits too, before there is a request: see `UnsentRequest`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import ref

from tenure.background import Failures
from tenure.errors import Misuse, SessionClosed

if TYPE_CHECKING:
    from tenure._client.client_core import ClientCore
    from tenure._client.request import Request, RequestOptions
    from tenure._client.session_life import SessionLife
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

_log = logging.getLogger("tenure")


Handler: TypeAlias = "Callable[[Any, Any, Any], None]"
"""Processes an event.

It gets the session, or ``None`` while that is being attached; the request, if the event is about
one; and the fields that this class of event adds, in their order.
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
    def handlers(self) -> Mapping[EventKind, Handler]:
        """The functions that process the events, by their kinds."""
        ...

    def begin(self, client: ClientCore) -> None:
        """Begin with the sessions and requests that the client has already."""

    def sent(self, unsent: UnsentRequest, request: Request) -> None:
        """Record that a request was sent whose wait had begun before."""

    def queued(self, request: Request) -> None:
        """Record that the store has put a request into a queue."""

    def renewing(self, session: SessionLife, late: float) -> None:
        """Record that a renewal was sent, so many seconds after it was due."""

    def closed(self) -> None:
        """End: the client is closed, or the sink was removed. Safe to call twice."""


class UnsentRequest:
    """A request that waits for its session to be attached.

    Attributes:
        node, name: those of the semaphore.
        options: the request's options.
        since: the beginning of the wait, on the client's clock.
    """

    __slots__ = ("_listeners", "_session", "name", "node", "options", "since")

    def __init__(
        self,
        listeners: Listeners,
        node: str,
        session: ReportingSession | None,
        options: RequestOptions[object],
    ) -> None:
        self.node = node
        self.name = options.name
        self.options = options
        self.since = listeners.now()
        self._listeners = listeners
        self._session = session

    def begin(self) -> None:
        """Report the beginning of the wait."""
        self._listeners.unsent[self] = None
        self._emit("Requested")

    def sent(self, request: Request) -> None:
        """Report that the request is sent; it reports its end itself."""
        self._listeners.unsent.pop(self, None)
        self._listeners.sent(self, request)

    def ended(self, error: BaseException) -> None:
        """Report the end of the wait because of `error`, unless it has ended or was sent."""
        if isinstance(error, GeneratorExit):
            # An abandoned task can be closed in any thread.
            self._listeners.soon(partial(self._end, error))
        else:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        if self not in self._listeners.unsent:
            return
        del self._listeners.unsent[self]
        waited = self._listeners.now() - self.since
        outcome = outcome_of(error)
        if outcome == "timed_out":
            self._emit("TimedOut", waited)
        else:
            self._emit("NotAcquired", waited, outcome, reason_of_end(error))

    def _emit(self, kind: EventKind, *facts: object) -> None:
        self._listeners.emit(kind, self.node, self._session, self, (self.name, *facts))


AnyRequest: TypeAlias = "Request | UnsentRequest"


class Listeners:
    """The streams and the sinks of one client's events.

    Args:
        now: reads the client's clock.
        soon: schedules a call on the client's loop, from any thread.

    Attributes:
        streams: the streams that may still be read.
        sinks: the sinks, in the order of their addition.
        unsent: the waits for a session.
    """

    __slots__ = ("_adding", "_failures", "now", "sinks", "soon", "streams", "unsent")

    def __init__(
        self, now: Callable[[], float], soon: Callable[[Callable[[], object]], None]
    ) -> None:
        self.now = now
        self.soon = soon
        self.streams: set[ref[EventStream]] = set()
        self.sinks: tuple[Sink, ...] = ()
        self.unsent: dict[UnsentRequest, None] = {}
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

    def begin(
        self, node: str, session: ReportingSession | None, options: RequestOptions[object]
    ) -> UnsentRequest | None:
        """Begin the wait of a caller that has to obtain its session first.

        Args:
            node: the path of the node.
            session: the session, if it is attached; ``None`` while it is being attached.
            options: the options of the request.

        Returns:
            The wait, or ``None`` if nothing listens.
        """
        if not self.streams and not self.sinks:
            return None
        unsent = UnsentRequest(self, node, session, options)
        unsent.begin()
        return unsent

    def emit(
        self,
        kind: EventKind,
        node: str,
        session: ReportingSession | None,
        request: AnyRequest | None,
        facts: tuple[object, ...],
    ) -> None:
        """Report an event; `facts` are the fields that this kind of event adds."""
        for sink in self.sinks:
            handler = sink.handlers.get(kind)
            if handler is not None:
                try:
                    handler(session, request, facts)
                except Exception as error:
                    self._failures.report(error)
        if self.streams:
            from tenure import events

            event = getattr(events, kind)(node, 0 if session is None else session.id, *facts)
            for stream in self._living():
                stream._put(event)  # noqa: SLF001  its public methods are the reader's

    def sent(self, unsent: UnsentRequest, request: Request) -> None:
        """Report that a request was sent whose wait had begun before."""
        for sink in self.sinks:
            with self._failures.contained():
                sink.sent(unsent, request)

    def queued(self, request: Request) -> None:
        """Report to the sinks that the store has put a request into a queue."""
        for sink in self.sinks:
            with self._failures.contained():
                sink.queued(request)

    def renewing(self, session: SessionLife, late: float) -> None:
        """Report to the sinks that a renewal was sent, so many seconds after it was due."""
        for sink in self.sinks:
            with self._failures.contained():
                sink.renewing(session, late)

    def close(self) -> None:
        """Close the streams, and the sinks. Events in the streams can still be read."""
        for unsent in tuple(self.unsent):  # of callers that have not run since the end
            unsent.ended(SessionClosed("the client was closed"))
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
