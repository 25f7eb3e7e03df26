"""Replies to requests about semaphores, one function for each kind of reply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tenure.model import EPHEMERAL_LIMIT, RequestDescription, SemaphoreDescription
from tenure.server.ydb.long_replies import LongReply
from tenure.server.ydb.messages import Response, Status, coordination, issue


def _result(
    field: str, req_id: int, status: int = Status.SUCCESS, text: str = "", **more: Any
) -> Any:
    """Make the result of a request.

    Args:
        field: the field of the response.
        req_id: the request id.
        status: the status of YDB.
        text: the reason of an unsuccessful status.
        more: other fields of the result.
    """
    kind = getattr(Response, _KINDS[field])
    issues = [issue(text)] if text else []
    return Response(**{field: kind(req_id=req_id, status=status, issues=issues, **more)})


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


def pending(req_id: int) -> Any:
    """Return the reply for an acquire that waits."""
    return Response(acquire_semaphore_pending=Response.AcquireSemaphorePending(req_id=req_id))


def acquired(req_id: int, yes: bool) -> Any:
    """Return the reply for an acquire that owns its tokens, or has timed out."""
    return _result("acquire_semaphore_result", req_id, acquired=yes)


def aborted(req_id: int, text: str) -> Any:
    """Return the reply for a waiting acquire that has failed."""
    return not_acquired(req_id, Status.ABORTED, text)


def released(req_id: int, yes: bool) -> Any:
    """Return the reply for a release that has removed a request, or found none."""
    return _result("release_semaphore_result", req_id, released=yes)


def changed(req_id: int, *, data: bool, owners: bool) -> Any:
    """Return the reply for a changed semaphore, or a replaced watch."""
    change = Response.DescribeSemaphoreChanged(
        req_id=req_id, data_changed=data, owners_changed=owners
    )
    return Response(describe_semaphore_changed=change)


def described(
    req_id: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> Any:
    """Return the description of a semaphore.

    Args:
        req_id: the request id.
        found: the semaphore.
        timeouts: known timeouts of waiters, in milliseconds, by session and name.
        owners: whether the client requested the owners.
        watched: whether a watch was added.
    """
    result = _bare(req_id, found, watched=watched)
    description = result.describe_semaphore_result.semaphore_description
    for field, each, data in _entries(found, timeouts, owners=owners):
        each.data = data
        getattr(description, field).append(each)
    return result


def described_at_length(
    req_id: int,
    found: SemaphoreDescription,
    timeouts: Mapping[tuple[int, str], int],
    *,
    owners: bool,
    watched: bool,
) -> LongReply:
    """Return the same as `described`, encoded while it is sent."""
    base = _bare(req_id, found, watched=watched)
    return LongReply(base, list(_entries(found, timeouts, owners=owners)))


def _bare(req_id: int, found: SemaphoreDescription, *, watched: bool) -> Any:
    """Return the description of a semaphore without owners and waiters."""
    description = coordination.SemaphoreDescription(
        name=found.name,
        data=found.data,
        count=min(found.held, EPHEMERAL_LIMIT),
        limit=found.limit,
        ephemeral=found.ephemeral,
    )
    return _result(
        "describe_semaphore_result", req_id, semaphore_description=description, watch_added=watched
    )


def _entries(
    found: SemaphoreDescription, timeouts: Mapping[tuple[int, str], int], *, owners: bool
) -> Iterator[tuple[str, Any, bytes]]:
    """Yield for each owner and waiter: its field, the message without data, and its data."""
    for each in found.owners if owners else ():
        yield "owners", _request(each, 0), each.data
    for each in found.waiters:
        req_id = timeouts.get((each.session_id, found.name))
        yield "waiters", _request(each, req_id or _timeout_of(each)), each.data


def _request(found: RequestDescription, timeout_millis: int) -> Any:
    return coordination.SemaphoreSession(
        order_id=found.order_id,
        session_id=found.session_id,
        timeout_millis=timeout_millis,
        count=found.count,
    )


def _timeout_of(waiter: RequestDescription) -> int:
    """Return the timeout of a waiter; infinite if the store does not report it.

    It is the sum of the remaining and the elapsed time. After a repeated acquire it is longer than
    requested, by the time that had elapsed before.
    """
    if waiter.timeout is None:
        return EPHEMERAL_LIMIT
    return max(0, round((waiter.timeout + (waiter.since or 0.0)) * 1000))
