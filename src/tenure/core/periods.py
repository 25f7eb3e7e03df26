"""The rule of `once`: when a job is due again, and the record of its latest runs.

Rules:

* Times are the store's wall clock, in seconds since the Unix epoch. A period counts from the start
  of a run, so the intervals do not depend on the job's duration.
* A run that failed, was killed or is running does not count, unless the caller requests it: the
  next caller may try again.
* A run in the future (the store's clock was set back) counts as started now, and the success before
  it is moved by the same time. The corrected record is stored, so the wait is at most one period.
* A record contains the fencing token of its run, so that a run recognises its own record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a job's runs, as the store keeps it.

    Attributes:
        started: time at which the latest run was started.
        token: fencing token of the latest run; 0 if the store has none.
        by: the description of its session, which names the program.
        succeeded: time at which the latest successful run was started; ``None``: there was none.
    """

    started: float
    token: int
    by: str
    succeeded: float | None = None

    @property
    def done(self) -> bool:
        """True if the latest run was successful."""
        return self.succeeded == self.started

    def clamped(self, now: float) -> RunRecord:
        """Return the record with a run in the future moved to now, with its success."""
        started, succeeded = min(self.started, now), self.succeeded
        if succeeded is not None:
            # If the two differ they must stay different: a failed run does not become a success.
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
            count_failed: whether unsuccessful runs count.
        """
        known = self.clamped(now)
        last = known.started if count_failed else known.succeeded
        return 0.0 if last is None else max(0.0, period - (now - last))

    def begin(self, now: float, token: int, by: str) -> RunRecord:
        """Return the record of a run that begins after the recorded ones."""
        return replace(self.clamped(now), started=now, token=token, by=by)

    def succeed(self) -> RunRecord:
        """Return the record after the run was successful."""
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
        ValueError: the bytes are not a record, or are from a later version.
    """
    if not data:
        return None
    import json  # slow to import

    try:
        fields: Any = json.loads(data)
    except RecursionError:
        raise ValueError("it is not a record of a run") from None
    if not isinstance(fields, dict) or fields.get("v") != _VERSION:
        raise ValueError("it is not a record of a run, or is from a later version of tenure")
    token, by = fields.get("token"), fields.get("by")
    started: Any = fields.get("started")
    succeeded: Any = fields.get("succeeded")
    numbers = [started] if succeeded is None else [started, succeeded]
    if not (all(_is_time(each) for each in numbers) and type(token) is int and isinstance(by, str)):
        raise ValueError("its record of the latest run is damaged")
    return RunRecord(started, token, by, succeeded)


def _is_time(value: object) -> bool:
    return type(value) in {int, float} and math.isfinite(value)  # type: ignore[arg-type]  # checked
