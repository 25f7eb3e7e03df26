"""Replies to requests about semaphores, one function for each kind of reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tenure.model import EPHEMERAL_LIMIT, RequestDescription, SemaphoreDescription
from tenure.server.ydb.long_replies import LongReply
from tenure.server.ydb.messages import Response, Status, coordination, issue

__all__ = [
    "aborted",
    "acquired",
    "changed",
    "created",
    "deleted",
    "described",
    "described_at_length",
    "not_acquired",
    "not_described",
    "not_released",
    "pending",
    "released",
    "updated",
]


def _result(
    field: str, asked: int, status: int = Status.SUCCESS, text: str = "", **more: Any
) -> Any:
    """Make the result of a request.

    Args:
        field: where it is in the response.
        asked: the request id.
        status: of YDB.
        text: the reason of a status that is not success.
        more: the result's other fields.
    """
    kind = getattr(Response, _KINDS[field])
    issues = [issue(text)] if text else []
    return Response(**{field: kind(req_id=asked, status=status, issues=issues, **more)})


_KINDS = {
    f"{verb}_semaphore_result": f"{verb.title()}SemaphoreResult"
    for verb in ("acquire", "release", "create", "update", "delete", "describe")
}
created = partial(_result, "create_semaphore_result")
updated = partial(_result, "update_semaphore_result")
deleted = partial(_result, "delete_semaphore_result")
not_acquired = partial(_result, "acquire_semaphore_result")
not_released = partial(_result, "release_semaphore_result")
not_described = partial(_result, "describe_semaphore_result")


def pending(asked: int) -> Any:
    """An acquire waits."""
    return Response(acquire_semaphore_pending=Response.AcquireSemaphorePending(req_id=asked))


def acquired(asked: int, yes: bool) -> Any:
    """An acquire owns its tokens, or has timed out."""
    return _result("acquire_semaphore_result", asked, acquired=yes)


def aborted(asked: int, text: str) -> Any:
    """A waiting acquire comes to nothing."""
    return not_acquired(asked, Status.ABORTED, text)


def released(asked: int, yes: bool) -> Any:
    """A release has removed a request, or has found none."""
    return _result("release_semaphore_result", asked, released=yes)


def changed(asked: int, *, data: bool, owners: bool) -> Any:
    """A watched semaphore has changed, or the watch was replaced."""
    told = Response.DescribeSemaphoreChanged(req_id=asked, data_changed=data, owners_changed=owners)
    return Response(describe_semaphore_changed=told)


def described(
    asked: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> Any:
    """A semaphore as it is.

    Args:
        asked: the request id.
        found: the semaphore.
        timeouts: those of waiters, in milliseconds, by session and name, as far as
            this server knows it.
        owners: whether the client wants to see the owners.
        watched: whether a watch was added.
    """
    result = _bare(asked, found, watched=watched)
    description = result.describe_semaphore_result.semaphore_description
    for field, each, data in _entries(found, timeouts, owners=owners):
        each.data = data
        getattr(description, field).append(each)
    return result


def described_at_length(
    asked: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> LongReply:
    """The same as `described`, made while it is sent."""
    base = _bare(asked, found, watched=watched)
    return LongReply(base, list(_entries(found, timeouts, owners=owners)))


def _bare(asked: int, found: SemaphoreDescription, *, watched: bool) -> Any:
    """A semaphore without owners and waiters."""
    description = coordination.SemaphoreDescription(
        name=found.name,
        data=found.data,
        count=min(found.held, EPHEMERAL_LIMIT),
        limit=found.limit,
        ephemeral=found.ephemeral,
    )
    return _result(
        "describe_semaphore_result", asked, semaphore_description=description, watch_added=watched
    )


def _entries(
    found: SemaphoreDescription, timeouts: Mapping[tuple[int, str], int], *, owners: bool
) -> Iterator[tuple[str, Any, bytes]]:
    """Each owner and waiter: the field it belongs to, the message without data, and its data."""
    for each in found.owners if owners else ():
        yield "owners", _request(each, 0), each.data
    for each in found.waiters:
        asked = timeouts.get((each.session_id, found.name))
        yield "waiters", _request(each, asked or _asked(each)), each.data


def _request(found: RequestDescription, timeout_millis: int) -> Any:
    return coordination.SemaphoreSession(
        order_id=found.order_id,
        session_id=found.session_id,
        timeout_millis=timeout_millis,
        count=found.count,
    )


def _asked(waiter: RequestDescription) -> int:
    """The timeout of a waiter; for ever where the store does not tell.

    It is what is left and what has passed. A waiter that has asked again is said to wait longer
    than it asked, by what had passed before.
    """
    if waiter.timeout is None:
        return EPHEMERAL_LIMIT
    return max(0, round((waiter.timeout + (waiter.since or 0.0)) * 1000))
