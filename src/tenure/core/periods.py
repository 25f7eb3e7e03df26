"""The rule of `once`: when a job that ran before is due again, and the record of its latest runs.

Rules:

* Times are the store's wall clock, in seconds since the Unix epoch. A period counts from the
  start of a run, so that a job of any length is due in equal intervals.
* A run that failed, was killed or is running does not count, unless the caller requests that: the
  next caller may try again.
* A run in the future (the store's clock was set back) counts as started now, and the success
  before it is moved by as much. The record is replaced by what it counts as, so that the wait is
  one period at the most.
* A record carries the fencing token of its run, by which a run recognises its own record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["RunRecord", "decode", "encode"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a job's runs, as the store keeps it.

    Attributes:
        started: when the latest run was started.
        token: its fencing token; 0 where the store has none.
        by: the description of its session, in which the program is named.
        succeeded: when the latest run was started that ended well; ``None``: none has.
    """

    started: float
    token: int
    by: str
    succeeded: float | None = None

    @property
    def done(self) -> bool:
        """True if the latest run ended well."""
        return self.succeeded == self.started

    def clamped(self, now: float) -> RunRecord:
        """Return the record with a run in the future moved to now, and its success with it."""
        started, succeeded = min(self.started, now), self.succeeded
        if succeeded is not None:
            # Where the two differ they stay apart: a run that failed does not become a success.
            # Without a move there is no arithmetic, which would round.
            if started != self.started:
                succeeded = started - (self.started - succeeded)
            succeeded = min(succeeded, now)
        return replace(self, started=started, succeeded=succeeded)

    def due_in(self, now: float, period: float, *, count_failed: bool) -> float:
        """Return the seconds until the job is due; 0: now.

        Args:
            now: the store's time.
            period: seconds from the start of a run to the next.
            count_failed: whether a run counts that did not end well.
        """
        known = self.clamped(now)
        last = known.started if count_failed else known.succeeded
        return 0.0 if last is None else max(0.0, period - (now - last))

    def begin(self, now: float, token: int, by: str) -> RunRecord:
        """Return the record of a run that begins after the recorded ones."""
        return replace(self.clamped(now), started=now, token=token, by=by)

    def succeed(self) -> RunRecord:
        """Return the record of a run that has ended well."""
        return replace(self, succeeded=self.started)


def encode(record: RunRecord) -> bytes:
    """Encode a record as JSON, for the data of a semaphore."""
    import json  # slow to import, and most programs do without

    fields = {
        "v": _VERSION,
        "started": record.started,
        "token": record.token,
        "by": record.by,
        "succeeded": record.succeeded,
    }
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(data: bytes) -> RunRecord | None:
    """Decode a record; ``None``: no run has been recorded.

    Raises:
        ValueError: the bytes are no record, or of a later version.
    """
    if not data:
        return None
    import json  # as above

    try:
        fields: Any = json.loads(data)
    except RecursionError:
        raise ValueError("it is no record of a run") from None
    if not isinstance(fields, dict) or fields.get("v") != _VERSION:
        raise ValueError("it is no record of a run, or one of a later version of tenure")
    token, by = fields.get("token"), fields.get("by")
    started: Any = fields.get("started")
    succeeded: Any = fields.get("succeeded")
    numbers = [started] if succeeded is None else [started, succeeded]
    if not (all(_is_time(each) for each in numbers) and type(token) is int and isinstance(by, str)):
        raise ValueError("its record of the latest run is damaged")
    return RunRecord(started, token, by, succeeded)


def _is_time(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]  # checked
