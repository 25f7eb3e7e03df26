"""Values of the model as functions in the database take and return them, and their errors."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tenure.core import refusals, rules
from tenure.errors import EngineError, TenureError
from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeConfig,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = [
    "base64",
    "config",
    "config_text",
    "count_text",
    "error",
    "from_text",
    "included",
    "microseconds",
    "recovered",
    "semaphore",
    "sessions",
    "to_text",
]

_ESCAPE = "\x1b"


def base64(data: bytes) -> str:
    """Encode bytes."""
    return b64encode(data).decode() if data else ""


def count_text(count: int) -> str:
    """Encode a count; "0" for an invalid one, which the function rejects."""
    return f"{count:d}" if isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT else "0"


def to_text(given: str) -> str:
    """Encode a text, because PostgreSQL stores no zero byte: an escape character stands for it."""
    if "\0" in given or _ESCAPE in given:
        return given.replace(_ESCAPE, f"{_ESCAPE}1").replace("\0", f"{_ESCAPE}0")
    return given


def from_text(stored: str) -> str:
    """Decode a text."""
    if _ESCAPE in stored:
        return stored.replace(f"{_ESCAPE}0", "\0").replace(f"{_ESCAPE}1", _ESCAPE)
    return stored


def microseconds(timeout: float | None) -> str:
    """Encode a timeout; "" for none."""
    return "" if timeout is None else str(min(int(timeout * 1e6) + (timeout > 0), 10**15))


def config_text(given: NodeConfig) -> str:
    """Encode a configuration for the store."""
    return json.dumps(asdict(given))


def config(stored: str) -> NodeConfig:
    """Decode a configuration from the store."""
    return NodeConfig(**json.loads(stored))


def included(*, owners: bool, waiters: bool) -> str:
    """Choose the requests that a description includes."""
    return "all" if waiters else "owners" if owners else "none"


def semaphore(reply: list[Any], *, owners: bool) -> SemaphoreDescription:
    """Decode a semaphore."""
    name, data, limit, held, waiting, requests = reply
    found: tuple[list[RequestDescription], list[RequestDescription]] = [], []
    for owns, session, order_id, count, its_data, since, timeout, remaining, text in requests or ():
        found[not owns].append(
            RequestDescription(
                *(session, order_id, count, b64decode(its_data)),
                since=since,
                timeout=timeout,
                remaining=remaining,
                session_description=from_text(text),
            )
        )
    return SemaphoreDescription(
        from_text(name),
        b64decode(data),
        EPHEMERAL_LIMIT if limit is None else limit,
        held,
        limit is None,
        tuple(found[0]) if owners else (),
        tuple(found[1]),
        waiting,
    )


def sessions(path: str, reply: Iterable[list[Any]]) -> list[SessionDescription]:
    """Decode the sessions of a node."""
    return [
        SessionDescription(number, path, from_text(text), window, attached, silent)
        for number, text, window, attached, silent in reply
    ]


def recovered(reply: Iterable[list[Any]]) -> list[Recovered]:
    """Decode the requests of a session that was taken over."""
    return [
        Recovered(
            *(request_id, from_text(name), order_id, count, b64decode(data), ephemeral, granted)
        )
        for request_id, name, order_id, count, data, ephemeral, granted in reply
    ]


def error(url: str, path: str, name: str, count: int, reply: list[Any]) -> TenureError:
    """Return the error for a function's refusal, in the words of the broken rule."""
    code = reply[0]
    try:
        if code == "missing":
            return refusals.semaphore_not_found(path, name)
        if code == "kind":
            rules.check_kind(not reply[1], bool(reply[1]), path, name)
        elif code == "count":
            rules.check_count(count, reply[1], path, name)
        elif code == "shrink":
            rules.check_shrink(count, reply[2], reply[3], path, reply[1])
        elif code == "busy":
            return refusals.semaphore_busy(path, name)
        elif code == "full":
            return refusals.semaphores_full(path, name)
        elif code == "exists":
            return refusals.semaphore_exists(path, name, reply[1])
        elif code == "released":
            return refusals.request_over(path)
    except TenureError as broken:
        return broken
    return EngineError(
        f"{name!r} on {path}: {url} sent an unexpected reply: {reply!r}", node=path, name=name
    )
