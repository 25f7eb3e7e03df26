"""Records of a history: facts with an instant, each recorded by the process that observed it.

A record is a frozen value. `at` is in seconds, on a time scale that is common to all processes: a
simulation's true time, or the boot-time clock of the host (`tenure.clock.SystemClock`). A `process`
is an incarnation: a restarted process gets another label. A `request` is the label of one request,
unique in the history.

The instants are conservative. A beginning is recorded before it happens (`Requested`, `Called`,
`Takes`) or once it is certain (`Granted`, `Returned`, `Took`). An end is recorded before it can
have happened (`Leaves`, `Revokes`, `Refunds`, `Paused`, `Crashed`). So everything in a history was
true, and a contradiction that a checker finds is a defect.

Histories in files: one record per line, and one file per process.

A record is one JSON object, ``{"kind": "granted", "at": 1.5, ...}``; bytes are decoded as latin-1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Literal

Why = Literal["released", "lost", "timeout", "withdrawn", "refused", "failed"]
"""Reason for which a request ended, as its program saw it."""

Operation = Literal["create", "ensure", "update", "delete", "read", "resize"]
"""Operation on a semaphore; ``ensure`` is a creation that accepts an existing semaphore.

The argument of a ``resize`` is the new limit in decimal digits. It changes no data.
"""

Outcome = Literal["ok", "exists", "missing", "busy", "refused", "unknown"]
"""Outcome of a call. ``exists``, ``missing`` and ``busy`` (the semaphore has owners or waiters)
report the existing state, and change nothing. ``refused`` reports no state and changes nothing. A
call whose outcome is ``unknown`` may have taken effect, or may take effect later."""


# Requests


@dataclass(frozen=True, slots=True)
class Requested:
    """Record that a request is about to be sent.

    Attributes:
        count: the number of tokens; for a mutex, all of them.
        limit: the limit with which the semaphore is created; 2^64-1 for an ephemeral semaphore, and
            so for a mutex. Calls of ``resize`` change it.
        window: the session's recovery window, in seconds.
        timeout: seconds from `at` after which the request may have timed out.
        recovers: the label of the request of a resumed session that this one continues; empty if
            that label is unknown.
        key: the label of the request for tokens of its key, which precedes this one, if each key
            has a limit.
    """

    at: float
    process: str
    request: str
    node: str
    name: str
    count: int
    limit: int
    window: float
    timeout: float | None = None
    recovers: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """Record that the order id of the request is known."""

    at: float
    request: str
    order_id: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Record that the program was notified that its request is granted.

    Attributes:
        order_id: the fencing token; ``None`` if the engine has no fencing tokens.
        deadline: the lease's deadline, in seconds on the common time scale.
    """

    at: float
    request: str
    order_id: int | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Held:
    """Record that the program found its lease held. `deadline` was read again."""

    at: float
    request: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Shrinks:
    """Record that a lease is about to release some of its tokens.

    From this instant on it may have only `count` tokens.
    """

    at: float
    request: str
    count: int


@dataclass(frozen=True, slots=True)
class Leaves:
    """Record that the request is about to be withdrawn or released, or its task cancelled.

    From this instant on it may have left its queue.
    """

    at: float
    request: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Record that the program knows that its request has ended.

    Attributes:
        deadline: the deadline of the lease or of the session, if there was one, at the time of this
            record.
    """

    at: float
    request: str
    why: Why
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Deadlocked:
    """Record that the request was ended with `tenure.Deadlock`.

    Attributes:
        waits: the labels of the requests for which the tasks of the deadlock wait.
        inside: the order ids of the leases that those tasks are inside.
    """

    at: float
    request: str
    waits: tuple[str, ...]
    inside: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revokes:
    """Record that an administrator is about to revoke requests; their programs are notified later.

    It applies to requests that were made before it. Each field except the instants restricts them
    further; ``None`` means no restriction.

    Attributes:
        request: only this request.
        session_of: only the requests of this process.
        node, name: only the requests for this semaphore.
        since: the instant at which the revocation began, in a second record after its end, which
            covers the requests that were made in between.
    """

    at: float
    request: str | None = None
    session_of: str | None = None
    node: str | None = None
    name: str | None = None
    since: float | None = None


# Processes


@dataclass(frozen=True, slots=True)
class Paused:
    """Record that a process, or at least its event loop, is about to be stopped."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Continued:
    """Record that a paused process has been resumed."""

    at: float
    process: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """Record that a process is about to be killed, or was found to have ended."""

    at: float
    process: str


# Calls on a semaphore


@dataclass(frozen=True, slots=True)
class Called:
    """Record that a call on a semaphore is about to be made. `call` is a unique label."""

    at: float
    process: str
    call: str
    node: str
    name: str
    op: Operation
    argument: bytes | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    """Record that the call with this label has ended. `result` is the data that it read."""

    at: float
    call: str
    outcome: Outcome
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """State shown by a watch.

    Attributes:
        observer: the label of the watch; a restarted watch may keep its label.
        value: the data (``None``: there is no such semaphore), or the owners' order ids.
    """

    at: float
    process: str
    observer: str
    node: str
    name: str
    value: bytes | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Unobserved:
    """Record that a watch of this process has ended, and will not show the final state."""

    at: float
    process: str
    observer: str


