"""A checker of histories: what processes saw, and whether that can be.

A *history* is what several processes recorded about their own requests, data and watches, with
the instants. `check` looks for what contradicts the promises of the library, on any engine, and
explains each contradiction as a short timeline.

- `tenure.testing.history.records`: what is recorded, and how it is kept in files.
- `tenure.testing.history.journal`: how a program records.
"""

from tenure.testing.history.journal import Call, Journal
from tenure.testing.history.records import (
    AppendOnly,
    Asked,
    Believes,
    Called,
    Continued,
    Crashed,
    Gone,
    Granted,
    History,
    Leaves,
    Observed,
    Paused,
    Queued,
    Record,
    Returned,
    Revokes,
    Shrinks,
    Truth,
    dump,
    load,
)
from tenure.testing.history.request import Holding, Place, Request

__all__ = [
    "AppendOnly",
    "Asked",
    "Believes",
    "Call",
    "Called",
    "Continued",
    "Crashed",
    "Gone",
    "Granted",
    "History",
    "Holding",
    "Journal",
    "Leaves",
    "Observed",
    "Paused",
    "Place",
    "Queued",
    "Record",
    "Request",
    "Returned",
    "Revokes",
    "Shrinks",
    "Truth",
    "dump",
    "load",
]
