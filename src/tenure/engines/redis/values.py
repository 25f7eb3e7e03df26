"""Values of the model as scripts take and return them, and the errors for their replies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tenure.core import refusals, rules
from tenure.errors import (
    EngineError,
    TenureError,
)
from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeConfig,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = [
    "WHOLE",
    "config",
    "config_text",
    "count_text",
    "error",
    "included",
    "microseconds",
    "recovered",
    "semaphore",
    "sessions",
]

WHOLE = str(EPHEMERAL_LIMIT)
"""The count of a mutex, for a script."""


def count_text(count: int) -> str:
    """Encode a count; "0" for an invalid one, which the script rejects."""
    if count == EPHEMERAL_LIMIT:
        return WHOLE
    return f"{count:d}" if isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT else "0"


def microseconds(timeout: float | None) -> str:
    """Encode a timeout; "" for none."""
    return "" if timeout is None else str(min(int(timeout * 1e6) + (timeout > 0), 10**15))


def config_text(given: NodeConfig) -> str:
    """Encode a configuration for the store."""
    return json.dumps(asdict(given))


def config(stored: bytes) -> NodeConfig:
    """Decode a configuration from the store."""
    return NodeConfig(**json.loads(stored))


def included(*, owners: bool, waiters: bool) -> str:
    """Choose the requests that ``describe.lua`` includes."""
    return "all" if waiters else "owners" if owners else "none"


def semaphore(reply: list[Any], *, owners: bool, waiters: bool) -> SemaphoreDescription:
    """Decode a semaphore; `reply` as ``describe`` in body.lua has it."""
    name, data, limit, lasting, held, waiting, now, requests = reply
    owning, queued, total = [], [], 0
    for each in sorted(requests, key=lambda each: int(each[0])):
        owns, request = _request(each, int(now))
        if owns:
            total += request.count
            owning.append(request)
        else:
            queued.append(request)
    return SemaphoreDescription(
        name.decode(),
        data,
        int(limit),
        total if requests else int(held),
        not lasting,
        tuple(owning) if owners else (),
        tuple(queued) if waiters else (),
        waiting,
    )


def _request(reply: list[Any], now: int) -> tuple[bool, RequestDescription]:
    order_id, record, data, description, until = reply
    session, _, count, joined, granted, deadline = map(int, record.split())
    return granted > 0, RequestDescription(
        session,
        int(order_id),
        count,
        data,
        since=max(0, now - (granted or joined)) / 1e6,
        timeout=max(0, deadline - now) / 1e6 if deadline else None,
        remaining=max(0, int(until) - now) / 1e6,
        session_description=description.decode(),
    )


def sessions(path: str, reply: Iterable[list[Any]]) -> list[SessionDescription]:
    """Decode the sessions of a node, in the order of their ids."""
    found = [
        SessionDescription(
            int(number),
            path,
            description.decode(),
            int(window) / 1e6,
            attached == b"1",
            max(0.0, int(silent) / 1e6),
        )
        for number, description, window, attached, silent in reply
    ]
    return sorted(found, key=lambda session: session.id)


def recovered(reply: Iterable[list[Any]]) -> list[Recovered]:
    """Decode the requests of a session that was taken over, in the order of their order ids."""
    found = [
        Recovered(
            int(request_id),
            name.decode(),
            int(order_id),
            int(count),
            data,
            not lasting,
            bool(granted),
        )
        for request_id, name, order_id, count, data, lasting, granted in reply
    ]
    return sorted(found, key=lambda request: request.order_id)


def error(url: str, path: str, name: str, count: int, reply: list[Any]) -> TenureError:
    """Return the error for a script's refusal, in the words of the broken rule."""
    code = reply[0]
    try:
        if code == b"missing":
            return refusals.semaphore_not_found(path, name)
        if code == b"kind":
            rules.check_kind(not reply[1], bool(reply[1]), path, name)
        elif code == b"count":
            rules.check_count(count, int(reply[1]), path, name)
        elif code == b"shrink":
            rules.check_shrink(count, int(reply[2]), int(reply[3]), path, reply[1].decode())
        elif code == b"busy":
            return refusals.semaphore_busy(path, name)
        elif code == b"full":
            return refusals.semaphores_full(path, name)
        elif code == b"exists":
            limit = int(reply[1])
            return refusals.semaphore_exists(path, name, limit)
        elif code == b"released":
            return refusals.request_over(path)
    except TenureError as broken:
        return broken
    return EngineError(
        f"{name!r} on {path}: {url} sent an unexpected reply: {reply!r}", node=path, name=name
    )
