"""Operations on nodes and whole stores: the part of an engine without sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from tenure.core import refusals, rules
from tenure.engines.contract import EngineDefaults
from tenure.engines.redis import values
from tenure.engines.redis.commands import SCRIPTS, LargeRead, Refusal, ScriptCall, Word, settle
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.engines.redis.url import RedisUrl
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    TenureError,
)
from tenure.model import (
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["Administration"]


class Administration(EngineDefaults):
    """Operations that belong to no session.

    Attributes:
        url: the URL of the store, without secrets.
        loop: the event loop on which the engine was opened.
        reconnector: the connection to the server.
    """

    loop: asyncio.AbstractEventLoop
    reconnector: RedisReconnector

    def __init__(self, address: RedisUrl) -> None:
        """Start closed."""
        self.url = address.url
        self._address = address
        self._open = False
        self._awaited: dict[asyncio.Future[Any], tuple[type[TenureError], str]] = {}

    def _opened(self) -> None:
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """Fail an answer that takes too long; returns the timer, to be cancelled."""
        timeout = self._address.connect_timeout + self._address.socket_timeout
        self._awaited[answer] = kind, path
        answer.add_done_callback(self._awaited.pop)

        def fail() -> None:
            if not answer.done():
                self.reconnector.drop("the server does not answer")
                cause = self.reconnector.failure
                text = f"{self.url} did not answer within {timeout:g} s: {cause}"
                error = kind(text, node=path)
                error.__cause__ = cause
                answer.set_exception(error)

        return self.loop.call_later(timeout, fail)

    def fail_awaited(self) -> None:
        """Fail all answers, because the engine is being closed."""
        for answer, (kind, path) in list(self._awaited.items()):
            if not answer.done():
                answer.set_exception(kind(f"{self.url} was closed", node=path))

    async def _run(self, path: str, script: str, *args: Word) -> Any:
        """Run a script, and return its reply."""
        return await self._answer(ScriptCall, path, script, *args)

    async def _read(self, path: str, script: str, *args: Word) -> Any:
        """Run a script whose reply may be large, and return its reply."""
        return await self._answer(LargeRead, path, script, *args)

    async def _answer(self, kind: type[ScriptCall], path: str, script: str, *args: Word) -> Any:
        self._opened()
        future: asyncio.Future[Any] = self.loop.create_future()
        self.reconnector.send(kind(SCRIPTS[script], None, args, partial(settle, future)))
        late = self.limit(future, EngineError, path)
        try:
            reply = await future
        finally:
            late.cancel()
        if isinstance(reply, Refusal):
            raise EngineError(f"{self.url} refused a command: {reply}", node=path)
        if reply[0] == b"no node":
            raise refusals.node_not_found(path)
        return reply

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        text = values.config_text(config)
        reply = await self._run(
            path, "admin", "create", path, text, secrets.token_hex(8), int(exist_ok)
        )
        if reply[0] == b"exists":
            raise refusals.node_exists(path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        rules.check_path(path)
        done = False
        while not done:  # until no other client alters it meanwhile
            _, old = await self._read(path, "admin", "config", path)
            new = values.config_text(rules.merge_config(values.config(old), config))
            reply = await self._run(path, "admin", "alter", path, new, old)
            done = reply[0] == b"ok"

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_path(path)
        rules.check_droppable(path)
        reply = await self._run(path, "admin", "drop", path, int(force))
        if reply[0] == b"busy":
            raise refusals.node_busy(path, reply[1])

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        _, config, sessions, semaphores = await self._read(path, "admin", "node", path)
        return NodeDescription(path, values.config(config), sessions, semaphores)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        _, paths = await self._read("", "admin", "nodes", "")
        return sorted(path.decode() for path in paths)

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        _, microseconds = await self._read("", "admin", "time", "")
        return int(microseconds) / 1e6

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        rules.check_path(path)
        included = values.included(owners=owners, waiters=waiters)
        _, found = await self._read(path, "describe", "", path, included)
        described = [values.semaphore(each, owners=owners, waiters=waiters) for each in found]
        return sorted(described, key=lambda each: each.name)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_path(path)
        rules.check_name(name, path)
        included = values.included(owners=owners, waiters=waiters)
        reply = await self._read(path, "describe", "", path, included, name)
        if reply[0] == b"missing":
            raise refusals.semaphore_not_found(path, name)
        return values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        rules.check_path(path)
        _, found = await self._read(path, "admin", "sessions", path)
        return values.sessions(path, found)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; returns false if there was none."""
        rules.check_path(path)
        reply = await self._run(path, "admin", "end", path, str(session_id))
        return bool(reply[1])

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; returns false if there was none."""
        rules.check_path(path)
        reply = await self._run(path, "admin", "evict", path, name, str(order_id))
        if reply[0] == b"missing":
            rules.check_name(name, path)
            raise refusals.semaphore_not_found(path, name)
        return bool(reply[1])
