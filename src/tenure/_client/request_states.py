"""States of a request and every transition between them. Pure: no clock, no I/O, no threads.

::

    SENT --queued--> WAITING --granted--> HELD --withdrawn--> RELEASED --missing--> LOST
      |                 |                  `--removed, session ended-------------> LOST
      `--granted--------|----------------> HELD
      `-----------------+--rejected, withdrawn, removed, session ended--> GONE

Each event is a table of transitions. An event without a transition from the current state changes
nothing, because events may be reported twice, or too late.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias


class RequestState(Enum):
    """State of a request."""

    SENT = "sent"
    WAITING = "waiting"
    HELD = "held"
    RELEASED = "released"
    LOST = "lost"
    GONE = "gone"

    # The hash of an enumeration is slow, and each grant looks up a table.
    __hash__ = object.__hash__


# Globals, because reading attributes of an enumeration is slow on the hot path.
SENT, WAITING, HELD, RELEASED, LOST, GONE = RequestState

RequestEvent: TypeAlias = Mapping[RequestState, RequestState]

QUEUED: RequestEvent = {SENT: WAITING}
GRANTED: RequestEvent = {SENT: HELD, WAITING: HELD}
REJECTED: RequestEvent = {SENT: GONE, WAITING: GONE}
WITHDRAWN: RequestEvent = {SENT: GONE, WAITING: GONE, HELD: RELEASED}
TAKEN: RequestEvent = {HELD: LOST}
"""The owner has left the queue, or its session has ended; for a waiter, see `REJECTED`."""
MISSING: RequestEvent = {RELEASED: LOST}
"""The store's answer to a release: the request had left the queue before."""

EVENTS: Mapping[str, RequestEvent] = {
    "queued": QUEUED,
    "granted": GRANTED,
    "rejected": REJECTED,
    "withdrawn": WITHDRAWN,
    "taken": TAKEN,
    "missing": MISSING,
}
"""All events, by name."""
