"""Report of one contradiction: a sentence, and the records that show it, in order of time.

Each record is one line: the time relative to the first record, the process, and the fact. The
records that contradict each other are marked with ``>``::

    limit: 'm' on /default has a limit of 1, and 2 tokens are certainly held
         0.000 s  a  a-1 requests 1 (limit 1)
         0.002 s  a  a-1 is granted, fencing token 7, held until 9.502 s
         1.000 s  b  b-1 requests 1 (limit 1)
    >    1.003 s  b  b-1 is granted, fencing token 8, held until 10.503 s
         2.000 s  a  a-1 may leave from here
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import assert_never

from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.history.records import (
    Called,
    Continued,
    Crashed,
    Deadlocked,
    Described,
    Gone,
    Granted,
    Held,
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
)

MOST_LINES = 40
"""Number of lines above which a timeline omits unmarked records in its middle."""

_LONGEST = 60  # characters of data that are shown


@dataclass(frozen=True, slots=True)
class Violation:
    """Contradiction between a history and a rule. ``str()`` returns its timeline.

    Attributes:
        rule: the name of the rule; see `tenure.testing.history.check`.
        node, name: the semaphore.
        what: the contradiction, in a sentence.
        records: all relevant records, in any order.
        conflict: the records that contradict each other.
    """

    rule: str
    node: str
    name: str
    what: str
    records: tuple[Record, ...]
    conflict: tuple[Record, ...] = ()

    def __str__(self) -> str:
        """Return the timeline as text."""
        return "\n".join(self.timeline())

    def timeline(self) -> list[str]:
        """Return a line that states the contradiction, then one line per record."""
        records = sorted(self.records, key=lambda record: record.at)
        head = f"{self.rule}: {self.what}"
        if not records:
            return [head]
        start = records[0].at
        processes = _processes(records)
        marked = {id(record) for record in self.conflict}
        width = max((len(name) for name in processes.values()), default=1)
        lines = [
            f"{'>' if id(record) in marked else ' '} {record.at - start:11.6f} s  "
            f"{_process_of(record, processes):{width}}  {_describe(record, start)}"
            for record in records
        ]
        return [head, *_shortened(lines)]


def _shortened(lines: list[str]) -> Iterable[str]:
    """Return the first and the last lines, and all marked lines in between."""
    if len(lines) <= MOST_LINES:
        return lines
    half = MOST_LINES // 2
    return list(_with_gaps(lines, half, len(lines) - half))


def _with_gaps(lines: list[str], first: int, last: int) -> Iterator[str]:
    left_out = 0
    for number, line in enumerate(lines):
        if first <= number < last and line.startswith(" "):
            left_out += 1
            continue
        if left_out:
            yield f"  ... {left_out} records ..."
            left_out = 0
        yield line


def _processes(records: Iterable[Record]) -> dict[str, str]:
    """Return the process of each request label, call label and process label."""
    known: dict[str, str] = {}
    for record in records:
        if isinstance(record, Requested):
            known[record.request] = record.process
        elif isinstance(record, Called):
            known[record.call] = record.process
        elif isinstance(record, Takes):
            known[record.take] = record.process
        elif isinstance(record, Paused | Continued | Crashed | Observed | Unobserved | Described):
            known[record.process] = record.process
    return known


def _process_of(record: Record, processes: dict[str, str]) -> str:
    if isinstance(record, Returned):
        return processes.get(record.call, "")
    if isinstance(record, Took | Refunds):
        return processes.get(record.take, "")
    if isinstance(record, Queued | Granted | Held | Shrinks | Leaves | Gone | Deadlocked):
        return processes.get(record.request, "")
    if isinstance(record, Revokes | Truth):
        return ""
    return record.process


def _describe(record: Record, start: float) -> str:
    match record:
        case Requested():
            return (
                f"{record.request} requests {_tokens(record.count)} of {record.name!r}"
                f"{_limit(record)}"
                f"{'' if record.timeout is None else f', for {record.timeout:g} s'}"
                f"{_former(record.recovers)}"
            )
        case Queued():
            return f"{record.request} has its place, order id {record.order_id}"
        case Granted():
            token = "" if record.order_id is None else f", fencing token {record.order_id}"
            return f"{record.request} is granted{token}, {_until(record.deadline, start)}"
        case Held():
            return f"{record.request} is {_until(record.deadline, start)}"
        case Shrinks():
            return f"{record.request} may have only {record.count} from here"
        case Leaves():
            return f"{record.request} may leave from here"
        case Gone():
            known = None if record.deadline is None else _until(record.deadline, start)
            return f"{record.request} is {record.why}{'' if known is None else f', was {known}'}"
        case Deadlocked():
            return (
                f"{record.request} is ended by a deadlock of {', '.join(record.waits)}, inside "
                f"{list(record.inside)}"
            )
        case Revokes():
            return f"an administrator revokes {_revoked(record)}"
        case Paused():
            return "is paused"
        case Continued():
            return "continues"
        case Crashed():
            return "crashes"
        case Called():
            return f"{record.call}: {record.op} {record.name!r}{_data(record.argument)} ..."
        case Returned():
            return f"... {record.call}: {record.outcome}{_data(record.result)}"
        case Observed():
            return f"{record.observer} is shown {_shown(record.value)}"
        case Unobserved():
            return f"{record.observer} has ended"
        case Truth():
            return (
                f"in the store {record.name!r} has{_data(record.data) or ' no data'}, "
                f"owners {list(record.owners)}, waiters {list(record.waiters)}"
            )
        case Described():
            return (
                f"{record.name!r} has the owners {list(record.owners)} and the waiters "
                f"{list(record.waiters)}"
            )
        case Takes():
            burst = "" if record.burst == record.limit else f", in bursts of {record.burst}"
            return (
                f"{record.take} takes {record.count} of {record.name!r} ({record.limit} per "
                f"{record.per / 1e6:g} s{burst})"
            )
        case Took(granted=None):
            return f"{record.take} is refused"
        case Took():
            return f"{record.take} is granted for {record.granted} us, after {record.waited:.6f} s"
        case Refunds():
            return f"{record.take} may have {record.count} fewer from here"
    assert_never(record)


def _tokens(count: int) -> str:
    """Return a count of tokens as text; the count of a mutex is "all"."""
    return "all" if count >= EPHEMERAL_LIMIT else str(count)


def _limit(record: Requested) -> str:
    return "" if record.limit >= EPHEMERAL_LIMIT else f" (limit {record.limit})"


def _former(recovers: str | None) -> str:
    return "" if recovers is None else f", continuing {recovers or 'a former request'}"


def _until(deadline: float, start: float) -> str:
    return f"held until {'the end' if deadline == inf else f'{deadline - start:.6f} s'}"


def _revoked(record: Revokes) -> str:
    parts = [
        *([] if record.request is None else [record.request]),
        *([] if record.session_of is None else [f"the requests of {record.session_of}"]),
        *([] if record.name is None else [repr(record.name)]),
    ]
    return " of ".join(parts) or "everything"


def _data(data: bytes | None) -> str:
    if data is None:
        return ""
    text = repr(data)
    return f" {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}"


def _shown(value: bytes | tuple[int, ...] | None) -> str:
    if value is None:
        return "that there is none"
    return _data(value).strip() if isinstance(value, bytes) else f"the owners {list(value)}"
