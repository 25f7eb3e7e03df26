"""Recording of histories, and a checker that finds violations of the library's guarantees.

A *history* is the set of timestamped records that several processes wrote about their own requests,
data and watches. `check` searches for violations of the library's guarantees, on any engine, and
explains each as a short timeline.

- `tenure.testing.history.records`: the types of records, and their files.
- `tenure.testing.history.journal`: recording in a program.
- `tenure.testing.history.check`: the rules.
- `tenure.testing.history.timeline`: the report of one contradiction.
"""

from tenure.testing.history.check import check
from tenure.testing.history.journal import (
    DataCall,
    Holding,
    Journal,
    Place,
    Request,
    Take,
    Together,
    Wanted,
)
from tenure.testing.history.records import (
    AppendOnly,
    Called,
    Continued,
    Crashed,
    Deadlocked,
    Described,
    Gone,
    Granted,
    Held,
    History,
    Leaves,
    Observed,
    Paused,
    Queued,
    Record,
    Refunds,
    Requested,
    Returned,
    Revokes,
    Shrinks,
    Takes,
    Took,
    Truth,
    Unobserved,
    dump,
    load,
)
from tenure.testing.history.timeline import Violation

__all__ = [
    "AppendOnly",
    "Called",
    "Continued",
    "Crashed",
    "DataCall",
    "Deadlocked",
    "Described",
    "Gone",
    "Granted",
    "Held",
    "History",
    "Holding",
    "Journal",
    "Leaves",
    "Observed",
    "Paused",
    "Place",
    "Queued",
    "Record",
    "Refunds",
    "Request",
    "Requested",
    "Returned",
    "Revokes",
    "Shrinks",
    "Take",
    "Takes",
    "Together",
    "Took",
    "Truth",
    "Unobserved",
    "Violation",
    "Wanted",
    "check",
    "dump",
    "load",
]
