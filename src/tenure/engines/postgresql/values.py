"""Values of the model as functions in the database take and return them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Any

from tenure.model import (
    EPHEMERAL_LIMIT,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

_ESCAPE = "\x1b"


def base64(data: bytes) -> str:
    """Encode bytes."""
    return b64encode(data).decode() if data else ""


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


def semaphore(reply: list[Any], *, owners: bool, waiters: bool) -> SemaphoreDescription:
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
        tuple(found[1]) if waiters else (),
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
