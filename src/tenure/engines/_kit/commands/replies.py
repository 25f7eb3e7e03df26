"""Values in commands, replies to these, and the errors in replies.

A reply is a value, a list that begins with a word such as "ok", or a refusal. A refusal is an
exception of the store's library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from tenure.core import refusals, rules
from tenure.errors import EngineError, TenureError
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


REPEATED = "repeated"
"""Second word of a reply to a repeated command that may have created what exists."""


class Unanswered(Exception):
    """Reply to a command that may have been executed, and is not sent again."""


def text(word: str | bytes) -> str:
    """Return a word of a reply as a text."""
    return word if isinstance(word, str) else word.decode()


def first_word(reply: Any) -> str:
    """Return the first word of a reply; empty for a reply without one."""
    if isinstance(reply, list) and reply and isinstance(reply[0], (str, bytes)):
        return text(reply[0])
    return ""


def settle(future: asyncio.Future[Any], reply: Any) -> None:
    """Set a future's result, unless its caller has cancelled it."""
    if not future.done():
        future.set_result(reply)


def ignore(reply: object) -> None:
    """Ignore a reply that has no receiver."""


def repeated(command: str, reply: Any) -> Any:
    """Return the reply to a command of administration that may have been executed before.

    What the first execution has removed is not there to be removed again.
    """
    word = first_word(reply)
    if word == "exists":
        return ["exists", REPEATED]
    if (command, word) == ("drop_node", "no node"):
        return ["ok"]
    if command in ("end_session", "evict") and word in ("ok", "missing"):
        return ["ok", True]
    return reply


def error(url: str, path: str, name: str, count: int, reply: Any) -> TenureError:
    """Return the error for an unsuccessful reply, in the words of the violated rule."""
    word = first_word(reply)
    try:
        if word == "missing":
            return refusals.semaphore_not_found(path, name)
        if word == "kind":
            rules.check_kind(not reply[1], bool(reply[1]), path, name)
        elif word == "count":
            rules.check_count(count, int(reply[1]), path, name)
        elif word == "shrink":
            rules.check_shrink(count, int(reply[2]), int(reply[3]), path, text(reply[1]))
        elif word == "unbounded":
            rules.check_resizable(int(reply[1]), path, name, ephemeral=False)
        elif word == "busy":
            return refusals.semaphore_busy(path, name)
        elif word == "full":
            return refusals.semaphores_full(path, name)
        elif word == "exists":
            return refusals.semaphore_exists(path, name, int(reply[1]))
        elif word == "released":
            return refusals.request_over(path)
    except TenureError as broken:
        return broken
    return EngineError(
        f"{name!r} on {path}: {url} sent an unexpected reply: {reply!r}", node=path, name=name
    )
