"""Operations on nodes and whole stores: the part of an engine without sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tenure.core import refusals, rules
from tenure.engines._kit.reconnect import Reconnector
from tenure.engines.contract import EngineDefaults
from tenure.engines.postgresql import values
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.statements import Call, Refusal, Statement, settle
from tenure.engines.postgresql.url import PostgresUrl
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.model import NodeConfig, NodeDescription, SemaphoreDescription, SessionDescription

__all__ = ["Administration"]


class Administration(EngineDefaults):
    """Operations that belong to no session.

    Attributes:
        url: the URL of the store, without secrets.
        loop: the event loop on which the engine was opened.
        channel: names this engine to others.
        reconnector: keeps the connection to the server.
    """

    loop: asyncio.AbstractEventLoop
    channel: str
    reconnector: Reconnector[str, PostgresConnection]

    def __init__(self, address: PostgresUrl) -> None:
        """Start closed."""
        self.url = address.url
        self._address = address
        self._open = False
        self._awaited: dict[asyncio.Future[Any], tuple[type[TenureError], str]] = {}

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""
        raise NotImplementedError

    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle events, later in this iteration of the loop."""
        raise NotImplementedError

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
                cause = self.trouble()
                text = f"{self.url} did not answer within {timeout:g} s: {cause or 'no answer'}"
                error = kind(text, node=path)
                error.__cause__ = cause
                answer.set_exception(error)

        return self.loop.call_later(timeout, fail)

    def fail_awaited(self) -> None:
        """Fail all answers, because the engine is being closed."""
        for answer, (kind, path) in list(self._awaited.items()):
            if not answer.done():
                answer.set_exception(kind(f"{self.url} was closed", node=path))

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the reason why the store grants nothing at this moment, if it is known."""
        raise NotImplementedError

    async def _call(self, path: str, function: str, *args: Any) -> Any:
        """Call a function, and return its reply."""
        self._opened()
        future: asyncio.Future[Any] = self.loop.create_future()
        self.send(Call(function, args, partial(settle, future)))
        late = self.limit(future, EngineError, path)
        try:
            reply = await future
        finally:
            late.cancel()
        if isinstance(reply, Refusal):
            raise EngineError(f"{self.url} refused a command: {reply}", node=path)
        if isinstance(reply, list) and reply[:1] == ["no node"]:
            raise refusals.node_not_found(path)
        return reply

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        reply = await self._call(path, "create_node", path, values.config_text(config))
        if reply[0] == "exists" and not exist_ok:
            raise refusals.node_exists(path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        rules.check_path(path)
        done = False
        while not done:  # until no other client alters it meanwhile
            _, old, *_ = await self._call(path, "describe_node", path)
            new = values.config_text(rules.merge_config(values.config(old), config))
            reply = await self._call(path, "alter_node", path, old, new)
            done = reply[0] == "ok"

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_path(path)
        rules.check_droppable(path)
        reply = await self._call(path, "drop_node", path, force, self.channel)
        if reply[0] == "busy":
            raise refusals.node_busy(path, reply[1])
        self.push_all(reply[1])

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        _, config, sessions, semaphores = await self._call(path, "describe_node", path)
        return NodeDescription(path, values.config(config), sessions, semaphores)

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        found: list[str] = await self._call("", "list_nodes")
        return found

    async def store_time(self) -> float:
        """Return the store's wall clock, in seconds since the Unix epoch."""
        return float(await self._call("", "store_time"))

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        rules.check_path(path)
        included = values.included(owners=owners, waiters=waiters)
        _, found = await self._call(path, "describe", path, None, included)
        described = [values.semaphore(each, owners=owners) for each in found]
        return sorted(described, key=lambda each: each.name)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_path(path)
        rules.check_name(name, path)
        included = values.included(owners=owners, waiters=waiters)
        _, found = await self._call(path, "describe", path, values.to_text(name), included)
        if not found:
            raise refusals.semaphore_not_found(path, name)
        return values.semaphore(found[0], owners=owners)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        rules.check_path(path)
        _, found = await self._call(path, "list_sessions", path)
        return values.sessions(path, found)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; returns false if there was none."""
        rules.check_path(path)
        _, found, events = await self._call(path, "end_session", path, session_id, self.channel)
        self.push_all(events)
        return bool(found)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; returns false if there was none."""
        rules.check_path(path)
        reply = await self._call(path, "evict", path, values.to_text(name), order_id, self.channel)
        if reply[0] == "missing":
            rules.check_name(name, path)
            raise refusals.semaphore_not_found(path, name)
        self.push_all(reply[2])
        return bool(reply[1])