@dataclass(frozen=True, slots=True)
class Truth:
    """Final state of a semaphore in the store, when all faults are repaired and it has settled.

    Attributes:
        data: the semaphore's data; ``None`` if there is no such semaphore.
        owners, waiters: their order ids, in the order of the queue.
    """

    at: float
    node: str
    name: str
    data: bytes | None
    owners: tuple[int, ...] = ()
    waiters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Described:
    """Record that a description of a semaphore has shown these order ids in its queue.

    Attributes:
        owners, waiters: their order ids, in the order of the queue.
    """

    at: float
    process: str
    node: str
    name: str
    owners: tuple[int, ...]
    waiters: tuple[int, ...]


# Rates


@dataclass(frozen=True, slots=True)
class Takes:
    """Record that tokens of a rate are about to be taken. `take` is a unique label.

    Attributes:
        count: the number of tokens.
        limit, per, burst: the rule of the rate; the period is in microseconds.
    """

    at: float
    process: str
    take: str
    node: str
    name: str
    count: int
    limit: int
    per: int
    burst: int


@dataclass(frozen=True, slots=True)
class Took:
    """Record that the program may use the tokens of a take, or that it was refused.

    A take without this record may or may not have been carried out.

    Attributes:
        granted: the time of the grant by the store's clock, in microseconds; ``None`` if nothing
            was taken.
        waited: seconds between the store's decision and the grant.
    """

    at: float
    take: str
    granted: int | None = None
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Refunds:
    """Record that `count` tokens of a take are about to be refunded."""

    at: float
    take: str
    count: int


Record = (
    Requested
    | Queued
    | Granted
    | Held
    | Shrinks
    | Leaves
    | Gone
    | Deadlocked
    | Revokes
    | Paused
    | Continued
    | Crashed
    | Called
    | Returned
    | Observed
    | Unobserved
    | Truth
    | Described
    | Takes
    | Took
    | Refunds
)

KINDS: tuple[type[Record], ...] = (
    *(Requested, Queued, Granted, Held, Shrinks, Leaves, Gone, Deadlocked, Revokes),
    *(Paused, Continued, Crashed, Called, Returned, Observed, Unobserved, Truth),
    *(Described, Takes, Took, Refunds),
)
"""All types of records."""


class History:
    """Records in the order of their instants, and the tolerances for clocks and slow machines.

    Args:
        records: the records in any order; records of the same instant keep their order.
        skew: the maximum difference, in seconds, between two processes' readings of the common
            time scale.
        slack: seconds by which a process may be late because its machine is busy.
    """

    def __init__(self, records: Iterable[Record], skew: float = 0.0, slack: float = 0.0) -> None:
        self.records: tuple[Record, ...] = tuple(sorted(records, key=attrgetter("at")))
        self.skew = skew
        self.slack = slack

    def __repr__(self) -> str:
        """Return the number of records."""
        return f"<History of {len(self.records)} records>"


_KINDS = {kind.__name__.lower(): kind for kind in KINDS}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in KINDS}
_BYTES = frozenset({"argument", "result", "value", "data"})  # bytes fields, written as text


def to_json(record: Record) -> str:
    """Return a record as one line, without the line ending."""
    kind = type(record)
    facts: dict[str, Any] = {"kind": kind.__name__.lower()}
    for name in _FIELDS[kind]:
        value = getattr(record, name)
        facts[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return json.dumps(facts)


def from_json(line: str | bytes) -> Record:
    """Return the record that `to_json` wrote as this line.

    Raises:
        ValueError: the line is not a record.
    """
    facts = json.loads(line)
    try:
        kind = _KINDS[facts.pop("kind")]
        for name, value in facts.items():
            if isinstance(value, list):
                facts[name] = tuple(value)
            elif name in _BYTES and isinstance(value, str):
                facts[name] = value.encode("latin-1")
        return kind(**facts)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no record of a history: {line!r}") from error


def dump(records: Iterable[Record], path: str | PathLike[str]) -> None:
    """Write records to a file that `load` reads."""
    with Path(path).open("w", encoding="ascii") as file:
        file.writelines(to_json(record) + "\n" for record in records)


class AppendOnly:
    """File as a sink for records: each call writes one record as a whole line before it returns.

    Attributes:
        path: the path of the file; its existing contents are kept.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Open the file at `path` for appending, and create it if it is missing."""
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __call__(self, record: Record) -> None:
        """Write one record as a line.

        Raises:
            OSError: not all of the line was written.
        """
        line = to_json(record).encode("ascii") + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def load(paths: Iterable[str | PathLike[str]], skew: float = 0.0, slack: float = 0.0) -> History:
    """Return the history that is stored in several files, one per process.

    The last line of a file may be incomplete, because its process was killed while it wrote; such
    a line is ignored.

    Raises:
        ValueError: a complete line is not a record.
    """
    return History((record for path in paths for record in _lines(Path(path))), skew, slack)


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # an incomplete last line
            try:
                yield from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
