"""Outcomes of failed calls: `Lost`, `Refused`, and the program's error for a rejection."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tenure.engines._kit.backoff import backoff
from tenure.engines.etcd.grpc import CallFailed, Code
from tenure.errors import AuthenticationFailed, EngineError, InvalidArgument, TenureError

_MAY_PASS = frozenset(
    {
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
        Code.CANCELLED,
        Code.UNKNOWN,
        Code.INTERNAL,
        Code.ABORTED,
    }
)

_LONGEST_PAUSE = 0.5

_REFUSALS: tuple[tuple[tuple[str, ...], type[TenureError], str], ...] = (
    (
        ("user name",),
        AuthenticationFailed,
        (
            "{url} refused the account: {reason}. Use a user that may read and write all keys "
            "under the prefix"
        ),
    ),
    (
        ("space exceeded",),
        EngineError,
        (
            "{url} has no space left: {reason}. Nothing is granted until it is compacted and "
            "defragmented and the alarm is disarmed (etcdctl compact, defrag, alarm disarm)"
        ),
    ),
    (
        ("too large", "larger than max"),
        InvalidArgument,
        (
            "{url} refused a request of this size: {reason}. Store less data, or start the members "
            "with a larger --max-request-bytes"
        ),
    ),
    (
        ("too many operations",),
        EngineError,
        (
            "{url} accepts fewer operations in a transaction than its default, 128: {reason}. "
            "Start the members with a larger --max-txn-ops"
        ),
    ),
)
"""Parts of etcd's reasons, the error, and its message; the first matching row counts."""


class Lost(Exception):
    """A call without an answer. It may have been carried out, or may be carried out later."""


class Refused(Exception):
    """A call that was rejected, and not carried out.

    Attributes:
        code: the status.
        reason: etcd's message.
    """

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason

    @property
    def no_lease(self) -> bool:
        """True if the lease does not exist: it expired, or was revoked."""
        return "lease not found" in self.reason

    @property
    def compacted(self) -> bool:
        """True if the requested revision was compacted."""
        return self.code is Code.OUT_OF_RANGE


class StaleToken(Exception):
    """The token of the account is no longer valid."""


def failure(
    url: str, refused: Refused, *, node: str | None = None, name: str | None = None
) -> TenureError:
    """Return the program's error for a rejection."""
    reason = refused.reason
    of_account = refused.code in {Code.PERMISSION_DENIED, Code.UNAUTHENTICATED}
    kind: type[TenureError] = EngineError
    message = "{url} refused the request: {reason}"
    for parts, error, text in _REFUSALS:
        if of_account or any(part in reason for part in parts):
            kind, message = error, text
            break
    return kind(message.format(url=url, reason=reason), node=node, name=name)


def trouble_of(failed: CallFailed) -> Exception:
    """Classify a failed call as `Lost`, `Refused` or `StaleToken`."""
    code, reason = failed.code, " ".join(str(failed).split())
    if "invalid auth token" in reason or "auth store is old" in reason:
        return StaleToken(reason)
    if code in _MAY_PASS or "too many requests" in reason:
        return Lost(reason)
    return Refused(code, reason)


def pauses() -> Iterator[float]:
    """Return the seconds to wait after each unanswered attempt."""
    return (backoff(attempt, _LONGEST_PAUSE) for attempt in itertools.count())
