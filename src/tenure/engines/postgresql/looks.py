"""Looks at requests: those of all sessions of a program are one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tenure.engines.postgresql.statements import Argument, Call, Refusal, Statement

__all__ = ["LookedAt", "PostgresLook", "PostgresLooks"]


class LookedAt(Protocol):
    """A session, as a look sees it."""

    id: int
    token: str
    over: bool

    def found(self, requests: dict[int, int], reply: Any) -> bool:
        """Handle the states of requests; return true if one was granted."""
        ...


class PostgresLook(Call):
    """Look at requests of some sessions, as they are attached when this is sent.

    Args:
        requests: the requests of each session, with their states as they are known here; without
            any, the session itself is looked at.
        done: called after the sessions; true if a request was granted.
    """

    __slots__ = ("_done", "_requests")

    def __init__(
        self,
        requests: dict[LookedAt, dict[int, int]],
        done: Callable[[bool], None] | None = None,
    ) -> None:
        """Describe the look."""
        super().__init__("look", (), self._found)
        self._requests = requests
        self._done = done

    def args(self) -> tuple[Argument, ...]:
        """Return the arguments as of now."""
        return ([[each.id, each.token, list(ids)] for each, ids in self._requests.items()],)

    def _found(self, reply: Any) -> None:
        replies = [reply] * len(self._requests) if isinstance(reply, Refusal) else reply
        granted = False
        for (session, requests), each in zip(self._requests.items(), replies, strict=True):
            granted |= session.found(requests, each)
        if self._done is not None:
            self._done(granted)

    def dropped(self, why: str) -> None:  # noqa: ARG002  the sessions have the reason
        """End the sessions, which ended with the store."""
        for session, requests in self._requests.items():
            session.found(requests, ["gone"])


class _Engine(Protocol):
    """The engine, as its looks use it."""

    loop: asyncio.AbstractEventLoop

    def send(self, statement: Statement) -> None: ...


class PostgresLooks:
    """The looks of one engine: those of one iteration of the loop are one statement."""

    def __init__(self, engine: _Engine) -> None:
        """Start with nothing to look at."""
        self._engine = engine
        self._requests: dict[LookedAt, dict[int, int]] = {}

    def add(self, session: LookedAt, requests: dict[int, int]) -> None:
        """Look at requests of a session, with others that are added in this iteration."""
        if not self._requests:
            self._engine.loop.call_soon(self._send)
        self._requests.setdefault(session, {}).update(requests)

    def _send(self) -> None:
        requests, self._requests = self._requests, {}
        requests = {each: ids for each, ids in requests.items() if not each.over}
        if requests:
            self._engine.send(PostgresLook(requests))
