"""Values of the model in the form of the scripts' replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenure.model import (
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)


def semaphore(reply: list[Any], *, owners: bool, waiters: bool) -> SemaphoreDescription:
    """Decode a semaphore; `reply` is in the form of ``describe`` in lua/parts/descriptions.lua."""
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
