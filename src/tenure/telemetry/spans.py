"""Spans of OpenTelemetry: the wait for a lease, and the time for which it is held.

* A wait is a span ``acquire <kind>``, or ``campaign`` of an election. It begins with the call, in
  the context of the caller: in `tenure.blocking` too, where the event loop has a thread of its own.
* The time for which a lease is held is a span ``hold <kind>``, or ``lead``. It is a sibling of the
  wait, in the trace of the caller, with a link to the wait.
* A span of a lease is not made the current span of the block. A lease may be entered in another
  task than the one that acquired it, and released in a third.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context as contexts
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context

    from tenure._client.listeners import Handler, SinkEventKind
    from tenure._client.request import AnyRequest, Request, UnsentRequest
    from tenure._client.session_core import SessionCore

MOST_AT_ONCE = 10
"""Number of positions that are read at the same time; those of other requests stay unknown."""

_log = logging.getLogger("tenure")

_OF_ELECTIONS = {"acquire": "campaign", "hold": "lead"}


class _Wait(NamedTuple):
    """A wait that has begun.

    Attributes:
        span: its span.
        context: the context of its caller.
    """

    span: Span
    context: Context


class Spans:
    """Sink that makes spans (see `Sink` in `tenure._client.listeners`).

    Args:
        destination: the provider of the tracer.
        tracer: makes the spans.
        engine: the attribute of the engine.
        positions: whether the place in the queue is read for each request that waits.

    Attributes:
        destination: as given.
        handlers: the functions that make the spans.
    """

    def __init__(
        self, destination: object, tracer: Tracer, engine: str, *, positions: bool
    ) -> None:
        self.destination = destination
        self._positions = positions
        self._reading = 0  # number of readings that have begun
        self._tracer = tracer
        self._engine = engine
        self._waiting: dict[AnyRequest, _Wait] = {}
        self._held: dict[AnyRequest, Span] = {}
        self.handlers: Mapping[SinkEventKind, Handler] = {
            "Requested": self._requested,
            "Acquired": self._acquired,
            "TimedOut": self._timed_out,
            "NotAcquired": self._not_acquired,
            "Released": self._released,
            "Lost": self._lost,
            "Sent": self._sent,
            "Queued": self._queued,
        }

    def _sent(self, session: SessionCore, request: Request, facts: tuple[UnsentRequest]) -> None:
        """Continue the wait as that of a request."""
        wait = self._waiting.pop(facts[0], None)
        if wait is not None:
            self._waiting[request] = wait
            wait.span.set_attribute("tenure.session.id", str(session.id))

    def _queued(self, session: SessionCore, request: Request, _facts: Any) -> None:
        """Begin to read the place in the queue, if the spans have it."""
        known = request.order_id is not None  # else the store does not name its waiters
        if self._positions and known and self._reading < MOST_AT_ONCE:
            self._reading += 1
            reading = session.client.tasks.begin(self._note_position(session, request))
            reading.add_done_callback(self._have_read)

    def _have_read(self, _: object) -> None:
        self._reading -= 1

    async def _note_position(self, session: SessionCore, request: Request) -> None:
        try:
            async with asyncio.timeout(session.contact.answer_timeout):
                assert request.order_id is not None
                place = await session.engine.position(request.name, request.order_id)
        except (TenureError, TimeoutError) as error:
            _log.debug(
                "position unknown: node=%s name=%r error=%s", request.node, request.name, error
            )
            return
        except Exception:
            _log.exception("could not read the queue: node=%s name=%r", request.node, request.name)
            return
        wait = self._waiting.get(request)
        if place and wait is not None:
            wait.span.set_attribute("tenure.queue.position", place)

    def closed(self) -> None:
        """End the spans that are open."""
        for span in [*(wait.span for wait in self._waiting.values()), *self._held.values()]:
            span.end()
        self._waiting.clear()
        self._held.clear()

    def _requested(self, session: SessionCore | None, request: AnyRequest, _facts: Any) -> None:
        context = contexts.get_current()
        kind = request.options.kind
        attributes = self._attributes(session, request)
        span = self._tracer.start_span(
            _name("acquire", kind), context, SpanKind.CLIENT, attributes=attributes
        )
        self._waiting[request] = _Wait(span, context)

    def _attributes(
        self, session: SessionCore | None, request: AnyRequest
    ) -> dict[str, str | int | float]:
        attributes: dict[str, str | int | float] = {
            "tenure.engine": self._engine,
            "tenure.node": request.node,
            "tenure.kind": request.options.kind,
            "tenure.name": request.name,
        }
        if request.options.count != EPHEMERAL_LIMIT:
            attributes["tenure.count"] = request.options.count
        if session is not None:
            attributes["tenure.session.id"] = str(session.id)
        return attributes

    def _acquired(self, session: SessionCore, request: Request, facts: Any) -> None:
        _, token, waited = facts
        wait = self._end(request, "acquired", waited, token)
        if wait is None:
            return  # it began before the client was instrumented
        kind = request.options.kind
        self._held[request] = span = self._tracer.start_span(
            _name("hold", kind),
            wait.context,
            attributes=self._attributes(session, request),
            links=[Link(wait.span.get_span_context())],
        )
        _note_token(span, token)

    def _timed_out(self, _session: SessionCore, request: AnyRequest, facts: Any) -> None:
        self._end(request, "timed_out", facts[1], error="not acquired within the timeout")

    def _not_acquired(self, _session: SessionCore, request: AnyRequest, facts: Any) -> None:
        _, waited, outcome, reason = facts
        self._end(request, outcome, waited, error=reason if outcome == "failed" else "")

    def _end(
        self,
        request: AnyRequest,
        outcome: str,
        waited: float,
        token: int | None = None,
        *,
        error: str = "",
    ) -> _Wait | None:
        wait = self._waiting.pop(request, None)
        if wait is not None:
            span = wait.span
            span.set_attribute("tenure.outcome", outcome)
            span.set_attribute("tenure.wait.duration", waited)
            _note_token(span, token)
            if error:
                _note_error(span, outcome, error)
            span.end()
        return wait

    def _released(self, _session: SessionCore, request: Request, facts: Any) -> None:
        self._let_go(request, facts[1], facts[2])

    def _lost(self, session: SessionCore, request: Request, facts: Any) -> None:
        _, token, reason, cause = facts
        span = self._held.get(request)
        if span is not None:  # else it was released before, and its span has ended
            span.set_attribute("tenure.loss.cause", cause)
            _note_error(span, cause, reason)
            self._let_go(request, token, session.now() - request.granted_at)

    def _let_go(self, request: Request, token: int | None, held_for: float) -> None:
        span = self._held.pop(request, None)
        if span is not None:
            _note_token(span, token)
            span.set_attribute("tenure.hold.duration", held_for)
            span.end()


def _name(what: str, kind: str) -> str:
    return _OF_ELECTIONS[what] if kind == "election" else f"{what} {kind}"


def _note_token(span: Span, token: int | None) -> None:
    if token is not None:
        span.set_attribute("tenure.fencing_token", token)


def _note_error(span: Span, kind: str, description: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, description))
