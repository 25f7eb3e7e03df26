"""Encodings of the model's values that are shared by stores of commands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeConfig,
    Recovered,
    SemaphoreDescription,
    SessionDescription,
)

WHOLE = str(EPHEMERAL_LIMIT)
"""The count of a mutex."""


class Values(Protocol):
    """Module of an engine that decodes the store's replies."""

    def semaphore(self, reply: Any, *, owners: bool, waiters: bool) -> SemaphoreDescription:
        """Decode a semaphore."""
        ...

    def sessions(self, path: str, reply: Iterable[list[Any]]) -> list[SessionDescription]:
        """Decode the sessions of a node, in the order of their ids."""
        ...

    def recovered(self, reply: Iterable[list[Any]]) -> list[Recovered]:
        """Decode the requests of a session that was taken over, in the order of their order ids."""
        ...


def count_text(count: int) -> str:
    """Encode a count; "0" for an invalid one, which the store rejects."""
    if count == EPHEMERAL_LIMIT:
        return WHOLE
    return f"{count:d}" if isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT else "0"


def microseconds(timeout: float | None) -> str:
    """Encode a timeout; "" for none."""
    return "" if timeout is None else str(min(int(timeout * 1e6) + (timeout > 0), 10**15))


def config_text(given: NodeConfig) -> str:
    """Encode a configuration for the store."""
    return json.dumps(asdict(given))


def config_from(stored: str | bytes) -> NodeConfig:
    """Decode a configuration from the store."""
    return NodeConfig(**json.loads(stored))


def included(*, owners: bool, waiters: bool) -> str:
    """Choose the requests that a description includes."""
    return "all" if waiters else "owners" if owners else "none"
