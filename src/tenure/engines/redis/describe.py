"""What scripts tell of nodes, semaphores and sessions, as the values of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tenure.model import (
    NodeConfig,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["config", "config_text", "recovered", "semaphore", "sessions", "wanted"]


def config_text(given: NodeConfig) -> str:
    """A configuration, as it is stored."""
    return json.dumps(asdict(given))


def config(stored: bytes) -> NodeConfig:
    """A configuration that was stored."""
    return NodeConfig(**json.loads(stored))


def wanted(*, owners: bool, waiters: bool) -> str:
    """Which requests ``describe.lua`` is to tell of."""
    return "all" if waiters else "owners" if owners else "none"


def semaphore(told: list[Any], *, owners: bool, waiters: bool) -> SemaphoreDescription:
    """One semaphore; `told` as ``describe`` in body.lua has it."""
    name, data, limit, lasting, held, waiting, now, requests = told
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


def _request(told: list[Any], now: int) -> tuple[bool, RequestDescription]:
    order_id, record, data, description, until = told
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


def sessions(path: str, told: Iterable[list[Any]]) -> list[SessionDescription]:
    """The sessions of a node."""
    found = [
        SessionDescription(
            int(number),
            path,
            description.decode(),
            int(window) / 1e6,
            attached == b"1",
            max(0.0, int(silent) / 1e6),
        )
        for number, description, window, attached, silent in told
    ]
    return sorted(found, key=lambda session: session.id)


def recovered(told: Iterable[list[Any]]) -> list[Recovered]:
    """What a session that was taken over has in queues, in the order of the order ids."""
    found = [
        Recovered(
            int(hold),
            name.decode(),
            int(order_id),
            int(count),
            data,
            not lasting,
            bool(granted),
        )
        for hold, name, order_id, count, data, lasting, granted in told
    ]
    return sorted(found, key=lambda request: request.order_id)
