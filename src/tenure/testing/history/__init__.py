"""A checker of histories: what processes saw, and whether that can be.

A *history* is what several processes recorded about their own requests, data and watches, with
the instants. `check` looks for what contradicts the promises of the library, on any engine, and
explains each contradiction as a short timeline.

- `tenure.testing.history.records`: what is recorded; `files` keeps it.
- `tenure.testing.history.journal`: how a program records.
- `tenure.testing.history.check`: the rules.
- `tenure.testing.history.timeline`: how a contradiction is told.
"""

from tenure.testing.history.check import check
from tenure.testing.history.files import AppendOnly, dump, load
from tenure.testing.history.journal import DataCall, Journal
from tenure.testing.history.records import (
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
    Unobserved,
)
from tenure.testing.history.request import Holding, Place, Request
from tenure.testing.history.timeline import Violation

__all__ = [
    "AppendOnly",
    "Asked",
    "Believes",
    "Called",
    "Continued",
    "Crashed",
    "DataCall",
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
    "Unobserved",
    "Violation",
    "check",
    "dump",
    "load",
]
